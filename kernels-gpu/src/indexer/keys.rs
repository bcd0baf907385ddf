//! Indexer keys as operands of a matrix product: BF16 pairs in a warp's registers, exact in every
//! format.
//!
//! Lane `4 g + t` holds channels `32 t .. 32 t + 32` of key `g`: one vector load, and one group of
//! MXFP4. The inner index of a product may run in any order, so channels are taken as they unpack
//! cheapest: step `s` of eight takes from each lane the pairs `(c, c + 4)` and `(c + 1, c + 5)` with
//! `c = 8 (s / 2) + 2 (s % 2)`.

use kv_layout::index_row::IndexFormat;
use simt::math::mul_bf16x2;
use simt::mem::Global;

use crate::convert::{bf16x2_from_f32, f32x4_from_e4m3};

/// Keys of FP4 formats are held 2^32 times too small; see [`E2M1_UNIT`].
const SMALLER_LOG2: u32 = 32;

/// An E2M1 code in a BF16's bits (sign, lowest two exponent bits, highest mantissa bit) is 2^-126
/// times its value. This exponent's BF16 brings it back, but for the part that could overflow when
/// it is multiplied by a large scale.
const E2M1_UNIT: u32 = 126 - SMALLER_LOG2;

/// A lane's 32 channels of a key.
pub trait Keys: Copy {
    /// The layout that it reads.
    const FORMAT: IndexFormat;
    /// What a product with these keys is to be multiplied by.
    const UNIT: f32;

    /// The `quarter`-th 32 channels of the key in `row` of both planes.
    ///
    /// # Safety
    /// The planes hold the row; `quarter < 4`.
    unsafe fn load(code: Global<u8>, scale: Global<u8>, row: u64, quarter: u32) -> Self;

    /// Channels `8 WORD .. 8 WORD + 8` as BF16 pairs: (0, 4), (1, 5), (2, 6), (3, 7).
    fn pairs<const WORD: usize>(self) -> [u32; 4];

    /// What the products with the key in `row` are to be multiplied by besides.
    ///
    /// # Safety
    /// The scale plane holds the row.
    unsafe fn factor(scale: Global<u8>, row: u64) -> f32;
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

impl Keys for Mxfp4Keys {
    const FORMAT: IndexFormat = IndexFormat::Mxfp4;
    const UNIT: f32 = (1_u64 << SMALLER_LOG2) as f32;

    #[inline(always)]
    unsafe fn load(code: Global<u8>, scale: Global<u8>, row: u64, quarter: u32) -> Self {
        let quarter = u64::from(quarter);
        // SAFETY: 16 of the key's 64 bytes, and one of its four scales.
        unsafe {
            Self {
                codes: code.load_u32x4(Self::FORMAT.code_offset(row) + 16 * quarter),
                scale: u32::from(scale.load(Self::FORMAT.scale_offset(row) + quarter)),
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
    unsafe fn factor(_: Global<u8>, _: u64) -> f32 {
        1.0
    }
}

impl Keys for Nvfp4Keys {
    const FORMAT: IndexFormat = IndexFormat::Nvfp4;
    const UNIT: f32 = Mxfp4Keys::UNIT;

    #[inline(always)]
    unsafe fn load(code: Global<u8>, scale: Global<u8>, row: u64, quarter: u32) -> Self {
        let quarter = u64::from(quarter);
        // SAFETY: 16 of the key's 64 bytes, and two of its eight scales.
        unsafe {
            Self {
                codes: code.load_u32x4(Self::FORMAT.code_offset(row) + 16 * quarter),
                scales: u32::from(scale.cast::<u16>().load(4 * row + quarter)),
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
    unsafe fn factor(_: Global<u8>, _: u64) -> f32 {
        1.0
    }
}

impl Keys for Fp8Keys {
    const FORMAT: IndexFormat = IndexFormat::Fp8;
    const UNIT: f32 = 1.0;

    #[inline(always)]
    unsafe fn load(code: Global<u8>, _: Global<u8>, row: u64, quarter: u32) -> Self {
        let at = Self::FORMAT.code_offset(row) + 32 * u64::from(quarter);
        // SAFETY: 32 of the key's 128 bytes.
        unsafe {
            let [a, b, c, d] = code.load_u32x4(at);
            let [e, f, g, h] = code.load_u32x4(at + 16);
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
    unsafe fn factor(scale: Global<u8>, row: u64) -> f32 {
        // SAFETY: by this function's own contract.
        unsafe { scale.cast::<f32>().load(row) }
    }
}

/// Eight E2M1 codes as BF16 pairs, each times the BF16 pair `scale`.
#[inline(always)]
fn e2m1_pairs(codes: u32, scale: u32) -> [u32; 4] {
    const SIGN: u32 = 0x8000_8000;
    const MAGNITUDE: u32 = 0x01C0_01C0;
    // Codes i and i + 4 are four bits of each half of the word.
    let pair = |sign: u32, magnitude: u32| mul_bf16x2(sign & SIGN | magnitude & MAGNITUDE, scale);
    [
        pair(codes << 12, codes << 6),
        pair(codes << 8, codes << 2),
        pair(codes << 4, codes >> 2),
        pair(codes, codes >> 6),
    ]
}
