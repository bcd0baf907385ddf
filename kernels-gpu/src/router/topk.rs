//! `activation_topk`: from logits to experts and weights.

use crate::args::ActivationTopk;
use simt::mem::GlobalMut;
use simt::{thread, warp};

use super::select::{Experts, load};
use super::weight;
use crate::fault;

/// Warps of a block; each handles a token.
pub const WARPS: u32 = 4;

/// The outputs: experts and weights of each token.
#[derive(Clone, Copy)]
pub struct Routed {
    /// `[tokens, selected]`.
    pub ids: GlobalMut<i32>,
    /// `[tokens, selected]` f32.
    pub weights: GlobalMut<f32>,
    /// Number of experts of a token.
    pub selected: u32,
}

impl Routed {
    /// Writes the expert and weight that lane `lane` of a token's lanes holds.
    ///
    /// # Safety
    /// The arrays have the token.
    #[inline(always)]
    pub unsafe fn store(self, token: u32, lane: u32, id: i32, weight: f32) {
        if lane < self.selected {
            let at = u64::from(token) * u64::from(self.selected) + u64::from(lane);
            // SAFETY: inside the token's row.
            unsafe {
                self.ids.store(at, id);
                self.weights.store(at, weight);
            }
        }
    }
}

/// Selects each token's experts and computes their weights, one warp a token.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch with 4 warps a block call it.
#[inline(always)]
pub unsafe fn activation_topk<const Q: usize>(args: ActivationTopk) {
    let ActivationTopk { logits, bias, token: token_mask, ids, weights, faults, params } = args;
    let lane = thread::lane_id();
    let token = thread::block_idx_x() * WARPS + thread::warp_id();
    if token >= params.tokens {
        return;
    }
    let (first, count) = Experts::<Q>::of_lane(lane, params.experts);
    let row = u64::from(token) * u64::from(params.experts) + u64::from(first);
    let routed = Routed { ids, weights, selected: params.selected };
    // SAFETY: the token and the lane's first `count` experts exist; row lengths are multiples of 32
    // and lanes' runs of 4, so addresses are multiples of 16. Branches are uniform in the warp.
    unsafe {
        let live = token_mask.load(u64::from(token)) >= 0;
        let logits = load::<Q>(logits, row, count);
        let bias = load::<Q>(bias, u64::from(first), count);
        if !live {
            routed.store(token, lane, -1, 0.0);
            return;
        }
        let experts = Experts::of_logits(logits, bias, count);
        let (id, activation) = experts.select(lane, params.selected);
        routed.store(token, lane, id, weight(activation, f32::from_bits(params.scaling_bits)));
        fault::count(faults, lane, warp::reduce_add_u32(experts.faults));
    }
}
