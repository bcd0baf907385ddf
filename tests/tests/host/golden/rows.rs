//! The oracle's cache rows compared with rows made by numpy and ml_dtypes, byte for byte.
//!
//! Kernels are tested against the oracle, so the oracle itself must be tested.

use anyhow::Result;
use dsv4_kv_oracle::index::KeyFormat;
use dsv4_kv_oracle::number::{bf16_nearest, bf16_value, e2m1_value, e4m3_value, ue8m0_round_up};
use dsv4_kv_oracle::row::{EncodedRow, QUANTISED, RowFormat};
use dsv4_kv_tests::golden::{self, Array};
use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, Normal};

fn main_rows() -> Result<Array<u16>> {
    let rows = golden::load("row_in_bf16")?;
    assert_eq!(rows.shape, [16, 512]);
    Ok(rows)
}

#[test]
fn ue8m0_rows() -> Result<()> {
    let rows = main_rows()?;
    let data = golden::load::<u8>("row_v4_data")?;
    let scale = golden::load::<u8>("row_v4_scale")?;
    let values = golden::load::<u16>("row_v4_dequant")?;
    for (i, row) in rows.rows().enumerate() {
        let expected = EncodedRow {
            data: data.rows().nth(i).unwrap().to_vec(),
            scale: scale.rows().nth(i).unwrap().to_vec(),
        };
        assert_eq!(RowFormat::Ue8m0.encode(row), expected, "row {i}");
        let decoded = RowFormat::Ue8m0.decode(&expected);
        assert_eq!(decoded[..QUANTISED], *values.rows().nth(i).unwrap(), "row {i}");
        assert_eq!(decoded[QUANTISED..], row[QUANTISED..], "row {i}");
    }
    Ok(())
}

#[test]
fn f32_rows() -> Result<()> {
    let rows = main_rows()?;
    let codes = golden::load::<u8>("row_seed_fp8")?;
    let scale = golden::load::<f32>("row_seed_scale")?;
    let values = golden::load::<f32>("row_seed_dequant_f32")?;
    for (i, row) in rows.rows().enumerate() {
        let encoded = RowFormat::F32.encode(row);
        assert_eq!(encoded.data[..QUANTISED], *codes.rows().nth(i).unwrap(), "row {i}");
        assert_eq!(encoded.scale, scale.data[i].to_le_bytes(), "row {i}");
        let rope: Vec<u8> = row[QUANTISED..].iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(encoded.data[QUANTISED..], rope, "row {i}");
        let decoded = RowFormat::F32.decode(&encoded);
        let expected: Vec<u16> =
            values.rows().nth(i).unwrap().iter().map(|&x| bf16_nearest(x)).collect();
        assert_eq!(decoded[..QUANTISED], expected, "row {i}");
        assert_eq!(decoded[QUANTISED..], row[QUANTISED..], "row {i}");
    }
    Ok(())
}

/// The quotient 168 is a tie and rounds down to 160; the product with the reciprocal, 168.00002, would round up to 176.
/// The golden rows have no such number.
#[test]
fn f32_codes_are_quotients() {
    let mut row = vec![0; 512];
    row[0] = 0x3F8A; // 1.078125
    row[1] = 0x3ECF; // 0.404296875
    assert_eq!(RowFormat::F32.encode(&row).data[..2], [0x7E, 0x72]);
}

#[test]
fn fp4_keys() -> Result<()> {
    let keys = golden::load::<u16>("fp4_in_bf16")?;
    assert_eq!(keys.shape, [16, 128]);
    for (format, name) in [(KeyFormat::Nvfp4, "nvfp4"), (KeyFormat::Mxfp4, "mxfp4")] {
        let codes = golden::load::<u8>(&format!("{name}_packed"))?;
        let scale = golden::load::<u8>(&format!("{name}_scale"))?;
        let values = golden::load::<f32>(&format!("{name}_dequant"))?;
        for (i, key) in keys.rows().enumerate() {
            let encoded = format.encode(key);
            assert_eq!(encoded.scale, *scale.rows().nth(i).unwrap(), "{name} key {i}");
            assert_eq!(encoded.codes, *codes.rows().nth(i).unwrap(), "{name} key {i}");
            assert_eq!(format.decode(&encoded), *values.rows().nth(i).unwrap(), "{name} key {i}");
        }
    }
    Ok(())
}

