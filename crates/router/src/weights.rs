//! A router's weights, from slices or from a model's files.

use std::borrow::Cow;

use dsv4_kv_device::bf16;
use dsv4_kv_model_files::{ModelFileError, ModelFiles, Routing};

use crate::config::RouterConfig;
use crate::error::RouterError;

/// The weights of one layer's router. `choice` decides how experts are chosen.
#[derive(Clone, Debug)]
pub struct RouterWeights<'a> {
    /// `[experts, hidden]` BF16: `gate.weight`.
    pub gate: Cow<'a, [bf16]>,
    /// How experts are chosen.
    pub choice: ChoiceWeights<'a>,
}

/// What chooses a token's experts, in host memory.
#[derive(Clone, Debug)]
pub enum ChoiceWeights<'a> {
    /// `[experts]` f32, added to the scores: `gate.bias`.
    Bias(Cow<'a, [f32]>),
    /// `[vocabulary, selected]` i32: the experts of each token id, `gate.tid2eid`.
    Table(Cow<'a, [i32]>),
}

impl RouterWeights<'_> {
    /// The weights of layer `layer` of a model, whose configuration says how the layer chooses. Layers
    /// are counted through the trunk, then through the multi-token-prediction layers.
    ///
    /// # Errors
    /// [`RouterError::NoSuchLayer`]; [`RouterError::ModelFile`] for a tensor that is missing, or of another
    /// shape or type, or for a second bias, of image tokens; [`RouterError::NoSuchExpert`].
    pub fn of_layer(model_files: &ModelFiles, layer: u32) -> Result<Self, RouterError> {
        let config = RouterConfig::from(model_files.config());
        let mode = config.mode(layer)?;
        let prefix = format!("{}.ffn.gate", model_files.layer_prefix(layer));
        let RouterConfig { hidden_size, experts, selected, vocabulary, .. } = config;
        let [hidden, experts, selected, vocabulary] =
            [hidden_size, experts, selected, vocabulary].map(u64::from);
        let gate = model_files.finite_bf16(&format!("{prefix}.weight"), &[experts, hidden])?;
        let choice = match mode {
            Routing::Learned => {
                // Models with vision: the bias of image tokens.
                let name = format!("{prefix}.bias_vl");
                if model_files.contains(&name) {
                    return Err(ModelFileError::Unused { name, count: 1 }.into());
                }
                let bias = model_files.finite_f32(&format!("{prefix}.bias"), &[experts])?;
                ChoiceWeights::Bias(bias.into())
            }
            Routing::Hash => {
                let name = format!("{prefix}.tid2eid");
                let table = model_files.i64(&name, &[vocabulary, selected])?;
                check_experts(&name, table.iter().copied(), &config)?;
                ChoiceWeights::Table(table.into_iter().map(|expert| expert as i32).collect())
            }
        };
        Ok(Self { gate: gate.into(), choice })
    }

    /// Checks lengths, and that a table lists only existing experts.
    ///
    /// # Errors
    /// [`RouterError::Shape`]; [`RouterError::NoSuchExpert`].
    pub(crate) fn check(&self, config: &RouterConfig) -> Result<(), RouterError> {
        let length = |name: &str, found: usize, expected: &[u32]| {
            let expected: Vec<usize> = expected.iter().map(|&extent| extent as usize).collect();
            if found == expected.iter().product::<usize>() {
                return Ok(());
            }
            Err(RouterError::Shape { name: name.to_owned(), found: vec![found], expected })
        };
        length("gate.weight", self.gate.len(), &[config.experts, config.hidden_size])?;
        match &self.choice {
            ChoiceWeights::Bias(bias) => length("gate.bias", bias.len(), &[config.experts]),
            ChoiceWeights::Table(table) => {
                length("gate.tid2eid", table.len(), &[config.vocabulary, config.selected])?;
                check_experts("gate.tid2eid", table.iter().map(|&id| id.into()), config)
            }
        }
    }
}

/// Refuses a table that lists an expert that does not exist.
fn check_experts(
    name: &str,
    listed: impl Iterator<Item = i64>,
    config: &RouterConfig,
) -> Result<(), RouterError> {
    let experts = config.experts;
    for (at, expert) in listed.enumerate() {
        if !(0..i64::from(experts)).contains(&expert) {
            let (name, token) = (name.to_owned(), at / config.selected as usize);
            return Err(RouterError::NoSuchExpert { name, token, expert, experts });
        }
    }
    Ok(())
}
