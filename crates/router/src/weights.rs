//! A router's weights, as slices or out of a checkpoint.

use std::borrow::Cow;

use dsv4_kv_device::bf16;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::config::{RouterConfig, RouterMode};
use crate::error::RouterError;

/// The weights of one layer's router. What chooses the experts is fixed by what is given.
#[derive(Clone, Debug)]
pub struct RouterWeights<'a> {
    /// `[experts, hidden]` BF16: `gate.weight`.
    pub gate: Cow<'a, [bf16]>,
    /// What chooses the experts.
    pub choice: ChoiceWeights<'a>,
}

/// What chooses a token's experts, in host memory.
#[derive(Clone, Debug)]
pub enum ChoiceWeights<'a> {
    /// `[experts]` f32, added to the scores: `gate.bias`.
    Bias(Cow<'a, [f32]>),
    /// `[vocabulary, selected]` experts of each token id: `gate.tid2eid`.
    Table(Cow<'a, [i32]>),
}

impl<'a> RouterWeights<'a> {
    /// The weights of layer `layer` out of a safetensors file, under the names that the model's layers
    /// have in released checkpoints: `layers.{layer}.ffn.gate.{weight, bias, tid2eid}`. Draft (MTP)
    /// layers have other names there: [`Self::named`].
    ///
    /// # Errors
    /// As [`Self::named`]; [`RouterError::NoSuchLayer`].
    pub fn of_layer(
        file: &SafeTensors<'a>,
        config: &RouterConfig,
        layer: u32,
    ) -> Result<Self, RouterError> {
        let mode = config.mode(layer)?;
        Self::named(file, config, mode, &format!("layers.{}.ffn.gate", layer))
    }

    /// The tensors `{prefix}.weight` and, by `mode`, `{prefix}.bias` or `{prefix}.tid2eid`.
    ///
    /// # Errors
    /// [`RouterError::SafeTensors`] for a missing tensor; [`RouterError::Shape`]; [`RouterError::Type`]
    /// unless the gate is BF16, the bias F32 and the table I64 or I32; [`RouterError::NoSuchExpert`].
    pub fn named(
        file: &SafeTensors<'a>,
        config: &RouterConfig,
        mode: RouterMode,
        prefix: &str,
    ) -> Result<Self, RouterError> {
        let [experts, hidden, vocabulary, selected] =
            [config.experts, config.hidden_size, config.vocabulary, config.selected]
                .map(|extent| extent as usize);
        let gate = Tensor::find(file, format!("{prefix}.weight"), &[experts, hidden])?;
        let gate = gate.bf16()?;
        let choice = match mode {
            RouterMode::Dense => {
                let bias = Tensor::find(file, format!("{prefix}.bias"), &[experts])?;
                ChoiceWeights::Bias(bias.f32()?)
            }
            RouterMode::Hash => {
                let table =
                    Tensor::find(file, format!("{prefix}.tid2eid"), &[vocabulary, selected])?;
                ChoiceWeights::Table(table.experts(config)?)
            }
        };
        Ok(Self { gate, choice })
    }

    /// Checks lengths, and that a table lists experts there are.
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

/// Refuses a table that lists an expert the layers have not.
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

/// A tensor of a file, of the right shape.
struct Tensor<'a> {
    name: String,
    view: TensorView<'a>,
}

impl<'a> Tensor<'a> {
    fn find(file: &SafeTensors<'a>, name: String, expected: &[usize]) -> Result<Self, RouterError> {
        let view = match file.tensor(&name) {
            Ok(view) => view,
            Err(error) => return Err(RouterError::SafeTensors { name, error }),
        };
        if view.shape() != expected {
            let (found, expected) = (view.shape().to_vec(), expected.to_vec());
            return Err(RouterError::Shape { name, found, expected });
        }
        Ok(Self { name, view })
    }

    fn wrong_type(self, expected: &'static str) -> RouterError {
        RouterError::Type { name: self.name, found: self.view.dtype(), expected }
    }

    fn bf16(self) -> Result<Cow<'a, [bf16]>, RouterError> {
        match self.view.dtype() {
            Dtype::BF16 => Ok(elements(self.view.data(), bf16::from_le_bytes)),
            _ => Err(self.wrong_type("BF16")),
        }
    }

    fn f32(self) -> Result<Cow<'a, [f32]>, RouterError> {
        match self.view.dtype() {
            Dtype::F32 => Ok(elements(self.view.data(), f32::from_le_bytes)),
            _ => Err(self.wrong_type("F32")),
        }
    }

    /// A table of experts, checked to list only those there are.
    fn experts(self, config: &RouterConfig) -> Result<Cow<'a, [i32]>, RouterError> {
        let data = self.view.data();
        match self.view.dtype() {
            Dtype::I32 => {
                let table = elements(data, i32::from_le_bytes);
                check_experts(&self.name, table.iter().map(|&id| id.into()), config)?;
                Ok(table)
            }
            Dtype::I64 => {
                let table = elements(data, i64::from_le_bytes);
                check_experts(&self.name, table.iter().copied(), config)?;
                Ok(table.iter().map(|&id| id as i32).collect())
            }
            _ => Err(self.wrong_type("I64 or I32")),
        }
    }
}

/// The elements of little-endian `data`: in place where they are aligned, else copied.
fn elements<T: bytemuck::Pod, const BYTES: usize>(
    data: &[u8],
    decode: impl Fn([u8; BYTES]) -> T,
) -> Cow<'_, [T]> {
    match bytemuck::try_cast_slice(data) {
        Ok(slice) if cfg!(target_endian = "little") => Cow::Borrowed(slice),
        _ => data.as_chunks().0.iter().map(|&bytes| decode(bytes)).collect(),
    }
}