/// The MXFP4 of another serving system must not pass: there ties go towards zero, and scales have a larger floor. Above
/// that the two are equal.
#[test]
fn fp4_keys_are_not_the_threshold_variant() -> Result<()> {
    let keys = golden::load::<u16>("fp4_in_bf16")?;
    let codes = golden::load::<u8>("mxfp4_packed_sglang_c4")?;
    let scale = golden::load::<u8>("mxfp4_scale_sglang_c4")?;
    let ours: Vec<_> = keys.rows().map(|key| KeyFormat::Mxfp4.encode(key)).collect();
    assert_ne!(ours.iter().flat_map(|key| key.codes.clone()).collect::<Vec<u8>>(), codes.data);
    let floor = ue8m0_round_up(1e-4 / 6.0);
    let scales: Vec<u8> = ours.into_iter().flat_map(|key| key.scale).collect();
    assert!(scales.contains(&1), "a group is below the floor");
    let raised: Vec<u8> = scales.into_iter().map(|scale| scale.max(floor)).collect();
    assert_eq!(raised, scale.data);
    Ok(())
}

#[test]
fn fp8_keys() -> Result<()> {
    let keys = golden::load::<u16>("fp4_in_bf16")?;
    let codes = golden::load::<u8>("idxfp8_codes")?;
    let scale = golden::load::<f32>("idxfp8_scale")?;
    for (i, key) in keys.rows().enumerate() {
        let encoded = KeyFormat::Fp8.encode(key);
        assert_eq!(encoded.codes, *codes.rows().nth(i).unwrap(), "key {i}");
        assert_eq!(encoded.scale, scale.data[i].to_le_bytes(), "key {i}");
        let values: Vec<f32> =
            encoded.codes.iter().map(|&code| e4m3_value(code) as f32 * scale.data[i]).collect();
        assert_eq!(KeyFormat::Fp8.decode(&encoded), values, "key {i}");
    }
    Ok(())
}

/// One NaN and one infinity: the NaN stays a NaN and does not affect the scale, the infinity saturates.
#[test]
fn nan_and_infinity_in_a_row() {
    const NAN: u16 = 0xFFC1;
    const MINUS_INFINITY: u16 = 0xFF80;
    let mut row = vec![0x3F80; 512]; // 1.0
    row[3] = NAN;
    row[500] = NAN;

    let encoded = RowFormat::Ue8m0.encode(&row);
    assert_eq!(encoded.data[2..5], [0x78, 0x7F, 0x78]); // 256, NaN, 256
    assert_eq!(encoded.scale, [119, 119, 119, 119, 119, 119, 119, 0]); // 2^-8
    assert_eq!(encoded.data[448 + 2 * 52..][..2], NAN.to_le_bytes());

    let encoded = RowFormat::F32.encode(&row);
    assert_eq!(encoded.data[2..5], [0x7E, 0x7F, 0x7E]);
    assert_eq!(encoded.scale, (1f32 / 448.0).to_le_bytes());

    row[70] = MINUS_INFINITY;
    let encoded = RowFormat::Ue8m0.encode(&row);
    // f32::MAX / 448 lies between 2^119 and 2^120; a finite neighbour is far below the smallest code.
    assert_eq!(encoded.scale, [119, 247, 119, 119, 119, 119, 119, 0]);
    assert_eq!(encoded.data[70..72], [0xFE, 0x00]);
    let encoded = RowFormat::F32.encode(&row);
    assert_eq!(encoded.scale, (f32::MAX / 448.0).to_le_bytes());
    assert_eq!(encoded.data[70..72], [0xFE, 0x00]);
}

/// The error of a code is at most 1/17 of the number, or half a subnormal step of the scale. The rounding to BF16 may
/// add `rounding` of the value.
fn assert_error_bound(x: f64, value: f64, scale: f64, rounding: f64) {
    let of_code = (x.abs() / 17.0).max(2f64.powi(-10) * scale) * (1.0 + 1e-6);
    let bound = of_code + rounding * value.abs();
    assert!((x - value).abs() <= bound, "{x:e} became {value:e} with scale {scale:e}");
}

