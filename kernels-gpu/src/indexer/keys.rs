//! Indexer keys as operands of a matrix product: BF16 pairs in a warp's registers, exact in every
//! format.
//!
//! Lane `4 g + t` holds channels `32 t .. 32 t + 32` of key `g`: one vector load, and one group of
//! MXFP4. The inner index of a product may run in any order, so channels are taken as they unpack
//! cheapest: step `s` of eight takes from each lane the pairs `(c, c + 4)` and `(c + 1, c + 5)` with
//! `c = 8 (s / 2) + 2 (s % 2)`; inner index `8 e + 2 t + b` is channel `32 t + 8 (e / 4) + e % 4 + 4 b`.

use kv_layout::index_row::IndexFormat;
use simt::copy;
use simt::math::mul_bf16x2;
use simt::shared::Shared;

use crate::convert::{bf16x2_from_f32, f32x4_from_e4m3};

/// Keys of FP4 formats are held 2^32 times too small; see [`E2M1_UNIT`].
const SMALLER_LOG2: u32 = 32;

/// An E2M1 code in a BF16's bits (sign, lowest two exponent bits, highest mantissa bit) is 2^-126
/// times its value. This exponent's BF16 brings it back, but for the part that could overflow when
/// it is multiplied by a large scale.
const E2M1_UNIT: u32 = 126 - SMALLER_LOG2;

/// Keys of a block of the cache in shared memory, as words: 32 times their codes, then 32 times their
/// scales.
pub type Ring = Shared<u32, { RING_WORDS as usize }>;
/// Words of all blocks in shared memory: of four warps, as many each as fit.
pub const RING_WORDS: u32 = 9216;

/// A lane's 32 channels of a key.
pub trait Keys: Copy {
    /// The layout that it reads.
    const FORMAT: IndexFormat;
    /// Blocks of a warp in shared memory.
    const STAGES: u32;
    /// What a product with these keys is to be multiplied by.
    const UNIT: f32;

    /// Where the 16 bytes of codes lie whose place in the plane is `vector`: so that lanes which read
    /// together meet different banks.
    #[inline(always)]
    #[must_use]
    fn place(vector: u32) -> u32 {
        vector
    }

    /// Waits for the copies of the oldest of `STAGES - 1` blocks, a group each.
    fn wait_for_oldest();

    /// The `quarter`-th 32 channels of a key of the block at word `block`.
    ///
    /// # Safety
    /// The block is there, `key < 32`, `quarter < 4`.
    unsafe fn read(ring: Ring, block: u32, key: u32, quarter: u32) -> Self;

    /// Channels `8 WORD .. 8 WORD + 8` as BF16 pairs: (0, 4), (1, 5), (2, 6), (3, 7).
    fn pairs<const WORD: usize>(self) -> [u32; 4];

    /// What the products with a key are to be multiplied by besides.
    ///
    /// # Safety
    /// As [`Self::read`].
    unsafe fn factor(ring: Ring, block: u32, key: u32) -> f32;
}

/// [`IndexFormat::Mxfp4`]. A key with a scale above 2^33 scores NaN.
#[derive(Clone, Copy)]
pub struct Mxfp4Keys {
    codes: [u32; 4],
    scale: u32,
}

/// [`IndexFormat::Nvfp4`].
#[derive(Clone, Copy)]
pub struct Nvfp4Keys {
    codes: [u32; 4],
    /// Two E4M3: of channels 0 to 15 and of 16 to 31.
    scales: u32,
}

/// [`IndexFormat::Fp8`].
#[derive(Clone, Copy)]
pub struct Fp8Keys {
    codes: [u32; 8],
}

/// Words of a block's FP4 codes.
const FP4_WORDS: u32 = 32 * 64 / 4;
/// Words of a block's FP8 codes.
const FP8_WORDS: u32 = 32 * 128 / 4;

impl Keys for Mxfp4Keys {
    const FORMAT: IndexFormat = IndexFormat::Mxfp4;
    const STAGES: u32 = 4;
    const UNIT: f32 = (1_u64 << SMALLER_LOG2) as f32;

    #[inline(always)]
    fn wait_for_oldest() {
        copy::wait_for_groups::<2>();
    }

    #[inline(always)]
    unsafe fn read(ring: Ring, block: u32, key: u32, quarter: u32) -> Self {
        // SAFETY: 16 of the key's 64 bytes, and its four scales.
        unsafe {
            let scales = ring.load(block + FP4_WORDS + key);
            Self {
                codes: ring.load_u32x4(block + 16 * key + 4 * quarter),
                scale: scales >> (8 * quarter) & 0xFF,
            }
        }
    }

