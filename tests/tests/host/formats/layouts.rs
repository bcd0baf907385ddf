//! Byte offsets of rows and keys compared with numbers worked out by hand, also beyond 2^32; and the widths of the
//! planes that the oracle writes, compared with `kv_layout`.

use dsv4_kv_oracle::index::KeyFormat;
use dsv4_kv_oracle::row::RowFormat;
use kv_layout::geometry::{BLOCK_TOKENS, LayerKind};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::{self, MainFormat};

#[test]
fn main_rows_are_584_and_580_bytes() {
    assert_eq!(main_row::DATA_BYTES, 576);
    assert_eq!(MainFormat::ALL.map(MainFormat::row_bytes), [584, 580]);
    assert_eq!(MainFormat::ALL.map(MainFormat::scale_bytes), [8, 4]);
}

#[test]
fn main_row_offsets() {
    assert_eq!([0, 1, 1000].map(main_row::data_offset), [0, 576, 576_000]);
    assert_eq!([0, 1, 1000].map(main_row::rope_offset), [448, 1024, 576_448]);
    // The first row whose data starts past 2^32: ceil(2^32 / 576) = 7,456,541.
    assert_eq!(main_row::data_offset(7_456_540), 4_294_967_040);
    assert_eq!(main_row::data_offset(7_456_541), 4_294_967_616);
    // The last row a 32-bit row number can name.
    assert_eq!(main_row::data_offset(0xFFFF_FFFF), 2_473_901_161_920);
    assert_eq!(MainFormat::Ue8m0.scale_offset(0xFFFF_FFFF), 34_359_738_360);
    assert_eq!(MainFormat::F32.scale_offset(0xFFFF_FFFF), 17_179_869_180);
}

#[test]
fn ring_rows_do_not_wrap_at_32_bits() {
    assert_eq!(main_row::ring_row(0, 128, 129), 1);
    assert_eq!(main_row::ring_row(3, 128, 129), 385);
    assert_eq!(main_row::ring_row(40_000_000, 131, 131), 5_240_000_000);
}

#[test]
fn index_keys_are_72_68_and_132_bytes() {
    assert_eq!(IndexFormat::ALL.map(IndexFormat::row_bytes), [72, 68, 132]);
    assert_eq!(IndexFormat::ALL.map(IndexFormat::code_bytes), [64, 64, 128]);
    assert_eq!(IndexFormat::ALL.map(IndexFormat::scale_bytes), [8, 4, 4]);
}

#[test]
fn index_key_offsets() {
    assert_eq!(IndexFormat::ALL.map(|format| format.code_offset(3)), [192, 192, 384]);
    assert_eq!(IndexFormat::ALL.map(|format| format.scale_offset(3)), [24, 12, 12]);
    // 2^26 keys of 64 bytes are 2^32 bytes; of 128 bytes, 2^33.
    assert_eq!(
        IndexFormat::ALL.map(|format| format.code_offset(1 << 26)),
        [4_294_967_296, 4_294_967_296, 8_589_934_592]
    );
}

#[test]
fn a_block_holds_32_csa_entries_and_one_hca_entry() {
    assert_eq!(BLOCK_TOKENS, 128);
    let entries =
        [LayerKind::Swa, LayerKind::Csa, LayerKind::Hca].map(LayerKind::entries_per_block);
    assert_eq!(entries, [0, 32, 1]);
}

#[test]
fn the_oracle_writes_planes_of_these_widths() {
    for format in MainFormat::ALL {
        let row = RowFormat::from_name(format.name()).expect("the oracle knows the format");
        let encoded = row.encode(&[0x3F80; 512]);
        assert_eq!(encoded.data.len() as u64, main_row::DATA_BYTES);
        assert_eq!(encoded.scale.len() as u64, format.scale_bytes());
    }
    for format in IndexFormat::ALL {
        let key = KeyFormat::from_name(format.name()).expect("the oracle knows the format");
        let encoded = key.encode(&[0x3F80; 128]);
        assert_eq!(encoded.codes.len() as u64, format.code_bytes());
        assert_eq!(encoded.scale.len() as u64, format.scale_bytes());
    }
    assert_eq!(RowFormat::ALL.len(), MainFormat::ALL.len());
    assert_eq!(KeyFormat::ALL.len(), IndexFormat::ALL.len());
    assert_eq!(RowFormat::from_name("bf16"), None);
    assert_eq!(KeyFormat::from_name("bf16"), None);
}