/// With an f32 scale, the rounding to BF16 of the value read back takes the error beyond 1/17.
#[test]
fn f32_rows_are_rounded_again_when_read() {
    let mut row = vec![0; 512];
    row[0] = 0x41C8; // 25
    row[1] = 0x4173; // 15.1875
    let encoded = RowFormat::F32.encode(&row);
    assert_eq!(encoded.data[..2], [0x7E, 0x79], "448 and 288; 288 * 25 / 448 is 16.0714");
    assert_eq!(RowFormat::F32.decode(&encoded)[..2], [0x41C8, 0x4181], "25 and 16.125");
}

/// On gaussian rows the whole error is 2.63 % of the row (f32 scale) or 2.66 % (UE8M0), by the norm.
#[test]
fn gaussian_rows_lose_less_than_three_per_cent() {
    let mut random = StdRng::seed_from_u64(1);
    let normal = Normal::new(0f32, 1.0).unwrap();
    for (format, expected) in [(RowFormat::F32, 0.0263), (RowFormat::Ue8m0, 0.0266)] {
        let (mut error, mut norm) = (0f64, 0f64);
        for _ in 0..200 {
            let row: Vec<u16> =
                (0..512).map(|_| bf16_nearest(normal.sample(&mut random))).collect();
            let decoded = format.decode(&format.encode(&row));
            for (&x, &y) in row[..QUANTISED].iter().zip(&decoded) {
                error += (bf16_value(x) - bf16_value(y)).powi(2);
                norm += bf16_value(x).powi(2);
            }
            assert_eq!(row[QUANTISED..], decoded[QUANTISED..], "rotary channels are exact");
        }
        let found = (error / norm).sqrt();
        assert!((found - expected).abs() < 5e-4 && found < 0.028, "{format:?}: {found}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    #[test]
    fn rows_keep_the_stated_error(
        row in prop::collection::vec((any::<bool>(), 0x3400u16..0x4400), 512)
    ) {
        let row: Vec<u16> = row.into_iter().map(|(sign, x)| u16::from(sign) << 15 | x).collect();
        let ue8m0 = RowFormat::Ue8m0.encode(&row);
        let f32_scaled = RowFormat::F32.encode(&row);
        let f32_scale = f32::from_le_bytes(f32_scaled.scale.clone().try_into().unwrap());
        let ue8m0_read = RowFormat::Ue8m0.decode(&ue8m0);
        let f32_read = RowFormat::F32.decode(&f32_scaled);
        for (channel, &bits) in row[..QUANTISED].iter().enumerate() {
            let x = bf16_value(bits);
            let scale = 2f64.powi(i32::from(ue8m0.scale[channel / 64]) - 127);
            assert_error_bound(x, bf16_value(ue8m0_read[channel]), scale, 0.0);
            let scale = f64::from(f32_scale);
            assert_error_bound(x, e4m3_value(f32_scaled.data[channel]) * scale, scale, 0.0);
            assert_error_bound(x, bf16_value(f32_read[channel]), scale, 2f64.powi(-8));
        }
    }

    /// E2M1 steps by 2 between 4 and 6: the error is at most one scale, so a sixth of the largest.
    #[test]
    fn mxfp4_keys_keep_the_stated_error(
        key in prop::collection::vec((any::<bool>(), 0x3000u16..0x4400), 128)
    ) {
        let key: Vec<u16> = key.into_iter().map(|(sign, x)| u16::from(sign) << 15 | x).collect();
        let encoded = KeyFormat::Mxfp4.encode(&key);
        for (channel, &bits) in key.iter().enumerate() {
            let scale = 2f64.powi(i32::from(encoded.scale[channel / 32]) - 127);
            let code = encoded.codes[channel / 2] >> (channel % 2 * 4);
            let error = (bf16_value(bits) - e2m1_value(code & 0xF) * scale).abs();
            prop_assert!(error <= scale, "{error:e} with scale {scale:e}");
        }
    }
}
