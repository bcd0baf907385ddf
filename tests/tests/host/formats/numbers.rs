//! E4M3, E2M1, UE8M0 and BF16: `kv_layout`'s codecs, the oracle and the golden tables agree on every
//! code, on every BF16 input, on every tie, and on f32 bit patterns drawn at random.

use anyhow::Result;
use dsv4_kv_oracle::number;
use dsv4_kv_tests::golden;
use kv_layout::format::{E2m1, E4m3, Ue8m0, bf16_from_f32, bf16_to_f32};
use proptest::prelude::*;

/// Asserts equal numbers, the sign of zero included; any NaN equals any NaN.
#[track_caller]
fn assert_same(found: f32, expected: f64, what: impl std::fmt::Debug) {
    let expected = expected as f32;
    let same = found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan());
    assert!(same, "{what:?}: {found:e} instead of {expected:e}");
}

#[test]
fn e4m3_decodes_every_code() -> Result<()> {
    let table = golden::load::<f32>("e4m3_decode")?;
    assert_eq!(table.shape, [256]);
    for (code, &value) in (0u8..=255).zip(&table.data) {
        assert_same(number::e4m3_value(code) as f32, value.into(), code);
        assert_same(E4m3(code).to_f32(), value.into(), code);
    }
    Ok(())
}

#[test]
fn e2m1_decodes_every_code() -> Result<()> {
    let table = golden::load::<f32>("e2m1_decode")?;
    assert_eq!(table.shape, [16]);
    for (code, &value) in (0u8..16).zip(&table.data) {
        assert_same(number::e2m1_value(code) as f32, value.into(), code);
        assert_same(E2m1(code).to_f32(), value.into(), code);
    }
    Ok(())
}

#[test]
fn e4m3_encodes_as_the_golden_tables() -> Result<()> {
    for name in ["e4m3_enc", "e4m3_rand"] {
        let inputs = golden::load::<f32>(&format!("{name}_in"))?;
        let codes = golden::load::<u8>(&format!("{name}_out"))?;
        assert_eq!(inputs.shape, codes.shape);
        for (&x, &code) in inputs.data.iter().zip(&codes.data) {
            assert_eq!(number::e4m3_nearest(x), code, "oracle, {x:e}");
            assert_eq!(E4m3::from_f32(x).0, code, "kv_layout, {x:e}");
        }
    }
    Ok(())
}

#[test]
fn e2m1_encodes_as_the_golden_table() -> Result<()> {
    let inputs = golden::load::<f32>("e2m1_enc_in")?;
    let codes = golden::load::<u8>("e2m1_enc_rne")?;
    assert_eq!(inputs.shape, codes.shape);
    for (&x, &code) in inputs.data.iter().zip(&codes.data) {
        assert_eq!(number::e2m1_nearest(x), code, "oracle, {x:e}");
        assert_eq!(E2m1::from_f32(x).0, code, "kv_layout, {x:e}");
    }
    Ok(())
}

/// The other rounding in use (ties towards zero) differs at three magnitudes. A comparison that could not tell them
/// apart would prove nothing.
#[test]
fn e2m1_is_not_the_threshold_variant() -> Result<()> {
    let inputs = golden::load::<f32>("e2m1_enc_in")?;
    let threshold = golden::load::<u8>("e2m1_enc_threshold")?;
    let mut differing: Vec<f32> = inputs
        .data
        .iter()
        .zip(&threshold.data)
        .filter(|&(&x, &code)| x != 0.0 && E2m1::from_f32(x).0 & 7 != code & 7)
        .map(|(x, _)| x.abs())
        .collect();
    differing.sort_by(f32::total_cmp);
    differing.dedup();
    assert_eq!(differing, golden::load::<f32>("e2m1_rne_vs_threshold_diff")?.data);
    assert_eq!(differing, [0.75, 1.75, 3.5]);
    Ok(())
}

#[test]
fn every_bf16_input_encodes_to_the_nearest_code() {
    for bits in 0..=u16::MAX {
        let x = bf16_to_f32(bits);
        assert_eq!(E4m3::from_f32(x).0, number::e4m3_nearest(x), "E4M3 of {x:e}");
        assert_eq!(E2m1::from_f32(x).0, number::e2m1_nearest(x), "E2M1 of {x:e}");
    }
}

#[test]
fn every_bf16_decodes_and_encodes_back() {
    for bits in 0..=u16::MAX {
        let x = bf16_to_f32(bits);
        assert_same(x, number::bf16_value(bits), bits);
        let back = if x.is_nan() { 0x7FFF } else { bits };
        assert_eq!((bf16_from_f32(x), number::bf16_nearest(x)), (back, back), "{x:e}");
    }
}

#[test]
fn bf16_rounds_ties_to_even_and_overflows_to_infinity() {
    for (x, bits) in [
        (0x3F80_8000, 0x3F80), // the tie above 1.0, an even code
        (0x3F80_8001, 0x3F81),
        (0x3F81_8000, 0x3F82), // the tie above an odd code
        (0x7F7F_7FFF, 0x7F7F),
        (0x7F7F_8000, 0x7F80), // half a step above the largest value
        (0x0000_8000, 0x0000), // subnormals
        (0x0000_8001, 0x0001),
        (0xFF80_0000, 0xFF80),
        (0x7F80_0001, 0x7FFF), // a NaN whose upper half alone would be infinity
        (0xFFFF_FFFF, 0x7FFF),
    ] {
        let x = f32::from_bits(x);
        assert_eq!(number::bf16_nearest(x), bits, "oracle, {x:e}");
        assert_eq!(bf16_from_f32(x), bits, "kv_layout, {x:e}");
    }
}

