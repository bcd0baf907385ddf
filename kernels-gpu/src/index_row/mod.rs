//! Indexer keys and queries in registers. See docs/specification.md, sections 3 and 8.

mod lanes;

use kv_layout::format::{E2m1, E4m3, Ue8m0};
use kv_layout::index_row::IndexFormat;
use simt::mem::GlobalMut;

use crate::compress::Quad;
use crate::convert::{e2m1_rounded, e2m1x2_from_f32, e4m3x4_from_f32, f32x4_from_e4m3};
use crate::unroll::{array_from_fn, unroll};

pub use lanes::{FourLanes, Lanes, WholeWarp, quad_from_bf16};

/// The quantisation and the layout of an indexer key.
pub trait IndexRowFormat {
    /// The layout this is the arithmetic of.
    const FORMAT: IndexFormat;

    /// Quantises the key that the warp holds and writes it to `row` of both planes.
    ///
    /// # Safety
    /// The planes hold `row`; all 32 lanes of the warp call it together.
    unsafe fn store(codes: GlobalMut<u8>, scales: GlobalMut<u8>, row: u64, lane: u32, key: Quad);

    /// The vector that the lanes hold, quantised in the format and dequantised.
    ///
    /// # Safety
    /// All 32 lanes of the warp call it together.
    unsafe fn requantised<L: Lanes<Q>, const Q: usize>(vector: [Quad; Q]) -> Requantised<Q>;
}

/// A vector that was quantised in a format, for a query.
pub struct Requantised<const Q: usize> {
    /// Values in the element type of a query against keys of the format.
    pub values: [Quad; Q],
    /// Factor by which the values must still be multiplied.
    pub scale: f32,
    /// The values of a quad must also be multiplied by `2^-exponent_gap`; the same in a group
    /// ([`IndexFormat::query_exponent_gap_byte`]).
    pub exponent_gaps: [u32; Q],
}

/// [`IndexFormat::Nvfp4`].
pub struct Nvfp4Row;

/// [`IndexFormat::Mxfp4`].
pub struct Mxfp4Row;

/// [`IndexFormat::Fp8`].
pub struct Fp8Row;

/// The largest magnitude of the group of each quad.
///
/// # Safety
/// All 32 lanes of the warp call it together.
#[inline(always)]
unsafe fn group_amax<L: Lanes<Q>, const Q: usize>(vector: [Quad; Q], group: u32) -> [f32; Q] {
    // SAFETY: by this function's own contract.
    unsafe { group_max::<L, Q>(array_from_fn(|i| amax(vector[i])), group) }
}

/// The largest of the values of each quad's group, one a quad.
///
/// # Safety
/// As [`group_amax`].
#[inline(always)]
unsafe fn group_max<L: Lanes<Q>, const Q: usize>(own: [f32; Q], group: u32) -> [f32; Q] {
    // With several vectors a warp, each lane has a part of every group.
    let per_group = if Q == 1 { 1 } else { group as usize * Q / 128 };
    let mut largest = 0.0;
    array_from_fn(|i| {
        if i % per_group == 0 {
            largest = own[i];
            unroll::<8>(|j| {
                if j < per_group {
                    largest = largest.max(own[i + j]);
                }
            });
            // SAFETY: by this function's own contract; the branch is the same in all lanes.
            largest = unsafe { L::max_of_group(largest, group) };
        }
        largest
    })
}

/// The least magnitude for which a scale is computed if one of the values is NaN, else 0. So a group whose values are
/// all NaN does not count as a group of zeros, and gets the least scale.
#[inline(always)]
fn least_of_nan([a, b, c, d]: Quad) -> f32 {
    // Infinities of both signs give NaN too; their magnitude is larger.
    if (a + b + c + d).is_nan() { LEAST_AMAX } else { 0.0 }
}

/// The largest magnitude of a group in MXFP4 up to which it has the least scale.
const LEAST_AMAX: f32 = 6.0 * f32::MIN_POSITIVE;

/// A format of E2M1 codes in groups that share a scale of one byte.
trait Fp4Row {
    /// The layout this is the arithmetic of.
    const FORMAT: IndexFormat;
    /// Lanes of [`WholeWarp`] that share a scale.
    const LANES: u32 = Self::FORMAT.group() / 4;
    /// A scale.
    type Scale: Copy + Default;

