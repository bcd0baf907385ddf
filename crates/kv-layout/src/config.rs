//! `ModelConfig`: what the cache needs to know of a checkpoint, from its `config.json`.

use alloc::string::String;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use crate::geometry::{
    COMPRESS_ROPE_THETA, CSA_RATIO, HCA_RATIO, HEAD_DIM, INDEX_DIM, LayerKind, NORM_EPSILON,
    ROPE_DIM, WINDOW, YARN_BETA_FAST, YARN_BETA_SLOW, YARN_FACTOR, YARN_TRAINED_CONTEXT,
};

/// The shape of a DeepSeek-V4 checkpoint, as far as its cache depends on it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// Name for people: the preset's, or the checkpoint's architecture.
    pub name: String,
    /// Attention kind of every layer, trunk first, then the multi-token-prediction layers.
    pub layers: Vec<LayerKind>,
    /// How many of `layers` are multi-token-prediction layers (the last ones).
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
}

/// Why a `config.json` was refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Not JSON, or a field of the wrong type.
    #[error("config.json cannot be read: {0}")]
    Json(#[from] serde_json::Error),
    /// `compress_ratios` is absent. It is never guessed: the two released models differ.
    #[error("config.json has no `compress_ratios`; the layer schedule cannot be guessed")]
    NoCompressRatios,
    /// A ratio other than 0, 4 or 128.
    #[error("compress_ratios[{layer}] is {value}; a DeepSeek-V4 layer has 0, 4 or 128")]
    BadRatio {
        /// Index into `compress_ratios`.
        layer: usize,
        /// The value found.
        value: i64,
    },
    /// One ratio per layer was expected.
    #[error(
        "compress_ratios has {found} entries; {layers} layers and {mtp_layers} MTP layers need {}",
        layers + mtp_layers
    )]
    BadLength {
        /// Entries found.
        found: usize,
        /// `num_hidden_layers`.
        layers: u32,
        /// `num_nextn_predict_layers`.
        mtp_layers: u32,
    },
    /// A dimension the kernels are not built for.
    #[error("{field} is {value}; the kernels are built for {expected}")]
    BadDimension {
        /// The field of `config.json`.
        field: &'static str,
        /// The value found.
        value: u32,
        /// The only value supported.
        expected: u32,
    },
    /// A constant of the compressors or of their rotary embedding that the kernels are not built for.
    #[error("{field} is {value}; the kernels are built for {expected}")]
    BadConstant {
        /// The field of `config.json`.
        field: &'static str,
        /// The value found.
        value: f64,
        /// The only value supported.
        expected: f64,
    },
    /// Another scaling of the rotary embedding than YaRN.
    #[error("rope_scaling.type is {found:?}; the kernels are built for \"yarn\"")]
    BadScaling {
        /// The type found.
        found: String,
    },
    /// A count outside the range the cache can address.
    #[error("{field} is {value}; it must be between {least} and {most}")]
    OutOfRange {
        /// The field of `config.json`.
        field: &'static str,
        /// The value found.
        value: u32,
        /// Least value allowed.
        least: u32,
        /// Greatest value allowed.
        most: u32,
    },
}

/// The fields of `config.json` that matter here, under their names there.
#[derive(Deserialize)]
struct RawConfig {
    #[serde(default)]
    model_type: Option<String>,
    num_hidden_layers: u32,
    #[serde(default)]
    num_nextn_predict_layers: u32,
    #[serde(default)]
    compress_ratios: Option<Vec<i64>>,
    hidden_size: u32,
    head_dim: u32,
    qk_rope_head_dim: u32,
    sliding_window: u32,
    q_lora_rank: u32,
    index_n_heads: u32,
    index_head_dim: u32,
    index_topk: u32,
    max_position_embeddings: u32,
    #[serde(default)]
    compress_rope_theta: Option<f64>,
    #[serde(default)]
    rms_norm_eps: Option<f64>,
    #[serde(default)]
    rope_scaling: Option<RawScaling>,
}

/// YaRN's constants, which apply to layers with compressed entries.
#[derive(Deserialize)]
struct RawScaling {
    #[serde(rename = "type", alias = "rope_type", default)]
    kind: Option<String>,
    #[serde(default)]
    factor: Option<f64>,
    #[serde(default)]
    beta_fast: Option<f64>,
    #[serde(default)]
    beta_slow: Option<f64>,
    #[serde(default)]
    original_max_position_embeddings: Option<f64>,
}

