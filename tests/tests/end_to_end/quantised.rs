//! The same weights in the types of released checkpoints, E4M3 and FP4 with their scales, compared with the decoded
//! values in BF16.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use dsv4_kv::device::{Backend, Device};
use dsv4_kv_tests::model_files::{Made, Tensors};
use half::bf16;
use kv_layout::format::{E2m1, E4m3, Ue8m0};
use libtest_mimic::Failed;
use safetensors::Dtype;

use crate::reference::Reference;
use crate::released;
use crate::run::{Cut, Recorder, Run};

/// What names of weights in E4M3 contain.
const IN_E4M3: [&str; 7] = [
    ".attn.wq_a.",
    ".attn.wq_b.",
    ".attn.wkv.",
    ".attn.wo_a.",
    ".attn.wo_b.",
    ".indexer.wq_b.",
    ".shared_experts.",
];
/// What names of weights of the routed experts contain.
const EXPERTS: &str = ".ffn.experts.";
/// Tokens of the request: the experts of each token are others.
const TOKENS: usize = 24;

/// The types of one kind of checkpoint.
#[derive(Clone, Copy, Debug)]
struct Types {
    /// FP4, or else E4M3, for the routed experts.
    fp4_experts: bool,
    /// Of the scales of E4M3 blocks.
    scales: Dtype,
}

/// The released types: Flash and Pro, and their Base models.
const RELEASED: [Types; 2] = [
    Types { fp4_experts: true, scales: Dtype::F8_E8M0 },
    Types { fp4_experts: false, scales: Dtype::F32 },
];

/// Logits have the bits of those of the decoded values.
pub fn gives_the_bits_of_its_values_in_bf16<B: Backend>(
    device: &Device<B>,
    reference: &Reference,
) -> Result<(), Failed> {
    let whole = released::stored(&reference.folder)?;
    for types in RELEASED {
        let (quantised, decoded) = both(&whole, types)?;
        let [found, expected] = [&quantised, &decoded].map(|tensors| -> Result<_> {
            let model = Arc::new(released::load(&reference.folder, tensors)?);
            let reference = reference.mutated(model);
            let request = [reference.request(0)[..TOKENS].to_vec()];
            let mut run = Run::new(device, &reference, 1, TOKENS)?;
            run.feed(&request, Cut::Whole, &mut Recorder::new(None))?;
            Ok(run.logits)
        });
        let (found, expected) = (found?, expected?);
        let is_number = expected.values().flatten().all(|logit| logit.is_finite());
        if found != expected || found.len() != TOKENS || !is_number {
            return Err(format!("other logits with {types:?}").into());
        }
    }
    Ok(())
}

/// The tensors with weights in these types, and with their decoded values in BF16.
fn both(whole: &Tensors, types: Types) -> Result<(Tensors, Tensors)> {
    let (mut quantised, mut decoded) = (whole.clone(), whole.clone());
    for (name, made) in whole {
        let is_expert = name.contains(EXPERTS);
        if !is_expert && !IN_E4M3.iter().any(|part| name.contains(part)) {
            continue;
        }
        let weight = Weight::of(made)?;
        let (codes, scales, values) =
            if is_expert && types.fp4_experts { weight.in_fp4() } else { weight.in_e4m3(types) };
        let scale = name.strip_suffix("weight").context("a weight")?;
        quantised.insert(format!("{scale}scale"), scales);
        quantised.insert(name.clone(), codes);
        decoded.insert(name.clone(), Made::bf16(&made.shape, &values));
    }
    ensure!(quantised.len() > whole.len(), "no weight was quantised");
    Ok((quantised, decoded))
}

/// A weight as it is stored, and its decoded values.
struct Quantised<C> {
    codes: Vec<C>,
    scales: Vec<Ue8m0>,
    /// Of the scales.
    shape: [usize; 2],
    values: Vec<f32>,
}