    /// The scale of a group whose largest magnitude is `amax`.
    fn scale(amax: f32) -> Self::Scale;

    /// The byte of a scale.
    fn byte(scale: Self::Scale) -> u8;

    /// Divides values of a group by the group's scale.
    fn divided(values: Quad, scale: Self::Scale) -> Quad;

    /// As [`IndexRowFormat::requantised`], for a vector that was divided by its scales and rounded. `are_zero` says
    /// whether the largest magnitude of a quad's group rounds to zero, and so the whole group.
    ///
    /// # Safety
    /// All 32 lanes of the warp call it together.
    unsafe fn requantised<L: Lanes<Q>, const Q: usize>(
        rounded: [Quad; Q],
        scales: [Self::Scale; Q],
        are_zero: [bool; Q],
    ) -> Requantised<Q>;
}

impl Fp4Row for Nvfp4Row {
    const FORMAT: IndexFormat = IndexFormat::Nvfp4;
    /// The byte and the value of a scale.
    type Scale = (u8, f32);

    #[inline(always)]
    fn scale(amax: f32) -> (u8, f32) {
        let scale = E4m3::from_f32((amax / E2m1::MAX).clamp(1.0 / 512.0, E4m3::MAX));
        (scale.0, scale.to_f32())
    }

    #[inline(always)]
    fn byte((byte, _): (u8, f32)) -> u8 {
        byte
    }

    /// Divides by the scale as it is stored, not by the one from which it was rounded.
    #[inline(always)]
    fn divided(values: Quad, (_, divisor): (u8, f32)) -> Quad {
        values.map(|value| value / divisor)
    }

    #[inline(always)]
    unsafe fn requantised<L: Lanes<Q>, const Q: usize>(
        rounded: [Quad; Q],
        scales: [(u8, f32); Q],
        _: [bool; Q],
    ) -> Requantised<Q> {
        let values = |i: usize| rounded[i].map(|value| value * scales[i].1);
        Requantised { values: array_from_fn(values), scale: 1.0, exponent_gaps: [0; Q] }
    }
}

impl Fp4Row for Mxfp4Row {
    const FORMAT: IndexFormat = IndexFormat::Mxfp4;
    /// The byte of a scale.
    type Scale = u8;

    #[inline(always)]
    fn scale(amax: f32) -> u8 {
        Ue8m0::round_up(amax.clamp(LEAST_AMAX, f32::MAX) * (1.0 / 6.0)).0
    }

    #[inline(always)]
    fn byte(scale: u8) -> u8 {
        scale
    }

    #[inline(always)]
    fn divided(values: Quad, scale: u8) -> Quad {
        let inverse = Ue8m0(scale).inverse();
        values.map(|value| value * inverse)
    }

    #[inline(always)]
    unsafe fn requantised<L: Lanes<Q>, const Q: usize>(
        rounded: [Quad; Q],
        scales: [u8; Q],
        are_zero: [bool; Q],
    ) -> Requantised<Q> {
        /// The largest power of two of an integer: 12 times 2^3 fits eight bits.
        const MAX_LOG2: u32 = 3;
        // A group of zeros is exact with any scale.
        let scale = |i: usize| if are_zero[i] { 0 } else { u32::from(scales[i]) };
        // SAFETY: by this function's own contract.
        let largest = unsafe { L::max_of_groups(max_of::<Q>(scale)) };
        let gap = |i: usize| if are_zero[i] { 0 } else { largest - scale(i) };
        // SAFETY: by this function's own contract.
        let in_powers = unsafe { L::max_of_groups(max_of::<Q>(gap)) } <= MAX_LOG2;
        let power = |i: usize| if in_powers { 2 << (MAX_LOG2 - gap(i)) } else { 2 << MAX_LOG2 };
        Requantised {
            values: array_from_fn(|i| rounded[i].map(|value| value * power(i) as f32)),
            scale: Ue8m0(largest as u8).to_f32() / (2 << MAX_LOG2) as f32,
            exponent_gaps: array_from_fn(|i| if in_powers { 0 } else { gap(i) }),
        }
    }
}

/// The largest of `of(0) .. of(Q - 1)`.
#[inline(always)]
fn max_of<const Q: usize>(of: impl Fn(usize) -> u32) -> u32 {
    let mut largest = 0;
    unroll::<Q>(|i| largest = of(i).max(largest));
    largest
}

