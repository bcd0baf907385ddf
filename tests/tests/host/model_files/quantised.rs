//! Weights in every type: exact values, compared with the formats' own arithmetic in `f64`.

use dsv4_kv_model_files::{ModelFileError, ModelFiles, Nvfp4Parts};
use half::bf16;
use safetensors::Dtype;

use dsv4_kv_tests::model_files::{Made, config, one_file, tensors};

const NAME: &str = "layers.0.attn.wq_a.weight";
const SCALE: &str = "layers.0.attn.wq_a.scale";

/// E4M3 by its definition: 1-4-3, bias 7, no infinity.
fn e4m3(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 0xF), f64::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f64::NAN,
        (0, _) => mantissa * 2_f64.powi(-9),
        _ => (1.0 + mantissa / 8.0) * 2_f64.powi(exponent - 7),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// E2M1 by its definition: 1-2-1, bias 1.
fn e2m1(code: u8) -> f64 {
    let magnitude = match code & 7 {
        low @ 0..=1 => f64::from(low) / 2.0,
        high => (1.0 + f64::from(high & 1) / 2.0) * 2_f64.powi(i32::from(high >> 1) - 1),
    };
    if code & 8 == 0 { magnitude } else { -magnitude }
}

fn power(byte: u8) -> f64 {
    2_f64.powi(i32::from(byte) - 127)
}

/// `[256]` columns with all codes in one row, with the scale `byte`.
fn all_codes(byte: u8) -> ModelFiles {
    one_file(
        &config(),
        &tensors([
            (NAME, Made::new(Dtype::F8_E4M3, &[1, 256], (0..=255).collect())),
            (SCALE, Made::new(Dtype::F8_E8M0, &[1, 2], vec![byte; 2])),
        ]),
    )
}

/// Every E4M3 code with every UE8M0 scale: the product is exact in BF16, or the error names the value that leaves its
/// range.
#[test]
fn e4m3_by_ue8m0_is_exact_in_bf16_or_refused() {
    let mut exact = 0;
    for byte in 0..=254 {
        let model_files = all_codes(byte);
        let want: Vec<f64> = (0..=255).map(|code| e4m3(code) * power(byte)).collect();
        let holds = |value: f64| value.is_nan() || f64::from(value as f32) == value;
        let bf16_holds = |value: f64| {
            value.is_nan() || f64::from(bf16::from_f32(value as f32).to_f32()) == value
        };
        match (model_files.f32(NAME, &[1, 256]), want.iter().position(|&value| !holds(value))) {
            (Ok(found), None) => assert_equal(found.iter().map(|&value| value.into()), &want),
            (Err(error), Some(at)) => assert_refused(&error, at, want[at], "f32"),
            (found, at) => panic!("scale {byte}: {found:?}, {at:?}"),
        }
        match (model_files.bf16(NAME, &[1, 256]), want.iter().position(|&value| !bf16_holds(value)))
        {
            (Ok(found), None) => {
                exact += 1;
                assert_equal(found.iter().map(|value| value.to_f64()), &want);
            }
            (Err(error), Some(at)) => assert_refused(&error, at, want[at], "bf16"),
            (found, at) => panic!("scale {byte}: {found:?}, {at:?}"),
        }
    }
    // From 2^-124, by which 2^-9 is BF16's least subnormal 2^-133, to 2^119, by which 448 is below 2^128.
    assert_eq!(exact, 119 + 124 + 1);
}

fn assert_equal(found: impl Iterator<Item = f64>, want: &[f64]) {
    let bits = |value: f64| if value.is_nan() { 0 } else { value.to_bits() };
    assert!(found.map(bits).eq(want.iter().copied().map(bits)));
}

fn assert_refused(error: &ModelFileError, at: usize, wanted: f64, type_name: &str) {
    match error {
        ModelFileError::WouldRound { name, index, value, to } => {
            assert_eq!((name.as_str(), *index, *value, *to), (NAME, at, wanted, type_name));
        }
        other => panic!("{other}"),
    }
}

#[test]
fn each_block_has_its_scale() {
    // Three rows of blocks by two columns of blocks; the last of both are partial.
    let (rows, columns) = (300, 200);
    let codes: Vec<u8> = (0..rows * columns).map(|at| (at * 7 % 126) as u8).collect();
    let bytes = [120, 121, 122, 123, 124, 125];
    let powers = bytes.map(|byte| power(byte) as f32);
    // As released, and as in Base models.
    let forms = [Made::new(Dtype::F8_E8M0, &[3, 2], bytes.to_vec()), Made::f32(&[3, 2], &powers)];
    for scales in forms {
        let weight = (NAME, Made::new(Dtype::F8_E4M3, &[rows, columns], codes.clone()));
        let model_files = one_file(&config(), &tensors([weight, (SCALE, scales)]));
        let found = model_files.f32(NAME, &[300, 200]).unwrap();
        assert!(model_files.unread().is_empty());
        for (at, &value) in found.iter().enumerate() {
            let byte = bytes[at / columns / 128 * 2 + at % columns / 128];
            assert_eq!(f64::from(value), e4m3(codes[at]) * power(byte), "{at}");
        }
        let exact = model_files.bf16(NAME, &[300, 200]).unwrap();
        assert!(exact.iter().map(|value| value.to_f32()).eq(found));
    }
}