/// A weight `[rows, columns]`.
struct Weight {
    shape: [usize; 2],
    values: Vec<f32>,
}

impl Weight {
    fn of(made: &Made) -> Result<Self> {
        ensure!(made.dtype == Dtype::BF16, "{:?}", made.dtype);
        let shape = made.shape[..].try_into().context("a matrix")?;
        let values = made.bytes.as_chunks().0.iter();
        Ok(Self { shape, values: values.map(|&bits| bf16::from_le_bytes(bits).to_f32()).collect() })
    }

    /// Codes, scales and decoded values in E4M3 with a scale for each block of 128 by 128.
    fn in_e4m3(&self, types: Types) -> (Made, Made, Vec<f32>) {
        let Quantised { codes, scales, shape, values } =
            self.quantise([128, 128], E4m3::MAX, E4m3::from_f32, E4m3::to_f32);
        let codes = codes.iter().map(|code| code.0).collect();
        let scales = if types.scales == Dtype::F32 {
            Made::f32(&shape, &scales.iter().map(|scale| scale.to_f32()).collect::<Vec<_>>())
        } else {
            Made::new(Dtype::F8_E8M0, &shape, scales.iter().map(|scale| scale.0).collect())
        };
        (Made::new(Dtype::F8_E4M3, &self.shape, codes), scales, values)
    }

    /// Codes, two in a byte, scales and decoded values in FP4 with a scale for 32 columns.
    fn in_fp4(&self) -> (Made, Made, Vec<f32>) {
        let Quantised { codes, scales, shape, values } =
            self.quantise([1, 32], E2m1::MAX, E2m1::from_f32, E2m1::to_f32);
        let bytes = codes.as_chunks().0.iter().map(|&[low, high]| E2m1::pack(low, high)).collect();
        let packed = [self.shape[0], self.shape[1] / 2];
        let scales = scales.iter().map(|scale| scale.0).collect();
        (Made::new(Dtype::I8, &packed, bytes), Made::new(Dtype::F8_E8M0, &shape, scales), values)
    }

    /// The codes nearest to the values over their scales, one for each block of `block` rows and columns.
    fn quantise<C: Copy>(
        &self,
        block: [usize; 2],
        most: f32,
        encode: fn(f32) -> C,
        decode: fn(C) -> f32,
    ) -> Quantised<C> {
        let (scales, shape, of) = self.scales(block, most);
        let code = |(at, value): (usize, &f32)| encode(value / scales[of(at)].to_f32());
        let codes: Vec<C> = self.values.iter().enumerate().map(code).collect();
        let value = |(at, &code): (usize, &C)| decode(code) * scales[of(at)].to_f32();
        let values = codes.iter().enumerate().map(value).collect();
        Quantised { codes, scales, shape, values }
    }

    /// Scales of blocks of `block` rows and columns, by which the largest value is at most `most`; their shape; and the
    /// scale of an element.
    fn scales(
        &self,
        block: [usize; 2],
        most: f32,
    ) -> (Vec<Ue8m0>, [usize; 2], impl Fn(usize) -> usize + use<>) {
        let columns = self.shape[1];
        let shape = [self.shape[0].div_ceil(block[0]), columns.div_ceil(block[1])];
        let of = move |at: usize| {
            let (row, column) = (at / columns, at % columns);
            row / block[0] * shape[1] + column / block[1]
        };
        let mut largest = vec![f32::MIN_POSITIVE; shape[0] * shape[1]];
        for (at, value) in self.values.iter().enumerate() {
            let largest = &mut largest[of(at)];
            *largest = largest.max(value.abs());
        }
        // Those of neighbours differ, so that the scale of another block is seen.
        let scale = |(index, largest): (usize, &f32)| {
            let above = (index / shape[1] + index % shape[1]) % 3;
            Ue8m0(Ue8m0::round_up(largest / most).0 + above as u8)
        };
        (largest.iter().enumerate().map(scale).collect(), shape, of)
    }
}
