//! Quantisation to NVFP4: every code and every scale equals the oracle's. Runs on the host alone.

use dsv4_kv::device::{Backend, Device};
use dsv4_kv_linear::{LinearError, Nvfp4Matrix};
use dsv4_kv_oracle::linear::{GROUP, code, decode, group_scale};
use half::bf16;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Weights at the ends of the f32 range, of one magnitude, with groups of very different magnitudes, and with ties.
fn weights() -> Vec<Vec<f32>> {
    let mut random = StdRng::seed_from_u64(4);
    let mut all = vec![
        vec![0.0; 64],
        vec![-0.0; 64],
        vec![f32::MAX; 64],
        vec![f32::from_bits(1); 64],
        vec![f32::MIN_POSITIVE; 64],
        (0..64).map(|i| if i == 5 { 1e30 } else { 1e-30 }).collect(),
    ];
    for size in [1e-38_f32, 1e-20, 1.0, 1e20, 1.5e38] {
        all.push((0..1024).map(|_| random.random_range(-size..size)).collect());
    }
    // Groups from the smallest to the largest magnitudes.
    let scaled = (0..64).flat_map(|group| {
        let size = 2f32.powi(group - 40);
        (0..16).map(|_| random.random_range(-size..=size)).collect::<Vec<_>>()
    });
    all.push(scaled.collect());
    // With a largest value of 2,688 the scale is 1, so that multiples of a quarter are ties.
    let mut ties: Vec<f32> = (0..1024).map(|i| (i % 97) as f32 * 0.25 - 12.0).collect();
    ties[0] = 2688.0;
    all.push(ties);
    all
}

pub fn quantisation_equals_the_oracle<B: Backend>(_: &Device<B>) {
    for values in weights() {
        let (columns, inner) = (values.len() as u32 / 32, 32);
        let weight = Nvfp4Matrix::quantise(&values, columns, inner).unwrap();
        let amax = values.iter().fold(0.0, |amax: f32, value| amax.max(value.abs()));
        assert_eq!(weight.scale(), (amax / 2688.0).max(f32::MIN_POSITIVE));
        let mut codes = Vec::new();
        for (group, values) in values.chunks_exact(GROUP).enumerate() {
            let amax = values.iter().fold(0.0, |amax: f32, value| amax.max(value.abs()));
            let scale = group_scale(amax, weight.scale());
            assert_eq!(weight.scales()[group], scale, "scale of group {group} with {amax:e}");
            codes.extend(values.iter().map(|&value| code(value, scale, weight.scale())));
        }
        let found = weight.codes().iter().flat_map(|byte| [byte & 0xF, byte >> 4]);
        for (at, (found, wanted)) in found.zip(codes).enumerate() {
            assert_eq!(found, wanted, "code of {:e} at {at}", values[at]);
        }
        let exact = decode(weight.codes(), weight.scales(), weight.scale());
        for (found, exact) in weight.decode().into_iter().zip(exact) {
            assert_eq!(found, exact as f32);
        }
    }
}

/// BF16 values are quantised as the equal f32 values. Decoded values are quantised to themselves.
pub fn decoded_weights_are_quantised_to_themselves<B: Backend>(_: &Device<B>) {
    let mut random = StdRng::seed_from_u64(6);
    let values: Vec<bf16> =
        (0..4096).map(|_| bf16::from_f32(random.random_range(-0.3..0.3))).collect();
    let wide: Vec<f32> = values.iter().map(|value| value.to_f32()).collect();
    let weight = Nvfp4Matrix::quantise(&values, 64, 64).unwrap();
    assert_eq!(weight, Nvfp4Matrix::quantise(&wide, 64, 64).unwrap());
    let decoded = weight.decode();
    let again = Nvfp4Matrix::quantise(&decoded, 64, 64).unwrap();
    assert_eq!(again.decode(), decoded);
    let error: f32 = wide.iter().zip(&decoded).map(|(a, b)| (a - b).powi(2)).sum();
    let size: f32 = wide.iter().map(|a| a.powi(2)).sum();
    assert!((error / size).sqrt() < 0.12, "four bits keep more than that");
}

pub fn wrong_weights_are_refused<B: Backend>(_: &Device<B>) {
    let values = vec![1.0_f32; 64];
    for (columns, inner) in [(0, 32), (2, 0), (4, 16), (2, 48)] {
        let error = Nvfp4Matrix::quantise(&values, columns, inner).unwrap_err();
        assert!(matches!(error, LinearError::Shape { .. }), "{error}");
    }
    let error = Nvfp4Matrix::quantise(&values, 3, 32).unwrap_err();
    assert!(matches!(error, LinearError::Length { found: 64, expected: 96, .. }), "{error}");
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut values = values.clone();
        values[40] = bad;
        let error = Nvfp4Matrix::quantise(&values, 2, 32).unwrap_err();
        assert!(matches!(error, LinearError::NotFinite { index: 40, .. }), "{error}");
    }
    let parts = |codes: usize, scales: Vec<u8>, scale| {
        Nvfp4Matrix::from_parts(2, 32, vec![0; codes], scales, scale)
    };
    parts(32, vec![0; 4], 1.0).unwrap();
    assert!(matches!(parts(31, vec![0; 4], 1.0), Err(LinearError::Length { .. })));
    assert!(matches!(parts(32, vec![0; 5], 1.0), Err(LinearError::Length { .. })));
    for byte in [0x7F, 0xFF] {
        let error = parts(32, vec![0, 0, byte, 0], 1.0).unwrap_err();
        assert!(matches!(error, LinearError::ScaleIsNan { index: 2, .. }), "{error}");
    }
    assert!(matches!(parts(32, vec![0; 4], f32::NAN), Err(LinearError::WeightScale { .. })));
}
