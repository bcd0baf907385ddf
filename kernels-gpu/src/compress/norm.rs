//! From a pooled vector to an entry: RMS norm over all channels, rotary embedding on the last 64.

use kv_layout::geometry::ROPE_DIM;
use simt::math::sqrt;
use simt::mem::Global;

use super::{Quad, load_quad};
use crate::convert::bf16x2_from_f32;
use crate::math::cos_sin;

/// Added to the mean square (`rms_norm_eps` of every released checkpoint).
const EPSILON: f32 = 1e-6;

/// What a thread's four channels add to the sum of squares.
#[inline(always)]
#[must_use]
pub fn sum_of_squares([a, b, c, d]: Quad) -> f32 {
    ((a * a + b * b) + c * c) + d * d
}

/// Norms and rotates four channels of a pooled vector of `DIM`, and rounds them once: two words of
/// BF16 pairs. `squares` is the sum over all channels; `position` that of the window's first token.
///
/// # Safety
/// `norm` holds `DIM` weights, `frequencies` 32; `channel` is a multiple of 4 below `DIM`.
#[inline(always)]
#[must_use]
pub unsafe fn finish<const DIM: u32>(
    pooled: Quad,
    squares: f32,
    norm: Global<f32>,
    frequencies: Global<f32>,
    position: u32,
    channel: u32,
) -> [u32; 2] {
    let scale = 1.0 / sqrt(squares / DIM as f32 + EPSILON);
    // SAFETY: by this function's own contract.
    let weight = unsafe { load_quad(norm, u64::from(channel)) };
    let [mut a, mut b, mut c, mut d] = [
        pooled[0] * scale * weight[0],
        pooled[1] * scale * weight[1],
        pooled[2] * scale * weight[2],
        pooled[3] * scale * weight[3],
    ];
    if channel >= DIM - ROPE_DIM {
        let pair = u64::from((channel - (DIM - ROPE_DIM)) / 2);
        // SAFETY: by this function's own contract: pairs 0..32.
        let frequency = unsafe { [frequencies.load(pair), frequencies.load(pair + 1)] };
        [a, b] = rotate(a, b, position as f32 * frequency[0]);
        [c, d] = rotate(c, d, position as f32 * frequency[1]);
    }
    [bf16x2_from_f32(a, b), bf16x2_from_f32(c, d)]
}

#[inline(always)]
fn rotate(even: f32, odd: f32, angle: f32) -> [f32; 2] {
    let (cos, sin) = cos_sin(angle);
    [even * cos - odd * sin, even * sin + odd * cos]
}