/// An F32 scale need not be a power of two. Then products are rounded to f32, and BF16 cannot hold them.
#[test]
fn an_f32_scale_is_any_number_above_0() {
    let codes: Vec<u8> = (0..=255).map(|at| at % 127).collect();
    let with = |scales: [f32; 2]| {
        let weight = (NAME, Made::new(Dtype::F8_E4M3, &[1, 256], codes.clone()));
        one_file(&config(), &tensors([weight, (SCALE, Made::f32(&[1, 2], &scales))]))
    };
    let model_files = with([1.0, 0.3]);
    let found = model_files.f32(NAME, &[1, 256]).unwrap();
    for (at, &value) in found.iter().enumerate() {
        let scale = if at < 128 { 1.0 } else { 0.3 };
        assert_eq!(value, e4m3(codes[at]) as f32 * scale, "{at}");
    }
    let at = (128..256).find(|&at| codes[at] != 0).expect("a product that is not 0");
    let product = e4m3(codes[at]) * f64::from(0.3_f32);
    assert_refused(&model_files.bf16(NAME, &[1, 256]).unwrap_err(), at, product, "bf16");
    let infinite = with([1.0, f32::MAX]).f32(NAME, &[1, 256]).unwrap_err();
    assert!(matches!(infinite, ModelFileError::WouldRound { to: "f32", .. }), "{infinite}");
    for scale in [0.0, -0.0, -1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let model_files = with([1.0, scale]);
        let shape = [1, 256];
        for error in [model_files.f32(NAME, &shape).err(), model_files.bf16(NAME, &shape).err()] {
            match error {
                Some(ModelFileError::BadScale { name, index: 1 }) => assert_eq!(name, SCALE),
                other => panic!("{scale}: {other:?}"),
            }
        }
    }
}

#[test]
fn mxfp4_has_a_scale_for_32_columns_of_a_row() {
    let (rows, columns) = (3, 96);
    let bytes: Vec<u8> = (0..rows * columns / 2).map(|at| (at * 37 % 256) as u8).collect();
    let scales: Vec<u8> = (0..9).map(|at| 118 + at).collect();
    for (dtype, shape) in [(Dtype::I8, [3, 48]), (Dtype::U8, [3, 48]), (Dtype::F4, [3, 96])] {
        let model_files = one_file(
            &config(),
            &tensors([
                (NAME, Made::new(dtype, &shape, bytes.clone())),
                (SCALE, Made::new(Dtype::F8_E8M0, &[3, 3], scales.clone())),
            ]),
        );
        let found = model_files.f32(NAME, &[3, 96]).unwrap();
        let exact = model_files.bf16(NAME, &[3, 96]).unwrap();
        assert_eq!(found.len(), rows * columns);
        for (at, &value) in found.iter().enumerate() {
            // The even column is in the low four bits.
            let code = bytes[at / 2] >> (4 * (at % 2)) & 0xF;
            let want = e2m1(code) * power(scales[at / columns * 3 + at % columns / 32]);
            assert_eq!((f64::from(value), exact[at].to_f64()), (want, want), "{at}");
        }
    }
}

/// Two codes share a byte, which belongs to one row.
#[test]
fn rows_of_fp4_have_an_even_number_of_columns() {
    for columns in [1, 3] {
        let made = Made::new(Dtype::F4, &[2, columns], vec![0; columns]);
        let scale = "layers.0.attn.wq_a.weight_scale";
        let whole = "layers.0.attn.wq_a.weight_scale_2";
        let scale = (scale, Made::new(Dtype::F8_E4M3, &[2, 1], vec![0x38; 2]));
        let whole = (whole, Made::f32(&[], &[1.0]));
        let mxfp4 = (SCALE, Made::new(Dtype::F8_E8M0, &[2, 1], vec![127; 2]));
        let odd = [2, columns as u64];
        let model_files = one_file(&config(), &tensors([(NAME, made.clone()), mxfp4]));
        let refused = model_files.f32(NAME, &odd).unwrap_err();
        assert!(matches!(refused, ModelFileError::Shape { .. }), "{refused}");
        let model_files = one_file(&config(), &tensors([(NAME, made), scale, whole]));
        let refused = model_files.nvfp4(NAME, odd).map(drop).unwrap_err();
        assert!(matches!(refused, ModelFileError::Shape { .. }), "{refused}");
    }
}

