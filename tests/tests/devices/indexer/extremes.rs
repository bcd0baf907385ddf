//! Scores of keys that no Hadamard transform of a model gives, at the limits that the specification states.

use dsv4_kv::device::{Backend, Device};
use dsv4_kv::ops::{Scores, maxima_len};
use dsv4_kv_oracle::indexer::{Score, score};
use dsv4_kv_oracle::number::bf16_value;
use half::bf16;
use kv_layout::index_row::IndexFormat;

use crate::indexer::query::{CANARY, CHANNELS, GROUP, oracle};
use crate::indexer::scores::{Case, Layer, sees};
use crate::inputs::{download, upload};

/// The number of keys of a block.
const KEYS: usize = 32;

/// The scores of the first block's keys for one query, each with the exact score.
fn scored<B: Backend>(
    layer: &Layer<B>,
    heads: u32,
    operands: &(Vec<u16>, Vec<f32>),
) -> Vec<(f32, Score)> {
    let stream = &layer.stream;
    let step = layer.step_of(&[(0, sees(KEYS as i32))], 0, heads, operands);
    let columns = KEYS as u32;
    let scores = upload(stream, &[CANARY; KEYS]);
    let maxima = upload(stream, &vec![CANARY; maxima_len(columns) as usize]);
    let faults = upload(stream, &[0]);
    let to = Scores { scores: &scores, maxima: &maxima, columns };
    layer.score(&step, 0, &to, &faults);
    assert_eq!(download(stream, &faults), [0]);
    let (query, weight) = operands;
    let head = |bits: &[u16]| bits.iter().map(|&bits| bf16_value(bits)).collect();
    let query: Vec<Vec<f64>> = query.chunks_exact(CHANNELS).map(head).collect();
    let weight: Vec<f64> = weight.iter().map(|&weight| f64::from(weight)).collect();
    let exact = |encoded| {
        let key = oracle(layer.format).decode(encoded).into_iter().map(f64::from);
        score(&query, &weight, &Vec::from_iter(key))
    };
    let first = KEYS * layer.table[0] as usize;
    let exact = layer.encoded[first..][..KEYS].iter().map(exact);
    download(stream, &scores).into_iter().zip(exact).collect()
}

/// FP8 keys with one large channel, under a query that has the largest value everywhere. A tensor core may drop all of
/// the small products, and in all heads alike. Each of 64 loses at most 2^-13 of the sum.
pub fn small_products_keep_the_fp8_limit<B: Backend>(device: &Device<B>) {
    const HEADS: usize = 4;
    let mut layer = Layer::new(device, IndexFormat::Fp8, (1, 1));
    let first = KEYS * layer.table[0] as usize;
    // Codes: 0x78 is 256, 0x7E is 448, and those of small channels are 2^-9 times the code.
    let keys = [(0, 0x78, 9), (0, 0x7E, 17), (40, 0x7E, 17), (100, 0x78, 9)];
    for (key, (large_channel, large, small)) in keys.into_iter().enumerate() {
        let mut codes = vec![small; CHANNELS];
        codes[large_channel] = large;
        layer.encoded[first + key].codes = codes;
    }
    layer.upload_keys();
    let query = vec![bf16::from_f32(448.0).to_bits(); HEADS * CHANNELS];
    let scores = scored(&layer, HEADS as u32, &(query, vec![1.0; HEADS]));
    for (key, (found, exact)) in scores.into_iter().enumerate() {
        let error = (f64::from(found) - exact.value).abs() / exact.magnitude;
        let limit = 64.0 * 2_f64.powi(-13);
        assert!(error <= limit, "key {key}: {found}, not {}: {error:e}", exact.value);
    }
}

/// MXFP4 keys whose first group, which the query does not use, has a scale far above that of the others. These are
/// scored exactly down to 2^-100 of it, and count as 0 at 2^-127.
pub fn very_distant_groups_count_as_zero<B: Backend>(device: &Device<B>) {
    let format = IndexFormat::Mxfp4;
    let mut layer = Layer::new(device, format, (1, 1));
    let first = KEYS * layer.table[0] as usize;
    for (key, scale) in [90, 63].into_iter().enumerate() {
        layer.encoded[first + key].scale = vec![190, scale, scale, scale];
    }
    layer.upload_keys();
    let case = Case { heads: 16, columns: KEYS as u32, skip: 0, format, fall: 0 };
    let (mut query, weight) = case.operands(1);
    for head in query.chunks_exact_mut(CHANNELS) {
        head[..GROUP].fill(0);
    }
    let scores = scored(&layer, case.heads, &(query, vec![1.0; weight.len()]));
    for (key, (found, exact)) in scores.into_iter().enumerate() {
        assert!(exact.value > 0.0, "key {key}: some head has a positive product");
        if key == 1 {
            assert!(found == 0.0, "{found}");
            continue;
        }
        let error = (f64::from(found) - exact.value).abs() / exact.magnitude;
        assert!(error <= 1e-5, "key {key}: {found}, not {}: {error:e}", exact.value);
    }
}