impl RawConfig {
    /// Refuses constants other than those that kernels and rotary frequencies are built for. A field
    /// that is absent has the released models' value.
    fn check_constants(&self) -> Result<(), ConfigError> {
        let check = |field, found: Option<f64>, expected: f64| match found {
            Some(value) if value != expected => {
                Err(ConfigError::BadConstant { field, value, expected })
            }
            _ => Ok(()),
        };
        check("compress_rope_theta", self.compress_rope_theta, COMPRESS_ROPE_THETA)?;
        check("rms_norm_eps", self.rms_norm_eps, NORM_EPSILON)?;
        let Some(scaling) = &self.rope_scaling else { return Ok(()) };
        if let Some(found) = scaling.kind.clone().filter(|kind| kind != "yarn") {
            return Err(ConfigError::BadScaling { found });
        }
        let trained = scaling.original_max_position_embeddings;
        check("rope_scaling.factor", scaling.factor, YARN_FACTOR)?;
        check("rope_scaling.beta_fast", scaling.beta_fast, YARN_BETA_FAST)?;
        check("rope_scaling.beta_slow", scaling.beta_slow, YARN_BETA_SLOW)?;
        check("rope_scaling.original_max_position_embeddings", trained, YARN_TRAINED_CONTEXT)
    }
}

impl ModelConfig {
    /// Names [`Self::preset`] accepts.
    pub const PRESETS: [&'static str; 3] = ["flash", "pro", "tiny"];

    /// Reads a checkpoint's `config.json`.
    ///
    /// # Errors
    /// [`ConfigError`] names the field, the value and what was expected.
    pub fn from_json(json: &str) -> Result<Self, ConfigError> {
        let raw: RawConfig = serde_json::from_str(json)?;
        let fixed = |field, value, expected| {
            if value == expected {
                Ok(())
            } else {
                Err(ConfigError::BadDimension { field, value, expected })
            }
        };
        raw.check_constants()?;
        fixed("head_dim", raw.head_dim, HEAD_DIM)?;
        fixed("qk_rope_head_dim", raw.qk_rope_head_dim, ROPE_DIM)?;
        fixed("sliding_window", raw.sliding_window, WINDOW)?;
        fixed("index_head_dim", raw.index_head_dim, INDEX_DIM)?;
        let range = |field, value, least, most| {
            if (least..=most).contains(&value) {
                Ok(())
            } else {
                Err(ConfigError::OutOfRange { field, value, least, most })
            }
        };
        range("num_hidden_layers", raw.num_hidden_layers, 1, 1024)?;
        range("num_nextn_predict_layers", raw.num_nextn_predict_layers, 0, 64)?;
        range("hidden_size", raw.hidden_size, 1, 1 << 20)?;
        range("q_lora_rank", raw.q_lora_rank, 1, 1 << 20)?;
        range("index_n_heads", raw.index_n_heads, 1, 1024)?;
        range("index_topk", raw.index_topk, 1, 2048)?;
        range("max_position_embeddings", raw.max_position_embeddings, 1, 1 << 30)?;

        let ratios = raw.compress_ratios.ok_or(ConfigError::NoCompressRatios)?;
        let expected = raw.num_hidden_layers + raw.num_nextn_predict_layers;
        if ratios.len() != expected as usize {
            return Err(ConfigError::BadLength {
                found: ratios.len(),
                layers: raw.num_hidden_layers,
                mtp_layers: raw.num_nextn_predict_layers,
            });
        }
        let layers = ratios
            .iter()
            .enumerate()
            .map(|(layer, &value)| kind_of_ratio(layer, value))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            name: raw.model_type.unwrap_or_else(|| String::from("checkpoint")),
            layers,
            mtp_layers: raw.num_nextn_predict_layers,
            hidden_size: raw.hidden_size,
            q_lora_rank: raw.q_lora_rank,
            index_heads: raw.index_n_heads,
            index_topk: raw.index_topk,
            max_context: raw.max_position_embeddings,
        })
    }

    /// A model by name: `flash` (V4-Flash), `pro` (V4-Pro), or `tiny` (five layers of every kind
    /// with the real head dimensions and short lists, for tests and CPUs). Written by hand after the
    /// released checkpoints (docs/specification.md, section 2).
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
        })
    }

    /// Layers of the given kind, the multi-token-prediction layers included.
    #[must_use]
    pub fn count(&self, kind: LayerKind) -> u32 {
        self.layers.iter().filter(|&&layer| layer == kind).count() as u32
    }
}

fn kind_of_ratio(layer: usize, value: i64) -> Result<LayerKind, ConfigError> {
    match value {
        0 => Ok(LayerKind::Swa),
        v if v == i64::from(CSA_RATIO) => Ok(LayerKind::Csa),
        v if v == i64::from(HCA_RATIO) => Ok(LayerKind::Hca),
        _ => Err(ConfigError::BadRatio { layer, value }),
    }
}
