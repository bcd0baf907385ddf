//! The reference's tensors of each layer.

use anyhow::Result;
use ndarray::{Array2, Array3, Array4, ArrayD, Dimension, Ix2, Ix3, Ix4};

use crate::reference::Reference;

/// One layer. The axes are request, token, and those that the comments name.
pub struct LayerReference {
    /// The input of attention, `[requests, tokens, hidden]`; `None` for the first layer.
    pub x: Option<Array3<f32>>,
    /// The streams after the layer at the stored positions, `[requests, positions, streams, hidden]`.
    pub hidden: Array4<f32>,
    /// `[requests, entries, 512]`, before rounding.
    pub entries: Option<Array3<f32>>,
    /// `[requests, entries, 128]`, before rounding.
    pub keys: Option<Array3<f32>>,
    /// The lists, `[requests, tokens, k]`, and the margin of each list, `[requests, tokens]`: how clear the selection
    /// is.
    pub selected: Option<(Array3<i32>, Array2<f32>)>,
    /// `[requests, tokens, experts of a token]`.
    pub experts: Array3<i32>,
    /// `[requests, tokens, experts of a token]`.
    pub weights: Array3<f32>,
    /// The gap of each choice of experts by score, `[requests, tokens]`: how clear the choice is.
    pub gap: Option<Array2<f32>>,
}

impl LayerReference {
    /// All layers of a reference.
    pub fn all(reference: &Reference) -> Result<Vec<Self>> {
        (0..reference.model.layers.len()).map(|layer| Self::read(reference, layer)).collect()
    }

    fn read(reference: &Reference, layer: usize) -> Result<Self> {
        let name = |what: &str| format!("layer.{layer}.{what}");
        let find3 = |what: &str| reference.find(&name(what))?.map(shaped::<_, Ix3>).transpose();
        let find2 = |what: &str| reference.find(&name(what))?.map(shaped::<_, Ix2>).transpose();
        let selected = match find2("margin")? {
            Some(margin) => {
                Some((shaped::<_, Ix3>(reference.integers(&name("selected"))?)?, margin))
            }
            None => None,
        };
        Ok(Self {
            x: find3("x")?,
            hidden: shaped::<_, Ix4>(reference.floats(&name("hidden"))?)?,
            entries: find3("entries")?,
            keys: find3("keys")?,
            selected,
            experts: shaped::<_, Ix3>(reference.integers(&name("experts"))?)?,
            weights: shaped::<_, Ix3>(reference.floats(&name("weights"))?)?,
            gap: find2("gap")?,
        })
    }
}

fn shaped<T, D: Dimension>(tensor: ArrayD<T>) -> Result<ndarray::Array<T, D>> {
    Ok(tensor.into_dimensionality::<D>()?)
}
