//! An indexer key in a warp's registers: lane `l` holds channels `4 l .. 4 l + 4`.
//! See docs/specification.md, sections 3 and 8.

use kv_layout::format::{E2m1, E4m3, Ue8m0};
use kv_layout::index_row::IndexFormat;
use simt::mem::GlobalMut;
use simt::warp;

use crate::compress::Quad;
use crate::convert::{
    bf16x2_from_f32, e2m1x2_from_f32, e4m3x4_from_f32, f32x2_from_bf16, f32x4_from_e4m3,
};

/// Multiplies the key by the orthonormal Hadamard matrix of order 128, natural order, and rounds it
/// to BF16: what the released model does to a key before it quantises it.
///
/// # Safety
/// All 32 lanes of the warp call it together.
#[inline(always)]
#[must_use]
pub unsafe fn hadamard(values: Quad, lane: u32) -> Quad {
    const SCALE: f32 = 0.088_388_35; // 1 / sqrt(128)
    let [a, b, c, d] = values;
    let [a, b, c, d] = [a + b, a - b, c + d, c - d];
    let mut values = [a + c, b + d, a - c, b - d];
    let mut mask = 1;
    while mask < 32 {
        values = values.map(|value| {
            // SAFETY: the lanes are together, by this function's own contract.
            let other = unsafe { warp::shuffle_xor_f32(value, mask) };
            if lane & mask == 0 { value + other } else { other - value }
        });
        mask *= 2;
    }
    let [a, b, c, d] = values.map(|value| value * SCALE);
    quad_from_bf16([bf16x2_from_f32(a, b), bf16x2_from_f32(c, d)])
}

/// Four channels from two words of BF16 pairs.
#[inline(always)]
#[must_use]
pub fn quad_from_bf16(words: [u32; 2]) -> Quad {
    let [[a, b], [c, d]] = words.map(f32x2_from_bf16);
    [a, b, c, d]
}

/// How an indexer key is quantised and laid out.
pub trait IndexRowFormat {
    /// The layout this is the arithmetic of.
    const FORMAT: IndexFormat;

    /// Quantises the key that the warp holds and writes it to `row` of both planes.
    ///
    /// # Safety
    /// The planes hold `row`; all 32 lanes of the warp call it together.
    unsafe fn store(codes: GlobalMut<u8>, scales: GlobalMut<u8>, row: u64, lane: u32, key: Quad);

    /// The vector that the warp holds as it comes out of the format.
    ///
    /// # Safety
    /// All 32 lanes of the warp call it together.
    unsafe fn requantised(vector: Quad) -> Requantised;
}

/// A vector that went through a format.
pub struct Requantised {
    /// Values that a query against keys of the format can hold.
    pub values: Quad,
    /// Factor that the values are still to be multiplied by.
    pub scale: f32,
    /// The values are also to be multiplied by `2^-exponent_gap`; the same in a group
    /// ([`IndexFormat::query_exponent_gap_byte`]).
    pub exponent_gap: u32,
}

/// [`IndexFormat::Nvfp4`].
pub struct Nvfp4Row;

/// [`IndexFormat::Mxfp4`].
pub struct Mxfp4Row;

/// [`IndexFormat::Fp8`].
pub struct Fp8Row;

/// A format of E2M1 codes in groups that share a scale of one byte.
trait Fp4Row {
    /// The layout this is the arithmetic of.
    const FORMAT: IndexFormat;
    /// Lanes that share a scale.
    const LANES: u32 = Self::FORMAT.group() / 4;

    /// The scale of the lane's group, its byte and its value, and the lane's codes.
    ///
    /// # Safety
    /// All 32 lanes of the warp call it together.
    unsafe fn quantise(key: Quad) -> (u8, f32, [u8; 2]);

    /// As [`IndexRowFormat::requantised`].
    ///
    /// # Safety
    /// All 32 lanes of the warp call it together.
    unsafe fn requantised(vector: Quad) -> Requantised;
}

impl Fp4Row for Nvfp4Row {
    const FORMAT: IndexFormat = IndexFormat::Nvfp4;

    #[inline(always)]
    unsafe fn quantise(key: Quad) -> (u8, f32, [u8; 2]) {
        // SAFETY: by this function's own contract.
        let amax = unsafe { warp::reduce_max_f32_width::<{ Self::LANES }>(amax(key)) };
        let scale = E4m3::from_f32((amax / E2m1::MAX).clamp(1.0 / 512.0, E4m3::MAX));
        // By the scale that is stored, not by the one it was rounded from.
        let divisor = scale.to_f32();
        (scale.0, divisor, fp4(key.map(|value| value / divisor)))
    }

    #[inline(always)]
    unsafe fn requantised(vector: Quad) -> Requantised {
        // SAFETY: by this function's own contract.
        let (_, scale, codes) = unsafe { Self::quantise(vector) };
        Requantised {
            values: quad_from_fp4(codes).map(|value| value * scale),
            scale: 1.0,
            exponent_gap: 0,
        }
    }
}

impl Fp4Row for Mxfp4Row {
    const FORMAT: IndexFormat = IndexFormat::Mxfp4;

