//! `hash_router`: experts by token id, weights by the logits of those experts.

use kv_layout::params::HashRouterParams;
use simt::mem::{Global, GlobalMut};
use simt::{thread, warp};

use super::activation::activation;
use super::topk::Routed;
use super::{GROUP, weight};
use crate::fault;

/// Threads of a block, of which eight share a token.
const THREADS: u32 = 128;

/// Looks a token's experts up and weighs them, one thread an expert.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch with 128 threads a block call
/// it.
#[inline(always)]
pub unsafe fn hash_router(
    token_id: Global<i32>,
    table: Global<i32>,
    logits: Global<f32>,
    ids: GlobalMut<i32>,
    weights: GlobalMut<f32>,
    faults: GlobalMut<u32>,
    params: HashRouterParams,
) {
    let thread = thread::block_idx_x() * THREADS + thread::thread_idx_x();
    let (token, place) = (thread / GROUP, thread % GROUP);
    let exists = token < params.tokens;
    // SAFETY: what is loaded is checked against its extent first; all lanes reach the collectives.
    unsafe {
        let id = if exists { token_id.load(u64::from(token)) } else { -1 };
        let known = id >= 0 && (id as u32) < params.vocabulary;
        let expert = Lookup { table, logits }.load(token, id, place, known, params);
        let scaling = f32::from_bits(params.scaling_bits);
        let weight = weight(expert.activation, scaling);
        let routed = Routed { ids, weights, selected: params.selected };
        if exists {
            routed.store(token, place, expert.id, weight);
        }
        let unknown_token = id != -1 && !known && place == 0;
        let refused = u32::from(unknown_token) + u32::from(expert.refused);
        fault::count(faults, thread::lane_id(), warp::reduce_add_u32(refused));
    }
}

/// Where a token's experts and their logits are.
#[derive(Clone, Copy)]
struct Lookup {
    table: Global<i32>,
    logits: Global<f32>,
}

/// One of a token's experts.
struct Expert {
    id: i32,
    activation: f32,
    /// Whether the layer has no such expert, or its logit is no number.
    refused: bool,
}

impl Lookup {
    /// The expert at `place` of token id `id`; none unless the id is known and has so many.
    ///
    /// # Safety
    /// The table has `params.vocabulary` rows, the logits the token.
    #[inline(always)]
    unsafe fn load(
        self,
        token: u32,
        id: i32,
        place: u32,
        known: bool,
        params: HashRouterParams,
    ) -> Expert {
        let none = Expert { id: -1, activation: 0.0, refused: false };
        if !known || place >= params.selected {
            return none;
        }
        let at = u64::from(id as u32) * u64::from(params.selected) + u64::from(place);
        // SAFETY: a row of the table, by this function's own contract.
        let expert = unsafe { self.table.load(at) };
        if expert < 0 || expert as u32 >= params.experts {
            return Expert { refused: true, ..none };
        }
        let at = u64::from(token) * u64::from(params.experts) + u64::from(expert as u32);
        // SAFETY: the token's row, and the expert was checked.
        let activation = activation(unsafe { self.logits.load(at) });
        let refused = activation.is_nan();
        Expert { id: expert, activation: if refused { 0.0 } else { activation }, refused }
    }
}
