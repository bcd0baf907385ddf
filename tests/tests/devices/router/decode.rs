//! Routing from hidden states, the product with the gate and the selection, compared with the oracle.

use dsv4_kv::device::{Backend, Device, DeviceError};
use dsv4_kv_oracle::router as oracle;
use dsv4_kv_router::ops::{self, DecodeScratch, ExpertSelection, GateProduct, HashTable, Routing};
use dsv4_kv_router::{RouterError, Selection};
use half::bf16;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use dsv4_kv_tests::inputs::{download, upload, upload_bf16};

use crate::router::selection::{Answer, assert_same_set, choice};

const SCALING: f32 = 2.5;
/// Number of token ids in a hash table.
const VOCABULARY: u32 = 40;
/// Minimum gap, relative to the score, at which a selection must equal the oracle's.
const LEAST_GAP: f64 = 1e-4;

/// A gate and a batch of tokens.
pub struct Case {
    pub hidden: u32,
    pub experts: u32,
    pub selected: u32,
    /// `[tokens, hidden]` BF16.
    pub x: Vec<u16>,
    /// `[experts, hidden]` BF16.
    pub gate: Vec<u16>,
    pub bias: Vec<f32>,
    pub table: Vec<i32>,
    pub token: Vec<i32>,
}

impl Case {
    /// Random hidden states of magnitude 1, and weights that give logits of magnitude 2.
    pub fn random(hidden: u32, experts: u32, selected: u32, tokens: u32, seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let size = 6.0 / (hidden as f32).sqrt();
        let mut bf16s = |count: u32, size: f32| {
            let mut value = || bf16::from_f32(random.random_range(-size..size)).to_bits();
            (0..count).map(|_| value()).collect()
        };
        let (x, gate) = (bf16s(tokens * hidden, 1.0), bf16s(experts * hidden, size));
        let bias = (0..experts).map(|_| random.random_range(-0.3..0.3)).collect();
        let table = (0..VOCABULARY * selected).map(|_| random.random_range(0..experts as i32));
        let table = table.collect();
        let token = (0..tokens).map(|_| random.random_range(0..VOCABULARY as i32)).collect();
        Self { hidden, experts, selected, x, gate, bias, table, token }
    }

    pub fn tokens(&self) -> u32 {
        self.token.len() as u32
    }

    /// Runs the launch twice with the same scratch memory. Both must give the same results, which are returned.
    fn decode<B: Backend>(&self, device: &Device<B>, hash: bool) -> Answer {
        let stream = &device.stream().unwrap();
        let selection = Selection::new(self.experts, self.selected, SCALING).unwrap();
        let choice = choice(stream, selection, hash, (&self.bias, &self.table));
        let (x, gate) = (&upload_bf16(stream, &self.x), &upload_bf16(stream, &self.gate));
        let product = GateProduct { x, gate, hidden: self.hidden };
        let scratch = DecodeScratch {
            activations: device.allocate("activations", 64 * u64::from(self.experts)).unwrap(),
            arrivals: device.allocate("arrivals", 8).unwrap(),
        };
        let run = || {
            Answer::of(stream, selection, &choice, &self.token, |routing| {
                ops::route_decode(stream, routing, &product, &scratch)
            })
        };
        let answer = run();
        assert_eq!(answer, run(), "run to run");
        assert_eq!(download(stream, &scratch.arrivals), [0; 8]);
        answer
    }

    fn logits(&self, token: usize) -> Vec<f64> {
        let hidden = self.hidden as usize;
        oracle::logits(&self.x[token * hidden..][..hidden], &self.gate)
    }

    /// Compares the weights of every token with the oracle, and the experts where the selection is clear. Returns the
    /// number of clear selections.
    pub fn check(&self, answer: &Answer, hash: bool) -> usize {
        let selected = self.selected as usize;
        let bias: Vec<f64> = self.bias.iter().map(|&bias| bias.into()).collect();
        let mut clear = 0;
        for token in 0..self.token.len() {
            let logits = self.logits(token);
            let ids = &answer.ids[token * selected..][..selected];
            if hash {
                assert_eq!(ids, &self.table[self.token[token] as usize * selected..][..selected]);
            } else {
                let want = oracle::select(&logits, &bias, selected, SCALING.into());
                if want.gap > LEAST_GAP {
                    assert_same_set(ids, &want.ids);
                    clear += 1;
                }
            }
            let want = oracle::weights(&logits, ids, SCALING.into());
            for (&got, want) in answer.weights[token * selected..].iter().zip(want) {
                // The error of a logit is a few 2^-24 of the sum of its magnitudes.
                assert!((f64::from(got) - want).abs() <= 2e-6, "{got} for {want}");
            }
        }
        assert_eq!(answer.faults, 0);
        clear
    }
}

/// Batches for each number of 8-token products in a launch; hidden states with fewer pieces than warps, with one piece
/// more than a multiple of the warps, and with many.
pub fn decode_equals_the_oracle<B: Backend>(device: &Device<B>) {
    let (mut clear, mut all) = (0, 0);
    for (tokens, hidden, experts, selected) in [
        (1, 32, 512, 1),
        (5, 96, 384, 6),
        (8, 256, 256, 6),
        (9, 544, 32, 8),
        (16, 1056, 64, 6),
        (17, 320, 416, 6),
        (32, 288, 256, 6),
        (33, 288, 384, 6),
        (48, 256, 288, 6),
        (64, 1312, 96, 6),
    ] {
        let case = Case::random(hidden, experts, selected, tokens, tokens.into());
        clear += case.check(&case.decode(device, false), false);
        all += tokens as usize;
    }
    assert!(10 * clear > 9 * all, "{clear} of {all} selections are clear");
}

