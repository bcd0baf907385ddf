//! The MoE router: experts and weights of each token. See docs/specification.md, section 14.
//!
//! A warp has a token, every lane a run of consecutive experts. Everything from the logits on is plain
//! IEEE arithmetic, so that both devices select the same experts with weights of equal bits. Logits
//! made here come from tensor cores, whose sums have a fixed order on each device but not the same.

pub mod activation;
pub mod decode;
pub mod fragment;
pub mod hash;
pub mod prefill;
pub mod select;
pub mod topk;

use simt::warp;

/// Lanes that hold a token's selected experts, at least: a weight's sum runs over as many.
const GROUP: u32 = kv_layout::router::MAX_SELECTED;

/// The weight of a selected expert: its part of what the experts of its group of eight lanes have
/// together, times `scaling`. Lanes without an expert give activation 0.
///
/// # Safety
/// All lanes of the warp call it together.
#[inline(always)]
unsafe fn weight(activation: f32, scaling: f32) -> f32 {
    let mut sum = activation;
    let mut distance = GROUP / 2;
    while distance > 0 {
        // SAFETY: the caller brings all lanes; the trip count is fixed.
        sum += unsafe { warp::shuffle_xor_f32(sum, distance) };
        distance /= 2;
    }
    activation / (sum + 1e-20) * scaling
}
