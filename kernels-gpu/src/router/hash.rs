//! `hash_router`: experts from a table by token id, weights from the logits of those experts.

use crate::args::HashRouter;
use crate::params::HashRouterParams;
use simt::mem::Global;
use simt::{thread, warp};

use super::activation::activation;
use super::topk::Routed;
use super::{GROUP, weight};
use crate::fault;

/// Threads of a block; eight threads share a token.
const THREADS: u32 = 128;
/// Tokens of a block.
pub const BLOCK_TOKENS: u32 = THREADS / GROUP;

/// Looks up each token's experts and computes their weights, one thread an expert.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch with 128 threads a block call
/// it.
#[inline(always)]
pub unsafe fn hash_router(args: HashRouter) {
    let HashRouterParams { tokens, experts, selected, vocabulary, scaling_bits } = args.params;
    // Not the number of the thread in the grid, which is past u32 from 2^29 tokens on.
    let token = thread::block_idx_x() * BLOCK_TOKENS + thread::thread_idx_x() / GROUP;
    let place = thread::thread_idx_x() % GROUP;
    // SAFETY: indices are checked before the loads; all lanes reach the collectives.
    unsafe {
        let id = if token < tokens { args.token.load(u64::from(token)) } else { -1 };
        let lookup = Lookup { table: args.table, vocabulary, experts, selected };
        let row = u64::from(token) * u64::from(experts);
        let expert = lookup.weigh(id, place, |expert| activation(args.logits.load(row + expert)));
        let weight = weight(expert.activation, f32::from_bits(scaling_bits));
        if token < tokens {
            Routed { ids: args.ids, weights: args.weights, selected }
                .store(token, place, expert.id, weight);
        }
        fault::count(args.faults, thread::lane_id(), warp::reduce_add_u32(expert.refusals));
    }
}

/// The table of experts by token id.
#[derive(Clone, Copy)]
pub struct Lookup {
    /// `[vocabulary, selected]`.
    pub table: Global<i32>,
    /// Number of token ids.
    pub vocabulary: u32,
    /// Number of experts.
    pub experts: u32,
    /// Number of experts of a token.
    pub selected: u32,
}

/// One of a token's experts.
pub struct Expert {
    /// Index of the expert; -1 if there is none.
    pub id: i32,
    /// Activation of the expert; 0 if there is none.
    pub activation: f32,
    /// Number of refused inputs.
    pub refusals: u32,
}

impl Lookup {
    /// The expert at `place` in the table row of token id `id`, with `activation(expert)`. Refuses a token id out of
    /// range other than -1 (counted at place 0), an expert out of range, and an activation that is NaN.
    ///
    /// # Safety
    /// The table has its rows.
    #[inline(always)]
    #[must_use]
    pub unsafe fn weigh(self, id: i32, place: u32, activation: impl Fn(u64) -> f32) -> Expert {
        let none = |refused: bool| Expert { id: -1, activation: 0.0, refusals: u32::from(refused) };
        if id < 0 || id as u32 >= self.vocabulary {
            return none(id != -1 && place == 0);
        }
        if place >= self.selected {
            return none(false);
        }
        let at = u64::from(id as u32) * u64::from(self.selected) + u64::from(place);
        // SAFETY: an element of the table, by this function's own contract.
        let expert = unsafe { self.table.load(at) };
        if expert < 0 || expert as u32 >= self.experts {
            return none(true);
        }
        let activation = activation(u64::from(expert as u32));
        let refused = activation.is_nan();
        let activation = if refused { 0.0 } else { activation };
        Expert { id: expert, activation, refusals: u32::from(refused) }
    }
}
