//! Inputs of the suite: seeded BF16 rows, formats of the oracle, and copies to and from a device.

use dsv4_kv::device::{Backend, Buffer, Stream, View};
use dsv4_kv_oracle::row::{CHANNELS, RowFormat};
use half::bf16;
use kv_layout::main_row::MainFormat;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// The oracle's name for a format.
pub fn oracle(format: MainFormat) -> RowFormat {
    RowFormat::from_name(format.name()).expect("the oracle knows every format")
}

/// `[count, 512]` BF16 bits: values like those of a model, whose magnitudes differ strongly from row to row.
pub fn rows(count: usize, seed: u64) -> Vec<Vec<u16>> {
    let mut random = StdRng::seed_from_u64(seed);
    let row = |_| {
        let size = 2f32.powi(random.random_range(-12..12));
        let mut value = || bf16::from_f32(random.random_range(-size..size)).to_bits();
        (0..CHANNELS).map(|_| value()).collect()
    };
    (0..count).map(row).collect()
}

/// Rows that expose mistakes of quantisers: zeros of both signs, subnormals, one large value among small ones, an
/// absolute maximum at and next to powers of two times 448, infinities, NaN, and arbitrary bit patterns.
pub fn special_rows(seed: u64) -> Vec<Vec<u16>> {
    let mut random = StdRng::seed_from_u64(seed);
    let constant = |value: f32| vec![bf16::from_f32(value).to_bits(); CHANNELS];
    let mut all = vec![
        constant(0.0),
        constant(-0.0),
        constant(f32::from_bits(0x0001_0000)),
        constant(448.0),
        constant(450.0),
        constant(1e-4),
        constant(9e-5),
        constant(1e-12),
        constant(9e-13),
        constant(bf16::MAX.to_f32()),
    ];
    for special in [bf16::INFINITY, bf16::NEG_INFINITY, bf16::NAN, bf16::MAX, bf16::MIN_POSITIVE] {
        let mut row = rows(1, seed).remove(0);
        row[random.random_range(0..448)] = special.to_bits();
        row[random.random_range(448..CHANNELS)] = special.to_bits();
        all.push(row);
    }
    all.extend((0..16).map(|_| (0..CHANNELS).map(|_| random.random()).collect()));
    all
}

/// A device buffer with these elements.
pub fn upload<B: Backend, T: bytemuck::Pod>(stream: &Stream<B>, values: &[T]) -> Buffer<B, T> {
    stream.upload_new("test input", values).unwrap()
}

/// All elements of a device buffer.
pub fn download<B: Backend, T: bytemuck::Pod>(stream: &Stream<B>, buffer: &View<B, T>) -> Vec<T> {
    let mut values = vec![T::zeroed(); buffer.len() as usize];
    stream.download(buffer, 0, &mut values).unwrap();
    values
}

/// A device buffer of the BF16 numbers with these bits.
pub fn upload_bf16<B: Backend>(stream: &Stream<B>, bits: &[u16]) -> Buffer<B, bf16> {
    upload(stream, bytemuck::cast_slice(bits))
}

/// The bits of all numbers of a device buffer. As bits, zeros of both signs differ, and NaN equals itself.
pub fn download_bits<B: Backend>(stream: &Stream<B>, buffer: &View<B, bf16>) -> Vec<u16> {
    bytemuck::cast_vec(download(stream, buffer))
}

/// Byte that fills memory before a launch, so that unwanted writes show. [`CANARY_BF16`] and [`CANARY_F32`] are the
/// bits of a BF16 and of an f32 made of such bytes.
pub const CANARY: u8 = 0xA5;
/// See [`CANARY`].
pub const CANARY_BF16: u16 = u16::from_ne_bytes([CANARY; 2]);
/// See [`CANARY`].
pub const CANARY_F32: u32 = u32::from_ne_bytes([CANARY; 4]);

/// A buffer of `elements` elements, filled with [`CANARY`].
pub fn filled<B: Backend, T: bytemuck::Pod>(stream: &Stream<B>, elements: usize) -> Buffer<B, T> {
    let buffer = stream.device().allocate("output", elements as u64).unwrap();
    stream.fill(&buffer, CANARY).unwrap();
    buffer
}

/// Row `row` of a plane whose rows have `bytes` bytes.
pub fn plane_row(plane: &[u8], row: usize, bytes: u64) -> &[u8] {
    &plane[row * bytes as usize..][..bytes as usize]
}

/// Asserts equality. Names only the first difference, so that a message is not as long as two tiles.
pub fn assert_same<T: PartialEq + std::fmt::Debug>(got: &[T], want: &[T], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}: lengths");
    // One comparison of the whole is fast; the search for the first difference is slow.
    if got == want {
        return;
    }
    if let Some(at) = (0..got.len()).find(|&at| got[at] != want[at]) {
        panic!("{what}: element {at} is {:?}, should be {:?}", got[at], want[at]);
    }
}
