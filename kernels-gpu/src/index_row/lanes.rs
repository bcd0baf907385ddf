//! Layouts of vectors of 128 channels in a warp's registers, and their Hadamard transform.

use kv_layout::geometry::INDEX_DIM;
use simt::math::{max, mul_add};
use simt::{thread, warp};

use crate::compress::Quad;
use crate::convert::{bf16x2_from_f32, f32x2_from_bf16};
use crate::unroll::{array_from_fn, unroll};

/// A layout: the lanes that hold a vector together, each with `QUADS` times four channels.
pub trait Lanes<const QUADS: usize> {
    /// The largest `value` over the lanes that hold a group of `group` channels. A lane has a part of one group, or of
    /// all groups.
    ///
    /// # Safety
    /// All 32 lanes of the warp call it together.
    unsafe fn max_of_group(value: f32, group: u32) -> f32;

    /// The largest `value` over the lanes that hold the vector's groups.
    ///
    /// # Safety
    /// As [`Self::max_of_group`].
    unsafe fn max_of_groups(value: u32) -> u32;

    /// Multiplies the vector by the orthonormal Hadamard matrix of order 128, in natural order, and rounds it to BF16,
    /// as the released model does to a key before it quantises it.
    ///
    /// # Safety
    /// As [`Self::max_of_group`].
    unsafe fn hadamard(vector: [Quad; QUADS]) -> [Quad; QUADS];
}

/// A warp has one vector: lane `l` has channels `4 l .. 4 l + 4`.
pub struct WholeWarp;

/// Each four lanes have a vector, in the row layout of a product: lane `t` of four has, in quad `i`, channels `16 i + 2
/// t` and `16 i + 2 t + 1`, and those 8 further.
pub struct FourLanes;

/// Four channels from two words of BF16 pairs.
#[inline(always)]
#[must_use]
pub fn quad_from_bf16(words: [u32; 2]) -> Quad {
    let [[a, b], [c, d]] = words.map(f32x2_from_bf16);
    [a, b, c, d]
}

/// `f32(1 / sqrt(128))`.
const SCALE: f32 = core::f32::consts::FRAC_1_SQRT_2 / 8.0;
const _: () = assert!(INDEX_DIM == 128 && SCALE.to_bits() == 0x3DB5_04F3);

/// The vector times [`SCALE`], in BF16.
#[inline(always)]
fn scaled<const QUADS: usize>(vector: [Quad; QUADS]) -> [Quad; QUADS] {
    array_from_fn(|i| {
        let [a, b, c, d] = vector[i].map(|value| value * SCALE);
        quad_from_bf16([bf16x2_from_f32(a, b), bf16x2_from_f32(c, d)])
    })
}

/// Sum and difference of the values of this lane and of lane `lane ^ mask`: the lower lane gets the sum.
///
/// # Safety
/// All 32 lanes of the warp call it together.
#[inline(always)]
unsafe fn butterfly(value: f32, mask: u32) -> f32 {
    // SAFETY: by this function's own contract.
    let other = unsafe { warp::shuffle_xor_f32(value, mask) };
    // Times 1 or -1, which is exact: one instruction.
    mul_add(value, if thread::lane_id() & mask == 0 { 1.0 } else { -1.0 }, other)
}

impl Lanes<1> for WholeWarp {
    #[inline(always)]
    unsafe fn max_of_group(value: f32, group: u32) -> f32 {
        let (mut largest, mut mask) = (value, 1);
        while mask < group / 4 {
            // SAFETY: by this function's own contract.
            largest = max(largest, unsafe { warp::shuffle_xor_f32(largest, mask) });
            mask *= 2;
        }
        largest
    }

    #[inline(always)]
    unsafe fn max_of_groups(value: u32) -> u32 {
        // SAFETY: by this function's own contract.
        unsafe { warp::reduce_max_u32(value) }
    }

    #[inline(always)]
    unsafe fn hadamard([[a, b, c, d]]: [Quad; 1]) -> [Quad; 1] {
        let [a, b, c, d] = [a + b, a - b, c + d, c - d];
        let mut values = [a + c, b + d, a - c, b - d];
        let mut mask = 1;
        while mask < 32 {
            // SAFETY: the lanes are together, by this function's own contract.
            values = values.map(|value| unsafe { butterfly(value, mask) });
            mask *= 2;
        }
        scaled([values])
    }
}

impl Lanes<8> for FourLanes {
    #[inline(always)]
    unsafe fn max_of_group(value: f32, _: u32) -> f32 {
        // SAFETY: by this function's own contract.
        unsafe { warp::reduce_max_f32_width::<4>(value) }
    }

    /// The lane's own value: it has a part of each group.
    #[inline(always)]
    unsafe fn max_of_groups(value: u32) -> u32 {
        value
    }

    /// Order of the bits of a channel's index in which the transform takes them: within a pair, the lane, a quad's
    /// pairs, the quad.
    #[inline(always)]
    unsafe fn hadamard(vector: [Quad; 8]) -> [Quad; 8] {
        let mut quads = array_from_fn(|i| {
            let [a, b, c, d] = vector[i];
            let [a, b, c, d] = [a + b, a - b, c + d, c - d].map(|value| {
                // SAFETY: the lanes are together, by this function's own contract.
                unsafe { butterfly(butterfly(value, 1), 2) }
            });
            [a + c, b + d, a - c, b - d]
        });
        for_pairs::<1>(&mut quads);
        for_pairs::<2>(&mut quads);
        for_pairs::<4>(&mut quads);
        scaled(quads)
    }
}

/// Sums and differences of quads whose numbers differ by `D`.
#[inline(always)]
fn for_pairs<const D: usize>(quads: &mut [Quad; 8]) {
    let before = *quads;
    let add = |a: Quad, b: Quad| array_from_fn(|c| a[c] + b[c]);
    let subtract = |a: Quad, b: Quad| array_from_fn(|c| a[c] - b[c]);
    unroll::<8>(|i| {
        if i & D == 0 {
            quads[i] = add(before[i], before[i | D]);
            quads[i | D] = subtract(before[i], before[i | D]);
        }
    });
}
