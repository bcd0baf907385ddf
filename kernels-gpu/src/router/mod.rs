//! The MoE router: selects the experts of each token and computes their weights. See docs/specification.md, section 14.
//!
//! A warp handles a token, and each lane consecutive experts. From the logits on, everything is plain IEEE arithmetic,
//! so GPU and emulator select the same experts with weights of equal bits. The logits themselves come from tensor
//! cores. These add the products of a few elements in their own order, which differs from the emulator's. Apart from
//! that the order is fixed ([`order`]), so that on one device a token's logits have the same bits in every batch.

pub mod activation;
pub mod decode;
pub mod hash;
pub mod order;
pub mod prefill;
pub mod select;
pub mod topk;

use simt::warp;

/// Number of lanes over which a token's activations are summed; at least the number of its selected experts.
const GROUP: u32 = kv_layout::router::MAX_SELECTED;

/// The weight of a selected expert: its activation divided by the sum over its group of eight lanes, times
/// `scaling`. Lanes without an expert pass activation 0.
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
