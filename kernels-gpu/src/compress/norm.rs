//! Turns a pooled vector into an entry: RMS norm over all channels, rotary embedding on the last 64.

use kv_layout::geometry::ROPE_DIM;
use simt::mem::Global;

use super::{Quad, load_quad};
use crate::convert::bf16x2_from_f32;
use crate::math::{cos_sin, rms_scale, rotate};

/// The sum of squares of a thread's four channels.
#[inline(always)]
#[must_use]
pub fn sum_of_squares([a, b, c, d]: Quad) -> f32 {
    ((a * a + b * b) + c * c) + d * d
}

/// Norm weights and rotary frequencies for [`Finish::apply`], loaded while the pooled vector is still computed.
#[derive(Clone, Copy)]
pub struct Finish {
    weight: Quad,
    frequency: [f32; 2],
    rotary: bool,
}

impl Finish {
    /// Loads the weights and frequencies of four channels of a vector of `DIM`.
    ///
    /// # Safety
    /// `norm` holds `DIM` weights, `frequencies` 32; `channel` is a multiple of 4 below `DIM`.
    #[inline(always)]
    #[must_use]
    pub unsafe fn load<const DIM: u32>(
        norm: Global<f32>,
        frequencies: Global<f32>,
        channel: u32,
    ) -> Self {
        let rotary = channel >= DIM - ROPE_DIM;
        let pair = u64::from(if rotary { (channel - (DIM - ROPE_DIM)) / 2 } else { 0 });
        // SAFETY: by this function's own contract: pairs 0..32.
        unsafe {
            let load = |pair| f32::from_bits(frequencies.load_u32_volatile(pair));
            let frequency = [load(pair), load(pair + 1)];
            Self { weight: load_quad(norm, u64::from(channel)), frequency, rotary }
        }
    }

    /// The (cos, sin) of both pairs for a window whose first token is at `position`.
    #[inline(always)]
    #[must_use]
    pub fn rotation(self, position: u32) -> [(f32, f32); 2] {
        if self.rotary {
            self.frequency.map(|frequency| cos_sin(position as f32 * frequency))
        } else {
            [(1.0, 0.0); 2]
        }
    }

    /// Norms and rotates four channels of a pooled vector of `DIM`, and rounds them once: two words
    /// of BF16 pairs. `squares` is the sum over all channels.
    #[inline(always)]
    #[must_use]
    pub fn apply<const DIM: u32>(
        self,
        pooled: Quad,
        squares: f32,
        rotation: [(f32, f32); 2],
    ) -> [u32; 2] {
        let scale = rms_scale::<DIM>(squares);
        let weight = self.weight;
        let [mut a, mut b, mut c, mut d] = [
            pooled[0] * scale * weight[0],
            pooled[1] * scale * weight[1],
            pooled[2] * scale * weight[2],
            pooled[3] * scale * weight[3],
        ];
        if self.rotary {
            [a, b] = rotate(a, b, rotation[0]);
            [c, d] = rotate(c, d, rotation[1]);
        }
        [bf16x2_from_f32(a, b), bf16x2_from_f32(c, d)]
    }
}
