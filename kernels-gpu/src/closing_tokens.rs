//! The step's work lists: the tokens that close a CSA window, and the tokens that end an HCA run. Decision D4;
//! docs/specification.md, section 10.

use crate::args::ListClosingTokens;
use kv_layout::geometry::{CSA_RATIO, HCA_RATIO};
use simt::shared::Shared;
use simt::{thread, warp};

/// Threads of the block that builds a list, and so the number of tokens that it looks at together.
const THREADS: u32 = 1024;
/// Warps of that block.
const WARPS: usize = THREADS as usize / 32;
/// Bytes of shared memory: a count for each warp.
pub const SHARED_BYTES: u32 = Shared::<u32, WARPS>::BYTES;

/// Lists tokens in order. Block 0 lists those that close a CSA window. Block 1 lists those that end an HCA run: they
/// close an HCA window, or are their request's last in the step. The rest of each list is -1. There are no atomics, so
/// that the order is that of the tokens.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch of two blocks of 1024 threads
/// call it.
#[inline(always)]
pub unsafe fn list(args: ListClosingTokens) {
    let params = args.params;
    let csa = thread::block_idx_x() == 0;
    let (ratio, list) =
        if csa { (CSA_RATIO, args.closing_csa) } else { (HCA_RATIO, args.runs_hca) };
    let capacity = if csa { params.csa_capacity } else { params.hca_capacity };
    let (lane, warp_id) = (thread::lane_id(), thread::warp_id());
    // SAFETY: tokens are below `tokens`, list entries below `capacity`; every thread of the block
    // goes through every round, since `tokens` is the same for all.
    unsafe {
        let counts = Shared::<u32, WARPS>::at(0);
        let (mut first, mut total) = (0, 0);
        while first < params.tokens {
            let token = first + thread::thread_idx_x();
            let ends = || {
                let next = (args.token_position.load(u64::from(token)) as u32).wrapping_add(1);
                let is_last = || args.token_remaining.load(u64::from(token)) == 0;
                next.is_multiple_of(ratio) || !csa && is_last()
            };
            let is_listed =
                token < params.tokens && args.token_slot.load(u64::from(token)) >= 0 && ends();
            let listed = warp::ballot(is_listed);
            if lane == 0 {
                counts.store(warp_id, listed.count_ones());
            }
            thread::sync_threads();
            let mut before = total;
            let mut w = 0;
            while w < WARPS as u32 {
                let count = counts.load(w);
                before += if w < warp_id { count } else { 0 };
                total += count;
                w += 1;
            }
            let at = before + (listed & ((1 << lane) - 1)).count_ones();
            if is_listed && at < capacity {
                list.store(u64::from(at), token as i32);
            }
            thread::sync_threads();
            first += THREADS;
        }
        let mut at = total + thread::thread_idx_x();
        while at < capacity {
            list.store(u64::from(at), -1);
            at += THREADS;
        }
    }
}