impl<F: Fp4Row> IndexRowFormat for F {
    const FORMAT: IndexFormat = F::FORMAT;

    #[inline(always)]
    unsafe fn store(codes: GlobalMut<u8>, scales: GlobalMut<u8>, row: u64, lane: u32, key: Quad) {
        // SAFETY: by this function's own contract; a row is 32 pairs of bytes.
        unsafe {
            let [amax] = group_amax::<WholeWarp, 1>([key], F::FORMAT.group());
            let scale = F::scale(amax);
            let bytes = fp4(F::divided(key, scale));
            codes.cast::<u16>().store(row * 32 + u64::from(lane), u16::from_le_bytes(bytes));
            if lane.is_multiple_of(F::LANES) {
                let at = F::FORMAT.scale_offset(row) + u64::from(lane / F::LANES);
                scales.store(at, F::byte(scale));
            }
        }
    }

    #[inline(always)]
    unsafe fn requantised<L: Lanes<Q>, const Q: usize>(vector: [Quad; Q]) -> Requantised<Q> {
        // SAFETY: by this function's own contract.
        unsafe {
            let own: [f32; Q] = array_from_fn(|i| amax(vector[i]).max(least_of_nan(vector[i])));
            let amax = group_max::<L, Q>(own, F::FORMAT.group());
            let scales: [F::Scale; Q] = array_from_fn(|i| F::scale(amax[i]));
            let rounded = |values: Quad, i: usize| F::divided(values, scales[i]).map(e2m1_rounded);
            let values: [Quad; Q] = array_from_fn(|i| rounded(vector[i], i));
            // Rounding keeps the order: if the largest magnitude rounds to zero, all do.
            let are_zero = array_from_fn(|i| rounded([amax[i]; 4], i)[0] == 0.0);
            <F as Fp4Row>::requantised::<L, Q>(values, scales, are_zero)
        }
    }
}

impl Fp8Row {
    /// The scale of the key, and the codes of each quad, the first in the lowest byte.
    ///
    /// # Safety
    /// All 32 lanes of the warp call it together.
    #[inline(always)]
    unsafe fn quantise<L: Lanes<Q>, const Q: usize>(vector: [Quad; Q]) -> (f32, [u32; Q]) {
        // SAFETY: by this function's own contract.
        let amax = unsafe { group_amax::<L, Q>(vector, IndexFormat::Fp8.group()) };
        let scale = amax[0].clamp(1e-4, f32::MAX) / E4m3::MAX;
        let inverse = 1.0 / scale;
        (scale, array_from_fn(|i| e4m3x4_from_f32(vector[i].map(|value| value * inverse))))
    }
}

impl IndexRowFormat for Fp8Row {
    const FORMAT: IndexFormat = IndexFormat::Fp8;

    #[inline(always)]
    unsafe fn store(codes: GlobalMut<u8>, scales: GlobalMut<u8>, row: u64, lane: u32, key: Quad) {
        // SAFETY: by this function's own contract.
        unsafe {
            let (scale, [word]) = Self::quantise::<WholeWarp, 1>([key]);
            codes.cast::<u32>().store(row * 32 + u64::from(lane), word);
            if lane == 0 {
                scales.cast::<f32>().store(row, scale);
            }
        }
    }

    #[inline(always)]
    unsafe fn requantised<L: Lanes<Q>, const Q: usize>(vector: [Quad; Q]) -> Requantised<Q> {
        // SAFETY: by this function's own contract.
        let (scale, words) = unsafe { Self::quantise::<L, Q>(vector) };
        let values = array_from_fn(|i| f32x4_from_e4m3(words[i]));
        Requantised { values, scale, exponent_gaps: [0; Q] }
    }
}

/// The E2M1 codes of four values, two a byte.
#[inline(always)]
fn fp4([a, b, c, d]: Quad) -> [u8; 2] {
    [e2m1x2_from_f32(a, b), e2m1x2_from_f32(c, d)]
}

/// The largest magnitude; a NaN does not count. It is 0 if all values are NaN: the bits of a NaN scale would differ
/// between devices.
#[inline(always)]
fn amax([a, b, c, d]: Quad) -> f32 {
    a.abs().max(b.abs()).max(c.abs()).max(d.abs()).max(0.0)
}