#[test]
fn ue8m0_bytes_are_powers_of_two() {
    for byte in 0..=254 {
        assert_same(Ue8m0(byte).to_f32(), number::ue8m0_value(byte), byte);
    }
    for byte in 1..=254 {
        assert_same(Ue8m0(byte).inverse(), 1.0 / number::ue8m0_value(byte), byte);
    }
}

#[test]
fn ue8m0_rounds_up() {
    // amax 448 is a scale of exactly 1; the next f32 above needs 2; the floor 1e-4 gives 2^-22.
    for (scale, byte) in [
        (448.0 / 448.0, 127),
        (448.00003 / 448.0, 128),
        (1e-4 / 448.0, 105),
        (0.0, 1),
        (f32::from_bits(1), 1),
        (f32::MIN_POSITIVE, 1),
        (f32::MAX, 254),
    ] {
        assert_eq!(number::ue8m0_round_up(scale), byte, "oracle, {scale:e}");
        assert_eq!(Ue8m0::round_up(scale).0, byte, "kv_layout, {scale:e}");
    }
    for byte in 1..=254 {
        let exact = Ue8m0(byte).to_f32();
        assert_eq!(Ue8m0::round_up(exact).0, byte);
        assert_eq!(Ue8m0::round_up(exact.next_down()).0, byte);
        assert_eq!(Ue8m0::round_up(exact.next_up()).0, (byte + 1).min(254));
    }
}

#[test]
fn nibbles_lie_even_element_first() {
    for low in 0..16 {
        for high in 0..16 {
            let byte = E2m1::pack(E2m1(low), E2m1(high));
            assert_eq!(byte, low + 16 * high);
            assert_eq!(E2m1::unpack(byte), (E2m1(low), E2m1(high)));
        }
    }
}

/// Any f32. Half of them have magnitudes that these formats resolve.
fn any_f32() -> impl Strategy<Value = f32> {
    let resolved = (any::<bool>(), 110u32..140, 0u32..1 << 23).prop_map(|(sign, exponent, low)| {
        f32::from_bits(u32::from(sign) << 31 | exponent << 23 | low)
    });
    prop_oneof![any::<u32>().prop_map(f32::from_bits), resolved]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(50_000) })]

    #[test]
    fn any_f32_encodes_to_the_nearest_code(x in any_f32()) {
        prop_assert_eq!(E4m3::from_f32(x).0, number::e4m3_nearest(x));
        prop_assert_eq!(E2m1::from_f32(x).0, number::e2m1_nearest(x));
        prop_assert_eq!(bf16_from_f32(x), number::bf16_nearest(x));
        if x > 0.0 && x.is_finite() {
            prop_assert_eq!(Ue8m0::round_up(x).0, number::ue8m0_round_up(x));
        }
    }
}

/// The magnitudes at which rounding to nearest changes from one code to the next, in order. A value beyond `halfway[i]`
/// is nearer to code i + 1; at `halfway[i]` the even code wins. Computed from the values of the codes alone.
fn halfway(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let values: Vec<f64> = values.collect();
    values.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0).collect()
}

/// Checks one encoder with every f32 in the order of magnitude.
fn check_every_f32(halfway: &[f64], encode: impl Fn(f32) -> u8, sign: u8, nan: u8) {
    let mut code = 0;
    for bits in 0..=0x7F80_0000_u32 {
        let x = f32::from_bits(bits);
        let beyond = |code: u8| {
            let edge = halfway.get(usize::from(code)).copied().unwrap_or(f64::INFINITY);
            f64::from(x) > edge || (f64::from(x) == edge && edge.is_finite() && code % 2 == 1)
        };
        while beyond(code) {
            code += 1;
        }
        assert_eq!(encode(x), code, "{bits:#x}");
        assert_eq!(encode(-x), code | sign, "minus {bits:#x}");
    }
    for bits in 0x7F80_0001..=0x7FFF_FFFF_u32 {
        assert_eq!(encode(f32::from_bits(bits)), nan, "{bits:#x}");
        assert_eq!(encode(f32::from_bits(bits | 1 << 31)), nan, "minus {bits:#x}");
    }
}

/// All 2^32 f32.
#[test]
#[ignore = "half a minute: cargo test -p dsv4-kv-tests --test host -- --ignored every_f32"]
fn every_f32_rounds_to_the_nearest_code() {
    // Saturation: the last code is used up to infinity.
    let e4m3 = halfway((0..=0x7E).map(number::e4m3_value));
    check_every_f32(&e4m3, |x| E4m3::from_f32(x).0, 0x80, 0x7F);
    let e2m1 = halfway((0..=7).map(number::e2m1_value));
    check_every_f32(&e2m1, |x| E2m1::from_f32(x).0, 8, 7);
}