pub fn hashed_decode_equals_the_oracle<B: Backend>(device: &Device<B>) {
    for (tokens, hidden, experts) in [(1, 64, 64), (13, 512, 256), (64, 288, 384)] {
        let case = Case::random(hidden, experts, 6, tokens, tokens.into());
        case.check(&case.decode(device, true), true);
    }
}

/// The hidden sizes of the released models.
pub fn released_widths_equal_the_oracle<B: Backend>(device: &Device<B>) {
    for (hidden, experts, tokens) in [(4096, 256, 3), (7168, 384, 2)] {
        let case = Case::random(hidden, experts, 6, tokens, hidden.into());
        case.check(&case.decode(device, false), false);
    }
}

/// Sums of small integers are exact in any order, on tensor cores too. So there is only one right result: the bits that
/// the selection kernels give for the exact logits.
pub fn exact_logits_give_the_same_bits<B: Backend>(device: &Device<B>) {
    let mut case = Case::random(480, 288, 6, 37, 1);
    let mut random = StdRng::seed_from_u64(2);
    let mut integers = |values: &mut [u16], least: i32| {
        values.fill_with(|| bf16::from_f32(random.random_range(least..=1) as f32).to_bits());
    };
    integers(&mut case.x, -1);
    integers(&mut case.gate, -1);
    let answer = case.decode(device, false);
    let logits: Vec<f32> =
        (0..37).flat_map(|token| case.logits(token)).map(|logit| logit as f32).collect();
    let stream = device.stream().unwrap();
    let selection = Selection::new(288, 6, SCALING).unwrap();
    let logits = upload(&stream, &logits);
    let choice = choice(&stream, selection, false, (&case.bias, &case.table));
    let from_logits = Answer::of(&stream, selection, &choice, &case.token, |routing| {
        ops::route_logits(&stream, routing, &logits)
    });
    assert_eq!(answer, from_logits);
}

pub fn padding_in_a_batch_gets_no_expert<B: Backend>(device: &Device<B>) {
    let mut case = Case::random(256, 64, 6, 21, 3);
    for hash in [false, true] {
        let whole = case.decode(device, hash);
        let (tokens, x) = (case.token.clone(), case.x.clone());
        for token in [0, 8, 20] {
            case.token[token] = -1;
            case.x[token * 256..][..256].fill(bf16::NAN.to_bits());
        }
        let answer = case.decode(device, hash);
        assert_eq!(answer.faults, 0);
        for token in 0..21 {
            let at = token * 6..token * 6 + 6;
            let (ids, weights) = (&answer.ids[at.clone()], &answer.weights[at.clone()]);
            if case.token[token] == -1 {
                assert_eq!((ids, weights), (&[-1; 6][..], &[0.0; 6][..]));
            } else {
                assert_eq!((ids, weights), (&whole.ids[at.clone()], &whole.weights[at]));
            }
        }
        (case.token, case.x) = (tokens, x);
    }
    // A token id outside the table, and a NaN in a hidden state.
    case.token[3] = VOCABULARY as i32;
    assert_eq!(case.decode(device, true).faults, 1);
    case.x[5 * 256 + 17] = bf16::NAN.to_bits();
    assert_eq!(case.decode(device, false).faults, 64);
}

pub fn wrong_shapes_are_refused<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let selection = Selection::new(64, 6, SCALING).unwrap();
    let decode = |sizes: [u64; 9], hidden: u32, tokens: u32, hash: bool| {
        let buffer = |len| device.allocate::<u32>("a shape", len).unwrap();
        let [x, weight, extra, token, activations, arrivals, ids, weights, faults] =
            sizes.map(buffer);
        // A word holds two BF16; this gives a buffer of `len` elements.
        let of = |len: u64, buffer: &dsv4_kv::device::Buffer<B, u32>| {
            buffer.cast::<bf16>().unwrap().slice(0, len).unwrap()
        };
        let (x, gate) = (&of(sizes[0], &x), &of(sizes[1], &weight));
        let (ids, weights) = (&ids.cast().unwrap(), &weights.cast().unwrap());
        let choice = if hash {
            let table = extra.cast().unwrap().into();
            ExpertSelection::Table(HashTable { table, vocabulary: 10 })
        } else {
            ExpertSelection::Bias(extra.cast().unwrap().into())
        };
        let (choice, token, faults) = (&choice, &token.cast().unwrap(), &faults);
        ops::route_decode(
            &stream,
            &Routing { selection, choice, tokens, token, ids, weights, faults },
            &GateProduct { x, gate, hidden },
            &DecodeScratch { activations: activations.cast().unwrap(), arrivals },
        )
    };
    for hash in [false, true] {
        let second = if hash { 60 } else { 64 };
        let needed = [3 * 96, 64 * 96, second, 3, 64 * 64, 8, 18, 18, 1];
        for short in 0..needed.len() {
            let sizes = core::array::from_fn(|i| needed[i] - u64::from(i == short));
            let error = decode(sizes, 96, 3, hash).unwrap_err();
            let RouterError::Device(DeviceError::TooShort { found, needed: wanted, .. }) = error
            else {
                panic!("{error}")
            };
            let element = if short < 2 { 2 } else { 4 };
            assert_eq!((found + element, wanted), (wanted, element * needed[short]));
        }
        decode(needed, 96, 3, hash).unwrap();
        for hidden in [0, 16, 80] {
            let error = decode([70 * 96; 9], hidden, 3, hash).unwrap_err();
            assert!(
                matches!(error, RouterError::HiddenSize { hidden: found, multiple: 32 } if found == hidden),
                "{error}"
            );
        }
        let error = decode([70 * 96; 9], 96, 65, hash).unwrap_err();
        assert!(matches!(error, RouterError::DecodeTokens { tokens: 65, most: 64 }), "{error}");
    }
}
