//! The weights of a query's heads, and the weighted sums of a product over the heads.

use kv_layout::index_row::QUERY_HEADS;
use simt::math::mul_add;
use simt::mem::Global;
use simt::shared::Shared;
use simt::thread;

/// The weights of all heads, times the format's unit, in shared memory. Lanes `4 g + t` use the weights of heads `8 i +
/// 2 t` and `8 i + 2 t + 1`. These are contiguous from word `20 t` on, so that vector loads of the four `t` have no
/// bank conflicts.
#[derive(Clone, Copy)]
pub struct Weights(Shared<f32, 80>);

impl Weights {
    /// Bytes of the weights.
    pub const BYTES: u32 = Shared::<f32, 80>::BYTES;

    /// The weights at byte `byte_offset` of the block's shared memory.
    ///
    /// # Safety
    /// As [`Shared::at`].
    #[inline(always)]
    #[must_use]
    pub unsafe fn at(byte_offset: u32) -> Self {
        // SAFETY: by this function's own contract.
        Self(unsafe { Shared::at(byte_offset) })
    }

    /// Writes the weight of head `head` of row `row`, times `unit`, to shared memory; a barrier must follow.
    ///
    /// # Safety
    /// `weight` holds the row; one thread calls it for each `head` from 0 to 63, or beyond, which writes nothing.
    #[inline(always)]
    pub unsafe fn store(self, unit: f32, weight: Global<f32>, row: u32, heads: u32, head: u32) {
        if head >= QUERY_HEADS {
            return;
        }
        // SAFETY: a head of the row; each word is written once.
        unsafe {
            let at = u64::from(row) * u64::from(heads) + u64::from(head);
            let weight = if head < heads { unit * weight.load(at) } else { 0.0 };
            self.0.store(20 * (head / 2 % 4) + head / 8 * 2 + head % 2, weight);
        }
    }

    /// The lane's weights of heads `16 i` to `16 i + 15`.
    ///
    /// # Safety
    /// The weights are written, with a barrier since; `i < 4`.
    #[inline(always)]
    #[must_use]
    pub unsafe fn of_sixteen(self, i: usize) -> [f32; 4] {
        let quarter = 20 * (thread::lane_id() % 4);
        // SAFETY: four weights of the quarter.
        unsafe { self.0.load_u32x4(quarter + 4 * i as u32) }.map(f32::from_bits)
    }

    /// Weights of the lane's two heads among heads `8 eight` to `8 eight + 7`.
    ///
    /// # Safety
    /// The weights are written, with a barrier since; `eight < 8`.
    #[inline(always)]
    #[must_use]
    pub unsafe fn of_eight(self, eight: u32) -> [f32; 2] {
        let first = 20 * (thread::lane_id() % 4) + 2 * eight;
        // SAFETY: two weights of the quarter.
        unsafe { [self.0.load(first), self.0.load(first + 1)] }
    }
}

/// The sums over the lane's heads of `weight * positive(product)`, for two keys. `of_sixteen` is as
/// [`Weights::of_sixteen`].
#[inline(always)]
#[must_use]
pub fn weighted<T: Copy>(
    products: [[T; 4]; 8],
    positive: impl Fn(T) -> f32 + Copy,
    of_sixteen: impl Fn(usize) -> [f32; 4],
) -> [f32; 2] {
    // Unrolled by hand: an array indexed by a loop variable would go to local memory.
    let add_two = |i: usize, [w, x, y, z]: [f32; 4]| {
        let [p, q, r, s] = of_sixteen(i);
        let ([a, b, c, d], [e, f, g, h]) =
            (products[2 * i].map(positive), products[2 * i + 1].map(positive));
        let (w, x) = (mul_add(r, e, mul_add(p, a, w)), mul_add(s, f, mul_add(q, b, x)));
        [w, x, mul_add(r, g, mul_add(p, c, y)), mul_add(s, h, mul_add(q, d, z))]
    };
    let [a, b, c, d] = add_two(3, add_two(2, add_two(1, add_two(0, [0.0; 4]))));
    [a + b, c + d]
}

/// Twice the positive part of `x`, exact. Cheaper than `max(x, 0)` here, since the units that add floats are idle and
/// those that compare are not.
#[inline(always)]
#[must_use]
pub fn twice_positive(x: f32) -> f32 {
    x + x.abs()
}
