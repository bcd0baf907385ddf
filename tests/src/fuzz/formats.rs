//! Number formats against the oracle: single values, and whole rows as the kernels quantise them.

use dsv4_kv::device::{EmuDevice, EmuOptions};
use dsv4_kv::ops::{self, SwaRing};
use dsv4_kv_oracle::number;
use kv_layout::format::{E2m1, E4m3, Ue8m0, bf16_from_f32};
use kv_layout::main_row::{DATA_BYTES, MainFormat};

use crate::inputs::{assert_same, download, oracle, upload, upload_bf16};

/// Takes the bytes as f32 numbers, and as one row of BF16.
///
/// # Panics
/// If an encoder or a kernel differs from the oracle.
pub fn formats(bytes: &[u8]) {
    for word in bytes.chunks_exact(4) {
        let x = f32::from_le_bytes([word[0], word[1], word[2], word[3]]);
        assert_eq!(E4m3::from_f32(x).0, number::e4m3_nearest(x), "E4M3 of {x:e}");
        assert_eq!(E2m1::from_f32(x).0, number::e2m1_nearest(x), "E2M1 of {x:e}");
        assert_eq!(bf16_from_f32(x), number::bf16_nearest(x), "BF16 of {x:e}");
        if x > 0.0 && x.is_finite() {
            assert_eq!(Ue8m0::round_up(x).0, number::ue8m0_round_up(x), "UE8M0 of {x:e}");
        }
    }
    if bytes.len() < 8 {
        return;
    }
    let row: Vec<u16> =
        bytes.chunks_exact(2).cycle().take(512).map(|b| u16::from_le_bytes([b[0], b[1]])).collect();
    for format in MainFormat::ALL {
        check_row(format, &row);
    }
}

fn check_row(format: MainFormat, row: &[u16]) {
    let device = EmuDevice::new(EmuOptions::default());
    let stream = device.stream().expect("the CPU has streams");
    let plane = |bytes| device.allocate("plane", bytes).expect("memory");
    let (data, scale) = (plane(DATA_BYTES), plane(format.scale_bytes()));
    let faults = device.allocate("fault word", 1).expect("memory");
    let (kv, at) = (upload_bf16(&stream, row), upload(&stream, &[0]));
    let ring = SwaRing { data: &data, scale: &scale, format, ring: 1, slots: 1 };
    ops::append_swa(
        &stream,
        &ops::WindowAppend { kv: &kv, row: &at, ring: &ring, faults: &faults, tokens: 1 },
    )
    .expect("one row fits");
    let want = oracle(format).encode(row);
    assert_same(&download(&stream, &data), &want.data, format.name());
    assert_same(&download(&stream, &scale), &want.scale, format.name());
}
