//! The shape of a model's routers, from its `config.json`.

use kv_layout::router::{HIDDEN_STEP, MAX_EXPERTS, MAX_SELECTED};
use serde::{Deserialize, Serialize};

use crate::error::RouterError;
use crate::ops::check_hidden;
use crate::selection::Selection;

/// The shape of the routers of a DeepSeek-V4 checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RouterConfig {
    /// Width of the hidden state, a multiple of 32.
    pub hidden_size: u32,
    /// Experts of a layer, a multiple of 32 up to 512.
    pub experts: u32,
    /// Experts of a token, 1 to 8.
    pub selected: u32,
    /// What the weights of a token add up to.
    pub scaling: f32,
    /// Token ids there are.
    pub vocabulary: u32,
    /// Layers, the multi-token-prediction layers included.
    pub layers: u32,
    /// How many of them, from the first on, look experts up by token id.
    pub hash_layers: u32,
}

/// How a layer chooses experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterMode {
    /// By score.
    Dense,
    /// By token id.
    Hash,
}

/// The fields of `config.json` that matter here, under their names there.
#[derive(Deserialize)]
struct RawConfig {
    hidden_size: u32,
    n_routed_experts: u32,
    num_experts_per_tok: u32,
    routed_scaling_factor: f32,
    vocab_size: u32,
    num_hidden_layers: u32,
    #[serde(default)]
    num_nextn_predict_layers: u32,
    num_hash_layers: u32,
    #[serde(default)]
    scoring_func: Option<String>,
    #[serde(default)]
    norm_topk_prob: Option<bool>,
}

impl RouterConfig {
    /// Reads a checkpoint's `config.json`.
    ///
    /// # Errors
    /// [`RouterError::Json`]; [`RouterError::OtherRouter`] for another scoring function than
    /// `sqrtsoftplus`, or weights that are not normalised; as [`Self::validate`].
    pub fn from_json(json: &str) -> Result<Self, RouterError> {
        let raw: RawConfig = serde_json::from_str(json)?;
        let other = |field, found, expected| RouterError::OtherRouter { field, found, expected };
        if let Some(found) = raw.scoring_func.filter(|found| found != "sqrtsoftplus") {
            return Err(other("scoring_func", found, "sqrtsoftplus"));
        }
        if raw.norm_topk_prob == Some(false) {
            return Err(other("norm_topk_prob", "false".to_owned(), "true"));
        }
        let config = Self {
            hidden_size: raw.hidden_size,
            experts: raw.n_routed_experts,
            selected: raw.num_experts_per_tok,
            scaling: raw.routed_scaling_factor,
            vocabulary: raw.vocab_size,
            layers: raw.num_hidden_layers.saturating_add(raw.num_nextn_predict_layers),
            hash_layers: raw.num_hash_layers,
        };
        config.validate()?;
        Ok(config)
    }

    /// A model by name: `flash` (V4-Flash), `pro` (V4-Pro), or `tiny`, for tests and CPUs.
    #[must_use]
    pub fn preset(name: &str) -> Option<Self> {
        let (hidden_size, experts, scaling, vocabulary, layers, hash_layers) = match name {
            "flash" => (4096, 256, 1.5, 129_280, 44, 3),
            "pro" => (7168, 384, 2.5, 129_280, 62, 3),
            "tiny" => (256, 64, 1.5, 1024, 5, 2),
            _ => return None,
        };
        Some(Self { hidden_size, experts, selected: 6, scaling, vocabulary, layers, hash_layers })
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`RouterError::Config`] names the field, its value and its limits; [`RouterError::HiddenSize`] and
    /// [`RouterError::Selection`] for numbers that are no multiples of 32.
    pub fn validate(&self) -> Result<(), RouterError> {
        let range = |setting, value: f64, least: f64, most: f64| {
            if (least..=most).contains(&value) {
                Ok(())
            } else {
                Err(RouterError::Config { setting, value, least, most })
            }
        };
        range("hidden_size", self.hidden_size.into(), HIDDEN_STEP.into(), f64::from(1 << 20))?;
        range("experts", self.experts.into(), 1.0, MAX_EXPERTS.into())?;
        range("selected", self.selected.into(), 1.0, MAX_SELECTED.into())?;
        range("scaling", self.scaling.into(), f64::from(f32::MIN_POSITIVE), f64::from(1 << 20))?;
        range("vocabulary", self.vocabulary.into(), 1.0, f64::from(1 << 28))?;
        range("layers", self.layers.into(), 1.0, 2048.0)?;
        range("hash_layers", self.hash_layers.into(), 0.0, self.layers.into())?;
        check_hidden(self.hidden_size)?;
        self.selection()?;
        Ok(())
    }

    /// How layer `layer` chooses experts; layers are counted from 0 through the trunk, then through the
    /// multi-token-prediction layers.
    ///
    /// # Errors
    /// [`RouterError::NoSuchLayer`].
    pub fn mode(&self, layer: u32) -> Result<RouterMode, RouterError> {
        let layers = self.layers;
        match layer {
            _ if layer >= layers => Err(RouterError::NoSuchLayer { layer, layers }),
            _ if layer < self.hash_layers => Ok(RouterMode::Hash),
            _ => Ok(RouterMode::Dense),
        }
    }

    /// The numbers of experts, as the operations take them.
    ///
    /// # Errors
    /// [`RouterError::Selection`].
    pub fn selection(&self) -> Result<Selection, RouterError> {
        Selection::new(self.experts, self.selected, self.scaling)
    }
}
