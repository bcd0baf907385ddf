//! [`crate::warpgroup`] warp by warp: a product is there as soon as it is started.

use super::{Fragments, Left, right_word};
use crate::mma::bf16_m16n8k16;
use crate::shared::Shared;
use crate::thread;

pub fn fence_shared() {}

pub struct Pending(Fragments);

impl Pending {
    #[inline(always)]
    #[track_caller]
    pub unsafe fn start<const N: usize>(left: Left, right: Shared<u32, N>, first: u32) -> Self {
        // SAFETY: the caller's duty is this callee's.
        unsafe { Self([[0.0; 4]; 8]).add(left, right, first) }
    }

    #[inline(always)]
    #[track_caller]
    pub unsafe fn add<const N: usize>(self, left: Left, right: Shared<u32, N>, first: u32) -> Self {
        let (group, quarter) = (thread::lane_id() / 4, thread::lane_id() % 4);
        let columns = |eight: u32, sum: [f32; 4]| {
            // Spelt out: an array walked by a loop would live in local memory.
            let step = |i: u32, sum: [f32; 4]| {
                let word = |eighth: u32| first + right_word(eighth, 8 * eight + group) + quarter;
                // SAFETY: by the caller's promises; all lanes of the warp are together.
                unsafe {
                    let b = [right.load(word(2 * i)), right.load(word(2 * i + 1))];
                    bf16_m16n8k16(left[i as usize], b, sum)
                }
            };
            step(3, step(2, step(1, step(0, sum))))
        };
        let [a, b, c, d, e, f, g, h] = self.0;
        Self([
            columns(0, a),
            columns(1, b),
            columns(2, c),
            columns(3, d),
            columns(4, e),
            columns(5, f),
            columns(6, g),
            columns(7, h),
        ])
    }

    #[inline(always)]
    pub unsafe fn wait(self) -> Fragments {
        self.0
    }
}
