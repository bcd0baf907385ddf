//! The weights of a query's heads, and what they make of a product.

use kv_layout::index_row::QUERY_HEADS;
use simt::math::mul_add;
use simt::mem::Global;
use simt::shared::Shared;
use simt::thread;

use super::keys::{Keys, own_thread};

/// The weights of all heads, times the format's unit, in shared memory: by quarter `t` of a warp's lanes those of heads
/// `8 i + 2 t` and `8 i + 2 t + 1`, one quarter at word `20 t`, so that all are read at once.
#[derive(Clone, Copy)]
pub struct Weights(Shared<f32, 80>);

impl Weights {
    /// Bytes that they occupy.
    pub const BYTES: u32 = Shared::<f32, 80>::BYTES;

    /// The weights that are `byte_offset` bytes into the block's shared memory.
    ///
    /// # Safety
    /// As [`Shared::at`].
    #[inline(always)]
    #[must_use]
    pub unsafe fn at(byte_offset: u32) -> Self {
        // SAFETY: by this function's own contract.
        Self(unsafe { Shared::at(byte_offset) })
    }

    /// Puts them there; to be followed by a barrier.
    ///
    /// # Safety
    /// `weight` holds the row; all threads of the four warps call it.
    #[inline(always)]
    pub unsafe fn store<K: Keys>(self, weight: Global<f32>, row: u32, heads: u32) {
        let head = own_thread();
        if head >= QUERY_HEADS {
            return;
        }
        // SAFETY: a head of the row; each one's place once.
        unsafe {
            let at = u64::from(row) * u64::from(heads) + u64::from(head);
            let weight = if head < heads { K::UNIT * weight.load(at) } else { 0.0 };
            self.0.store(20 * (head / 2 % 4) + head / 8 * 2 + head % 2, weight);
        }
    }

    /// The weighted sums, over the lane's heads, of what `positive` makes of the products of two keys.
    ///
    /// # Safety
    /// The weights are there.
    #[inline(always)]
    #[must_use]
    pub unsafe fn sums<T: Copy>(
        self,
        products: [[T; 4]; 8],
        positive: impl Fn(T) -> f32 + Copy,
    ) -> [f32; 2] {
        let quarter = 20 * (thread::lane_id() % 4);
        // Spelt out: an array walked by a loop would live in local memory.
        let add_two = |i: usize, [w, x, y, z]: [f32; 4]| {
            // SAFETY: four weights of the quarter.
            let weights = unsafe { self.0.load_u32x4(quarter + 4 * i as u32) };
            let [p, q, r, s] = weights.map(f32::from_bits);
            let ([a, b, c, d], [e, f, g, h]) =
                (products[2 * i].map(positive), products[2 * i + 1].map(positive));
            let (w, x) = (mul_add(r, e, mul_add(p, a, w)), mul_add(s, f, mul_add(q, b, x)));
            [w, x, mul_add(r, g, mul_add(p, c, y)), mul_add(s, h, mul_add(q, d, z))]
        };
        let [a, b, c, d] = add_two(3, add_two(2, add_two(1, add_two(0, [0.0; 4]))));
        [a + b, c + d]
    }

    /// Those of the lane's two heads among the `eight`-th eight.
    ///
    /// # Safety
    /// The weights are there, `eight < 8`.
    #[inline(always)]
    #[must_use]
    pub unsafe fn of_eight(self, eight: u32) -> [f32; 2] {
        let first = 20 * (thread::lane_id() % 4) + 2 * eight;
        // SAFETY: two weights of the quarter.
        unsafe { [self.0.load(first), self.0.load(first + 1)] }
    }
}

/// Twice the positive part, exactly, and cheaper than the larger of the value and zero: the units that add
/// are idle, those that compare are not.
#[inline(always)]
#[must_use]
pub fn twice_positive(x: f32) -> f32 {
    x + x.abs()
}
