//! The weights of a layer on the host.

use dsv4_kv::IndexerWeights;
use dsv4_kv_router::RouterWeights;
use kv_layout::geometry::LayerKind;

use crate::attention::Attention;
use crate::experts::Experts;
use crate::hyper::HyperConnection;
use crate::linear::Linear;
use crate::norm::RmsNorm;

/// What projects the keys and gates of a compressor; the cache pools them.
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

/// What a CSA layer has beside its window.
#[derive(Clone, Debug)]
pub struct Csa {
    /// Makes entries.
    pub main: Compressor,
    /// Makes the indexer's keys.
    pub index: Compressor,
    /// Picks entries.
    pub indexer: IndexerWeights,
}

/// What a layer has beside its window.
#[derive(Clone, Debug)]
pub enum Compressed {
    /// Nothing.
    Swa,
    /// An entry for every 4 tokens, of which the indexer picks.
    Csa(Box<Csa>),
    /// An entry for every 128 tokens, made by this.
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

/// One layer: attention, then experts, each inside a hyper-connection and behind a norm.
#[derive(Clone, Debug)]
pub struct Layer {
    /// Around attention.
    pub attention_streams: HyperConnection,
    /// `attn_norm`.
    pub attention_norm: RmsNorm,
    /// Attention.
    pub attention: Attention,
    /// Its compressed entries.
    pub compressed: Compressed,
    /// Around the experts.
    pub experts_streams: HyperConnection,
    /// `ffn_norm`.
    pub experts_norm: RmsNorm,
    /// What chooses experts.
    pub router: RouterWeights<'static>,
    /// The experts.
    pub experts: Experts,
}