    #[inline(always)]
    unsafe fn quantise(key: Quad) -> (u8, f32, [u8; 2]) {
        // SAFETY: by this function's own contract.
        let amax = unsafe { warp::reduce_max_f32_width::<{ Self::LANES }>(amax(key)) };
        let scale = Ue8m0::round_up(amax.clamp(6.0 * f32::MIN_POSITIVE, f32::MAX) * (1.0 / 6.0));
        let inverse = scale.inverse();
        (scale.0, scale.to_f32(), fp4(key.map(|value| value * inverse)))
    }

    #[inline(always)]
    unsafe fn requantised(vector: Quad) -> Requantised {
        /// The largest power of two of an integer: 12 times 2^3 fits eight bits.
        const MAX_LOG2: u32 = 3;
        // SAFETY: by this function's own contract.
        unsafe {
            let (scale, _, codes) = Self::quantise(vector);
            let values = quad_from_fp4(codes);
            // A group of zeros fits any scale.
            let is_zero = warp::reduce_max_f32_width::<{ Self::LANES }>(amax(values)) == 0.0;
            let scale = u32::from(scale);
            let maximum = warp::reduce_max_u32(if is_zero { 0 } else { scale });
            let exponent_gap = if is_zero { 0 } else { maximum - scale };
            let in_powers = warp::all(exponent_gap <= MAX_LOG2);
            let (exponent_gap, log2) =
                if in_powers { (0, MAX_LOG2 - exponent_gap) } else { (exponent_gap, MAX_LOG2) };
            let power = (2 << log2) as f32;
            Requantised {
                values: values.map(|value| value * power),
                scale: Ue8m0(maximum as u8).to_f32() / (2 << MAX_LOG2) as f32,
                exponent_gap,
            }
        }
    }
}

impl<F: Fp4Row> IndexRowFormat for F {
    const FORMAT: IndexFormat = F::FORMAT;

    #[inline(always)]
    unsafe fn store(codes: GlobalMut<u8>, scales: GlobalMut<u8>, row: u64, lane: u32, key: Quad) {
        // SAFETY: by this function's own contract; a row is 32 pairs of bytes.
        unsafe {
            let (scale, _, bytes) = F::quantise(key);
            codes.cast::<u16>().store(row * 32 + u64::from(lane), u16::from_le_bytes(bytes));
            if lane.is_multiple_of(F::LANES) {
                scales.store(F::FORMAT.scale_offset(row) + u64::from(lane / F::LANES), scale);
            }
        }
    }

    #[inline(always)]
    unsafe fn requantised(vector: Quad) -> Requantised {
        // SAFETY: by this function's own contract.
        unsafe { <F as Fp4Row>::requantised(vector) }
    }
}

impl Fp8Row {
    /// The scale of the key, and the lane's codes, the first in the lowest byte.
    ///
    /// # Safety
    /// All 32 lanes of the warp call it together.
    #[inline(always)]
    unsafe fn quantise(key: Quad) -> (f32, u32) {
        // SAFETY: by this function's own contract.
        let amax = unsafe { warp::reduce_max_f32(amax(key)) };
        let scale = amax.clamp(1e-4, f32::MAX) / E4m3::MAX;
        let inverse = 1.0 / scale;
        (scale, e4m3x4_from_f32(key.map(|value| value * inverse)))
    }
}

impl IndexRowFormat for Fp8Row {
    const FORMAT: IndexFormat = IndexFormat::Fp8;

    #[inline(always)]
    unsafe fn store(codes: GlobalMut<u8>, scales: GlobalMut<u8>, row: u64, lane: u32, key: Quad) {
        // SAFETY: by this function's own contract.
        unsafe {
            let (scale, word) = Self::quantise(key);
            codes.cast::<u32>().store(row * 32 + u64::from(lane), word);
            if lane == 0 {
                scales.cast::<f32>().store(row, scale);
            }
        }
    }

    #[inline(always)]
    unsafe fn requantised(vector: Quad) -> Requantised {
        // SAFETY: by this function's own contract.
        let (scale, word) = unsafe { Self::quantise(vector) };
        Requantised { values: f32x4_from_e4m3(word), scale, exponent_gap: 0 }
    }
}

/// The E2M1 codes of four values, two a byte.
#[inline(always)]
fn fp4([a, b, c, d]: Quad) -> [u8; 2] {
    [e2m1x2_from_f32(a, b), e2m1x2_from_f32(c, d)]
}

/// The exact values of four E2M1 codes.
#[inline(always)]
fn quad_from_fp4([low, high]: [u8; 2]) -> Quad {
    let ((a, b), (c, d)) = (E2m1::unpack(low), E2m1::unpack(high));
    [a, b, c, d].map(E2m1::to_f32)
}

/// The largest magnitude; a NaN does not count, and of nothing but NaN it is 0: the bits of a NaN
/// scale would differ between devices.
#[inline(always)]
fn amax([a, b, c, d]: Quad) -> f32 {
    a.abs().max(b.abs()).max(c.abs()).max(d.abs()).max(0.0)
}
