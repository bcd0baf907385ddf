//! The shape of a model's routers, from its configuration.

use dsv4_kv_model_files::{Config, Routing};
use kv_layout::router::{HIDDEN_STEP, MAX_EXPERTS, MAX_SELECTED};

use crate::error::RouterError;
use crate::ops::check_hidden;
use crate::selection::{Selection, check_scaling};

/// The shape of the routers of a DeepSeek-V4 checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct RouterConfig {
    /// Width of the hidden state, a multiple of 32.
    pub hidden_size: u32,
    /// Experts of a layer, a multiple of 32 up to 512.
    pub experts: u32,
    /// Experts of a token, 1 to 8.
    pub selected: u32,
    /// The sum of a token's weights.
    pub scaling: f32,
    /// Size of the vocabulary.
    pub vocabulary: u32,
    /// How each layer chooses experts; multi-token-prediction layers come last.
    pub routing: Vec<Routing>,
}

impl From<&Config> for RouterConfig {
    fn from(config: &Config) -> Self {
        let experts = &config.experts;
        Self {
            hidden_size: config.hidden_size,
            experts: experts.routed,
            selected: experts.per_token,
            scaling: experts.scaling,
            vocabulary: config.vocab_size,
            routing: experts.routing.clone(),
        }
    }
}

impl RouterConfig {
    /// A model by name: `flash` (V4-Flash), `pro` (V4-Pro), or `tiny`, for tests and CPUs.
    #[must_use]
    pub fn preset(name: &str) -> Option<Self> {
        let (hidden_size, experts, scaling, vocabulary, layers, hash_layers) = match name {
            "flash" => (4096, 256, 1.5, 129_280, 44, 3),
            "pro" => (7168, 384, 2.5, 129_280, 62, 3),
            "tiny" => (256, 64, 1.5, 1024, 5, 2),
            _ => return None,
        };
        let mut routing = vec![Routing::Hash; hash_layers];
        routing.resize(layers, Routing::Learned);
        Some(Self { hidden_size, experts, selected: 6, scaling, vocabulary, routing })
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`RouterError::Config`] names the field, its value and its limits; [`RouterError::HiddenSize`] and
    /// [`RouterError::Selection`] for values that are not multiples of 32.
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
        check_scaling(self.scaling)?;
        range("vocabulary", self.vocabulary.into(), 1.0, f64::from(1 << 28))?;
        range("layers", self.routing.len() as f64, 1.0, 2048.0)?;
        check_hidden(self.hidden_size)?;
        self.selection()?;
        Ok(())
    }

    /// How layer `layer` chooses experts; layers are counted from 0 through the trunk, then through the
    /// multi-token-prediction layers.
    ///
    /// # Errors
    /// [`RouterError::NoSuchLayer`].
    pub fn mode(&self, layer: u32) -> Result<Routing, RouterError> {
        let layers = self.routing.len() as u32;
        let found = self.routing.get(layer as usize);
        found.copied().ok_or(RouterError::NoSuchLayer { layer, layers })
    }

    /// The numbers of experts, in the form that the operations take.
    ///
    /// # Errors
    /// [`RouterError::Selection`].
    pub fn selection(&self) -> Result<Selection, RouterError> {
        Selection::new(self.experts, self.selected, self.scaling)
    }
}