    #[inline(always)]
    fn pairs<const WORD: usize>(self) -> [u32; 4] {
        // An exponent past the largest becomes infinity, and its products NaN.
        let exponent = (self.scale + E2M1_UNIT).min(255);
        e2m1_pairs(self.codes[WORD], exponent << 7 | exponent << 23)
    }

    #[inline(always)]
    unsafe fn factor(_: Ring, _: u32, _: u32) -> f32 {
        1.0
    }
}

impl Keys for Nvfp4Keys {
    const FORMAT: IndexFormat = IndexFormat::Nvfp4;
    const STAGES: u32 = 4;
    const UNIT: f32 = Mxfp4Keys::UNIT;

    #[inline(always)]
    fn wait_for_oldest() {
        copy::wait_for_groups::<2>();
    }

    #[inline(always)]
    unsafe fn read(ring: Ring, block: u32, key: u32, quarter: u32) -> Self {
        // SAFETY: 16 of the key's 64 bytes, and half of its eight scales.
        unsafe {
            let scales = ring.load(block + FP4_WORDS + 2 * key + quarter / 2);
            Self {
                codes: ring.load_u32x4(block + 16 * key + 4 * quarter),
                scales: scales >> (16 * (quarter % 2)) & 0xFFFF,
            }
        }
    }

    #[inline(always)]
    fn pairs<const WORD: usize>(self) -> [u32; 4] {
        /// 2^94, exact as the product with it of an E4M3 is.
        const UNIT: f32 = f32::from_bits((E2M1_UNIT + 127) << 23);
        let scale = f32x4_from_e4m3(self.scales)[WORD / 2] * UNIT;
        let high = scale.to_bits() & 0xFFFF_0000;
        e2m1_pairs(self.codes[WORD], high | high >> 16)
    }

    #[inline(always)]
    unsafe fn factor(_: Ring, _: u32, _: u32) -> f32 {
        1.0
    }
}

impl Keys for Fp8Keys {
    const FORMAT: IndexFormat = IndexFormat::Fp8;
    const STAGES: u32 = 2;
    const UNIT: f32 = 1.0;

    #[inline(always)]
    fn place(vector: u32) -> u32 {
        vector ^ vector / 8 % 2
    }

    #[inline(always)]
    fn wait_for_oldest() {
        copy::wait_for_groups::<0>();
    }

    #[inline(always)]
    unsafe fn read(ring: Ring, block: u32, key: u32, quarter: u32) -> Self {
        let first = 8 * key + 2 * quarter;
        // SAFETY: 32 of the key's 128 bytes.
        unsafe {
            let [a, b, c, d] = ring.load_u32x4(block + 4 * Self::place(first));
            let [e, f, g, h] = ring.load_u32x4(block + 4 * Self::place(first + 1));
            Self { codes: [a, b, c, d, e, f, g, h] }
        }
    }

    #[inline(always)]
    fn pairs<const WORD: usize>(self) -> [u32; 4] {
        let [a, b, c, d] = f32x4_from_e4m3(self.codes[2 * WORD]);
        let [e, f, g, h] = f32x4_from_e4m3(self.codes[2 * WORD + 1]);
        [bf16x2_from_f32(a, e), bf16x2_from_f32(b, f), bf16x2_from_f32(c, g), bf16x2_from_f32(d, h)]
    }

    #[inline(always)]
    unsafe fn factor(ring: Ring, block: u32, key: u32) -> f32 {
        // SAFETY: the key's scale.
        unsafe { f32::from_bits(ring.load(block + FP8_WORDS + key)) }
    }
}

/// Eight E2M1 codes as BF16 pairs, each times the BF16 pair `scale`.
#[inline(always)]
fn e2m1_pairs(codes: u32, scale: u32) -> [u32; 4] {
    /// Codes 0 and 4 of a word, then 1 and 5.
    const FIRST: u32 = 0x000F_000F;
    const SECOND: u32 = FIRST << 4;
    const BITS: u32 = 0x81C0_81C0;
    // A product moves the magnitude to bit 6 and the sign to bit 15 at once; what else it moves is cut
    // off.
    let pair =
        |code: u32, at: u32| mul_bf16x2((code * (1 << (12 - at) | 1 << (6 - at))) & BITS, scale);
    let upper = codes >> 8;
    [
        pair(codes & FIRST, 0),
        pair(codes & SECOND, 4),
        pair(upper & FIRST, 0),
        pair(upper & SECOND, 4),
    ]
}
