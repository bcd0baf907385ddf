//! `ModelConfig`: the properties of a model that the cache needs, from its `config.json`.
//!
//! A field that changes a result is read in one place, and used or refused by name and value; none is guessed. Unknown
//! fields at the top level are ignored.
//!
//! | file | what it holds |
//! |---|---|
//! | `mod.rs` | [`ModelConfig`] |
//! | `fields.rs` | [`Fields`]: fields by name and type |
//! | `schedule.rs` | the kind of every layer |
//! | `rope.rs` | [`RopeConstants`]: the rotary embeddings |
//! | `error.rs` | [`ConfigError`] |

use alloc::string::String;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::geometry::{HEAD_DIM, INDEX_DIM, LayerKind, NORM_EPSILON, WINDOW};
use crate::index_row::QUERY_HEADS;

mod error;
mod fields;
mod rope;
mod schedule;

pub use error::ConfigError;
pub use fields::{FieldValue, Fields};
pub use rope::{CompressRope, RopeConstants};
use schedule::Schedule;

/// Most entries that a list of the indexer may have.
const MAX_LISTED: u32 = 2048;
/// The number of the indexer's heads must be a multiple of this, because of its projection.
const INDEX_HEAD_STEP: u32 = 32;

/// The shape of a DeepSeek-V4 model, as far as its cache depends on it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// Name for people: the preset's, or the architecture that `config.json` names.
    pub name: String,
    /// Attention kind of every layer, trunk first, then the multi-token-prediction layers.
    pub layers: Vec<LayerKind>,
    /// Number of multi-token-prediction layers: the last ones of `layers`.
    pub mtp_layers: u32,
    /// Width of the residual stream.
    pub hidden_size: u32,
    /// Rank of the query projection that also feeds the indexer.
    pub q_lora_rank: u32,
    /// Query heads of the indexer.
    pub index_heads: u32,
    /// Entries the indexer picks per query.
    pub index_topk: u32,
    /// Longest context, in tokens.
    pub max_context: u32,
    /// Base of the rotary frequencies of layers with a window alone.
    #[serde(default = "rope_theta")]
    pub rope_theta: f64,
    /// Rotary embedding of the layers with compressed entries.
    pub compress_rope: CompressRope,
}

impl ModelConfig {
    /// Names [`Self::preset`] accepts.
    pub const PRESETS: [&'static str; 3] = ["flash", "pro", "tiny"];

    /// Reads a model's `config.json`, as released or as transformers' `save_pretrained` writes it.
    ///
    /// # Errors
    /// [`ConfigError`] names the field, the value and what was expected.
    pub fn from_json(json: &str) -> Result<Self, ConfigError> {
        Self::read(&Fields::parse(json)?)
    }

    /// Takes the cache's part of a `config.json`.
    ///
    /// # Errors
    /// As [`Self::from_json`].
    pub fn read(fields: &Fields) -> Result<Self, ConfigError> {
        let name = fields.need("model_type")?;
        fields.one_of("model_type", &[json!("deepseek_v4")])?;
        fields.dimension("head_dim", HEAD_DIM)?;
        fields.dimension("sliding_window", WINDOW)?;
        fields.dimension("index_head_dim", INDEX_DIM)?;
        fields.dimension("num_key_value_heads", 1)?;
        // Compiled into the kernels that norm entries and keys.
        fields.need::<f64>("rms_norm_eps")?;
        fields.constant("rms_norm_eps", NORM_EPSILON)?;
        let Schedule { layers, mtp_layers } = Schedule::read(fields)?;
        let rope = RopeConstants::read(fields)?;
        Ok(Self {
            name,
            layers,
            mtp_layers,
            hidden_size: fields.count("hidden_size", 1, 1 << 20)?,
            q_lora_rank: fields.count("q_lora_rank", 1, 1 << 20)?,
            index_heads: index_heads(fields)?,
            index_topk: fields.count("index_topk", 1, MAX_LISTED)?,
            max_context: fields.count("max_position_embeddings", 1, 1 << 30)?,
            rope_theta: rope.theta,
            compress_rope: rope.compress,
        })
    }

    /// A model by name: `flash` (V4-Flash), `pro` (V4-Pro), or `tiny` (five layers of every kind
    /// with the real head dimensions and short lists, for tests and CPUs). Written by hand after the
    /// released models (docs/specification.md, section 2).
    #[must_use]
    pub fn preset(name: &str) -> Option<Self> {
        use LayerKind::{Csa, Hca, Swa};
        let alternate = |first: [LayerKind; 2], pairs: usize| {
            let mut layers = Vec::from(first);
            (0..pairs).for_each(|_| layers.extend([Csa, Hca]));
            layers.extend([Csa, Swa]);
            layers
        };
        let (layers, mtp_layers, hidden_size, q_lora_rank, index_topk) = match name {
            "flash" => (alternate([Swa, Swa], 20), 1, 4096, 1024, 512),
            "pro" => (alternate([Hca, Hca], 29), 1, 7168, 1536, 1024),
            "tiny" => (Vec::from([Swa, Csa, Hca, Csa, Swa]), 1, 256, 128, 16),
            _ => return None,
        };
        Some(Self {
            name: String::from(name),
            layers,
            mtp_layers,
            hidden_size,
            q_lora_rank,
            index_heads: 64,
            index_topk,
            max_context: crate::geometry::MAX_CONTEXT,
            rope_theta: rope_theta(),
            compress_rope: CompressRope::RELEASED,
        })
    }

    /// Layers of the given kind, the multi-token-prediction layers included.
    #[must_use]
    pub fn count(&self, kind: LayerKind) -> u32 {
        self.layers.iter().filter(|&&layer| layer == kind).count() as u32
    }
}

/// [`ModelConfig::rope_theta`] of every released model.
const fn rope_theta() -> f64 {
    10_000.0
}

/// Heads of the indexer: its kernels take up to 64, and the projection of their weights has columns in steps of 32.
fn index_heads(fields: &Fields) -> Result<u32, ConfigError> {
    let name = "index_n_heads";
    let value = fields.count(name, 1, QUERY_HEADS)?;
    if value.is_multiple_of(INDEX_HEAD_STEP) {
        return Ok(value);
    }
    let field = fields.path_of(name);
    Err(ConfigError::NotMultiple { field, value, multiple: INDEX_HEAD_STEP })
}