#[test]
fn nvfp4_has_a_scale_for_16_columns_and_one_for_all() {
    let bytes: Vec<u8> = (0..2 * 32).map(|at| (at * 41 % 256) as u8).collect();
    let scales: Vec<u8> = (0..8).map(|at| 0x30 + 3 * at).collect();
    for whole in [0.25_f32, 0.1] {
        for shape in [&[][..], &[1]] {
            let model_files = one_file(
                &config(),
                &tensors([
                    (NAME, Made::new(Dtype::U8, &[2, 32], bytes.clone())),
                    (
                        "layers.0.attn.wq_a.weight_scale",
                        Made::new(Dtype::F8_E4M3, &[2, 4], scales.clone()),
                    ),
                    ("layers.0.attn.wq_a.weight_scale_2", Made::f32(shape, &[whole])),
                ]),
            );
            let found = model_files.f32(NAME, &[2, 64]).unwrap();
            for (at, &value) in found.iter().enumerate() {
                let code = bytes[at / 2] >> (4 * (at % 2)) & 0xF;
                let want = e2m1(code) * e4m3(scales[at / 64 * 4 + at % 64 / 16]) * f64::from(whole);
                assert_eq!(value, want as f32, "{at}");
            }
            // A scale that is a power of two keeps the products exact; another factor does not.
            match (whole == 0.25, model_files.bf16(NAME, &[2, 64])) {
                (true, Ok(exact)) => {
                    assert!(exact.iter().map(|value| value.to_f32()).eq(found));
                }
                (false, Err(ModelFileError::WouldRound { to: "bf16", .. })) => (),
                (_, other) => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn nvfp4_is_given_as_it_is() {
    let bytes: Vec<u8> = (0..2 * 32).map(|at| (at * 41 % 256) as u8).collect();
    let scales: Vec<u8> = (0..8).map(|at| 0x30 + 3 * at).collect();
    let weight = |name: &str, last: &str, value: f32| {
        one_file(
            &config(),
            &tensors([
                (
                    &format!("layers.0.attn.wq_a.{name}"),
                    Made::new(Dtype::U8, &[2, 32], bytes.clone()),
                ),
                (
                    "layers.0.attn.wq_a.weight_scale",
                    Made::new(Dtype::F8_E4M3, &[2, 4], scales.clone()),
                ),
                (&format!("layers.0.attn.wq_a.{last}"), Made::f32(&[1], &[value])),
            ]),
        )
    };
    let multiplied = weight("weight", "weight_scale_2", 0.1);
    let divided = weight("weight_packed", "weight_global_scale", 3.0);
    for (model_files, scale) in [(&multiplied, 0.1_f32), (&divided, 1.0_f32 / 3.0)] {
        let parts = model_files.nvfp4(NAME, [2, 64]).unwrap().expect("NVFP4");
        assert_eq!(parts, Nvfp4Parts { codes: bytes.clone(), scales: scales.clone(), scale });
        let values = model_files.f32(NAME, &[2, 64]).unwrap();
        for (at, &value) in values.iter().enumerate() {
            let code = bytes[at / 2] >> (4 * (at % 2)) & 0xF;
            let want = e2m1(code) * e4m3(scales[at / 64 * 4 + at % 64 / 16]) * f64::from(scale);
            assert_eq!(value, want as f32, "{at}");
        }
        let error = model_files.nvfp4(NAME, [2, 32]).unwrap_err();
        assert!(matches!(error, ModelFileError::Shape { .. }), "{error}");
    }
    let bad = [
        ("weight_scale_2", f32::NAN),
        ("weight_global_scale", 0.0),
        ("weight_global_scale", f32::INFINITY),
    ];
    for (last, value) in bad {
        let error = weight("weight", last, value).nvfp4(NAME, [2, 64]).unwrap_err();
        let named = matches!(&error, ModelFileError::BadScale { name, .. } if name.ends_with(last));
        assert!(named, "{error}");
    }
    let other = one_file(&config(), &tensors([(NAME, Made::bf16(&[1, 2], &[1.0, 2.0]))]));
    assert_eq!(other.nvfp4(NAME, [1, 2]).unwrap(), None);
}

#[test]
fn bf16_and_f32_are_what_they_were() {
    let values = [1.0, -2.5, f32::MIN_POSITIVE, 0.0, -0.0, 3.25];
    let model_files = one_file(
        &config(),
        &tensors([
            ("a", Made::bf16(&[2, 3], &values)),
            ("b", Made::f32(&[6], &values)),
            ("c", Made::f32(&[3], &[1.0, 1.0 + f32::EPSILON, 2.0])),
            (
                "d",
                Made::new(
                    Dtype::BF16,
                    &[65_536],
                    (0..=u16::MAX).flat_map(u16::to_le_bytes).collect(),
                ),
            ),
        ]),
    );
    assert_eq!(model_files.f32("a", &[2, 3]).unwrap(), values);
    assert_eq!(model_files.f32("b", &[6]).unwrap(), values);
    assert_eq!(model_files.bf16("b", &[6]).unwrap(), values.map(bf16::from_f32));
    let error = model_files.bf16("c", &[3]).unwrap_err();
    assert!(matches!(error, ModelFileError::WouldRound { index: 1, to: "bf16", .. }), "{error}");
    let bits = model_files.bf16("d", &[65_536]).unwrap();
    assert!(bits.iter().map(|value| value.to_bits()).eq(0..=u16::MAX), "NaN included");
}

#[test]
fn integers() {
    let model_files = one_file(
        &config(),
        &tensors([
            ("a", Made::i64(&[2, 2], &[0, -1, i64::MAX, 5])),
            (
                "b",
                Made::new(
                    Dtype::I32,
                    &[2],
                    [7_i32, -8].iter().flat_map(|x| x.to_le_bytes()).collect(),
                ),
            ),
            ("c", Made::f32(&[1], &[1.0])),
        ]),
    );
    assert_eq!(model_files.i64("a", &[2, 2]).unwrap(), [0, -1, i64::MAX, 5]);
    assert_eq!(model_files.i64("b", &[2]).unwrap(), [7, -8]);
    assert!(matches!(model_files.i64("c", &[1]), Err(ModelFileError::Type { .. })));
    assert!(matches!(model_files.f32("a", &[2, 2]), Err(ModelFileError::Type { .. })));
}

#[test]
fn what_a_weight_lacks_is_named() {
    let codes = |dtype, columns| Made::new(dtype, &[1, columns], vec![0x11; columns]);
    let scale = |dtype, columns| Made::new(dtype, &[1, columns], vec![0x38; columns]);
    let read = |pairs: &[(&str, Made)], shape: [u64; 2]| {
        let written = pairs.iter().map(|(name, made)| ((*name).to_owned(), made.clone())).collect();
        one_file(&config(), &written).f32(NAME, &shape)
    };
    use ModelFileError as Error;
    let missing = |found: Result<Vec<f32>, Error>, wanted: &str| match found {
        Err(Error::Missing { name }) => assert_eq!(name, wanted),
        other => panic!("{other:?}"),
    };
    missing(read(&[], [1, 64]), NAME);
    missing(read(&[(NAME, codes(Dtype::F8_E4M3, 64))], [1, 64]), SCALE);
    missing(read(&[(NAME, codes(Dtype::I8, 32))], [1, 64]), SCALE);
    let first = "layers.0.attn.wq_a.weight_scale";
    let half = [(NAME, codes(Dtype::U8, 32)), (first, scale(Dtype::F8_E4M3, 4))];
    missing(read(&half, [1, 64]), "layers.0.attn.wq_a.weight_scale_2");
    let wrong = [(NAME, codes(Dtype::F8_E4M3, 64)), (SCALE, scale(Dtype::F8_E8M0, 2))];
    match read(&wrong, [1, 64]) {
        Err(Error::Shape { name, found, expected }) => {
            assert_eq!((&*name, found, expected), (SCALE, vec![1, 2], vec![1, 1]));
        }
        other => panic!("{other:?}"),
    }
    for wrong in [
        [(NAME, codes(Dtype::I8, 32)), (SCALE, scale(Dtype::F8_E4M3, 2))],
        [(NAME, codes(Dtype::F8_E4M3, 64)), (SCALE, scale(Dtype::F8_E4M3, 1))],
        // INT4 looks so.
        [(NAME, codes(Dtype::U8, 32)), (SCALE, Made::f32(&[1, 2], &[1.0; 2]))],
    ] {
        assert!(matches!(read(&wrong, [1, 64]), Err(Error::Type { name, .. }) if name == SCALE));
    }
    for shape in [[1, 32], [1, 63], [2, 64], [64, 1]] {
        let right = [(NAME, codes(Dtype::I8, 32)), (SCALE, scale(Dtype::F8_E8M0, 2))];
        assert!(matches!(read(&right, shape), Err(Error::Shape { .. })), "{shape:?}");
    }
    let nan = Made::new(Dtype::F8_E8M0, &[1, 2], vec![0x7F, 0xFF]);
    match read(&[(NAME, codes(Dtype::I8, 32)), (SCALE, nan)], [1, 64]) {
        Err(Error::BadScale { name, index: 1 }) => assert_eq!(name, SCALE),
        other => panic!("{other:?}"),
    }
}
