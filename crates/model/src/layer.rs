//! The weights of a layer on the host.

use dsv4_kv::IndexerWeights;
use dsv4_kv_router::RouterWeights;
use kv_layout::geometry::LayerKind;

use crate::attention::Attention;
use crate::experts::Experts;
use crate::hyper::HyperConnection;
use crate::linear::Linear;
use crate::norm::RmsNorm;

/// The weights of a compressor. They project keys and gates on the host; the cache pools these.
#[derive(Clone, Debug)]
pub struct Compressor {
    /// `wkv`, `[columns, hidden]`.
    pub kv: Linear,
    /// `wgate`, `[columns, hidden]`.
    pub gate: Linear,
    /// `ape`, `[ratio, columns]`: the position bias of the gates.
    pub position_bias: Vec<f32>,
    /// `norm`, `[channels]`.
    pub norm: Vec<f32>,
}

/// The compressors and the indexer of a CSA layer.
#[derive(Clone, Debug)]
pub struct Csa {
    /// The compressor of entries.
    pub main: Compressor,
    /// The compressor of indexer keys.
    pub index: Compressor,
    /// The weights of the indexer, which picks entries.
    pub indexer: IndexerWeights,
}

/// The compressed entries of a layer, in addition to its window.
#[derive(Clone, Debug)]
pub enum Compressed {
    /// None.
    Swa,
    /// An entry for every 4 tokens; the indexer picks the entries to read.
    Csa(Box<Csa>),
    /// An entry for every 128 tokens; all are read.
    Hca(Compressor),
}

impl Compressed {
    /// The layer's kind.
    #[must_use]
    pub fn kind(&self) -> LayerKind {
        match self {
            Self::Swa => LayerKind::Swa,
            Self::Csa(_) => LayerKind::Csa,
            Self::Hca(_) => LayerKind::Hca,
        }
    }
}

/// One layer: attention, then experts, each after a norm and inside a hyper-connection.
#[derive(Clone, Debug)]
pub struct Layer {
    /// The hyper-connection around attention.
    pub attention_streams: HyperConnection,
    /// `attn_norm`.
    pub attention_norm: RmsNorm,
    /// Attention.
    pub attention: Attention,
    /// The weights for compressed entries.
    pub compressed: Compressed,
    /// The hyper-connection around the experts.
    pub experts_streams: HyperConnection,
    /// `ffn_norm`.
    pub experts_norm: RmsNorm,
    /// The weights of the router, which chooses experts.
    pub router: RouterWeights<'static>,
    /// The experts.
    pub experts: Experts,
}
