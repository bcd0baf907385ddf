//! Decode of an HCA layer: for each request, a block that folds its tokens into the running sums; for each token, a
//! warp that appends to the window.

use crate::args::DecodeHca;
use kv_layout::geometry::{HCA_RATIO, HEAD_DIM, hca_decode_tokens};
use simt::{grid, thread};

use super::{Appended, Step, Token, entry_row};
use crate::compress::hca::{COLUMNS, Run};
use crate::compress::sums::{
    QuadSums, SumRows, Sums, fold_quad, load_sums, prefetch_sums, store_sums,
};
use crate::compress::{EntryMemory, Finish, MAIN_WARPS, Projections, Quad, Scores};
use crate::fault;
use crate::row::RowFormat;
use crate::unroll::{array_from_fn, unroll};

/// Number of tokens after the first whose loads are in flight together: the usual number of drafts.
const BATCH: usize = 4;

/// Bytes of shared memory of a block.
pub const SHARED_BYTES: u32 = EntryMemory::BYTES;

/// Blocks of a launch for `tokens` tokens: one for the sums of each token, then one for every four window rows.
pub const fn blocks(tokens: u32) -> u32 {
    tokens.saturating_add(tokens.div_ceil(MAIN_WARPS as u32))
}

/// Writes the cache of an HCA layer. The block of a run's first token processes the whole run (see [`Run`]); the blocks
/// of its other tokens exit.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of the launch call it.
#[inline(always)]
pub unsafe fn layer<F: RowFormat>(args: DecodeHca) {
    let params = args.params;
    let step = Step {
        position: args.token_position,
        slot: args.token_slot,
        index: args.token_index,
        remaining: args.token_remaining,
        ring_row: args.token_ring_row,
        tokens: params.tokens,
        slots: params.slots,
        most: hca_decode_tokens(params.state_ring),
    };
    let row = thread::block_idx_x();
    // SAFETY: a block or warp has one token and leaves or stays together; tokens are below `tokens`.
    unsafe {
        if row < params.tokens {
            prefetch(args, step, row);
            grid::wait_for_dependencies();
            grid::launch_dependents();
            update::<F>(args, step, row);
            return;
        }
        grid::wait_for_dependencies();
        grid::launch_dependents();
        let row = (row - params.tokens) * MAIN_WARPS as u32 + thread::warp_id();
        if row < params.tokens {
            let appended = Appended::load(args.window_kv, step, row);
            appended.store::<F>([args.ring_data, args.ring_scale], args.faults, params);
        }
    }
}

/// Prefetches the state row from which the token's run probably continues into the L2 cache, before the previous launch
/// has ended. The values of the step that it reads may be stale; no result depends on them.
///
/// # Safety
/// The step has the token.
#[inline(always)]
unsafe fn prefetch(args: DecodeHca, step: Step, row: u32) {
    if thread::thread_idx_x() != 0 {
        return;
    }
    let at = u64::from(row);
    // SAFETY: by this function's own contract; a slot below `slots` has its rows in the ring.
    unsafe {
        let (slot, position) = (grid::peek(step.slot, at), grid::peek(step.position, at));
        if slot < step.slots && position > 0 {
            let rows = SumRows { ring: args.params.state_ring };
            prefetch_sums(args.state.read_only(), rows.at(slot, position - 1));
        }
    }
}

/// Four channels of a token.
#[derive(Clone, Copy, Default)]
struct Loaded {
    key: Quad,
    gate: Quad,
    bias: Quad,
}

impl Loaded {
    #[inline(always)]
    fn fold_into(self, sums: QuadSums) -> QuadSums {
        let Self { key, gate, bias } = self;
        fold_quad(sums, Scores::of_gate(gate, bias).value(), key)
    }
}

/// Folds the run that starts with token `row`, if a run starts there. If the run closes a window, stores the window's
/// entry.
///
/// # Safety
/// As [`layer`]; all threads of the block call it.
#[inline(always)]
unsafe fn update<F: RowFormat>(args: DecodeHca, step: Step, row: u32) {
    let params = args.params;
    let projections =
        Projections::<COLUMNS> { kv: args.kv, gate: args.gate, ape: args.ape, ratio: HCA_RATIO };
    let channel = 4 * thread::thread_idx_x();
    // SAFETY: by this function's own contract; a run's tokens are in the step and its rows in the ring. Of a
    // state row a thread reads and writes its own channels only, and reads before it writes.
    unsafe {
        let (key, gate) = projections.own(row, channel);
        let token = step.token(row);
        let Some(run) = run(step, token) else {
            let refused = u32::from(step.is_refused(token));
            fault::count(args.faults, thread::thread_idx_x(), refused);
            return;
        };
        let first = Loaded { key, gate, bias: projections.bias(run.position, channel) };
        let sums = start(args, run, channel);
        // While the loads above are in flight.
        let end = run.closes().then(|| {
            let finish = Finish::load::<HEAD_DIM>(args.norm, args.frequencies, channel);
            let last = run.position + run.tokens - 1;
            let plane_row = entry_row(args.table, (last, run.slot), HCA_RATIO, params);
            ((finish, finish.rotation(last + 1 - HCA_RATIO)), plane_row)
        });
        let sums = fold(args, projections, run, channel, (sums, first));
        if let Some((finish, plane_row)) = end {
            let planes = [args.entry_data, args.entry_scale];
            let pooled = sums.map(Sums::mean);
            EntryMemory::new().store::<F>(pooled, finish, planes, plane_row, args.faults);
        }
    }
}

/// The run that starts with `token`; `None` if the token is not live, or is in the middle of a run.
#[inline(always)]
fn run(step: Step, token: Token) -> Option<Run> {
    let Token { row, position, slot, index, remaining } = token;
    let in_window = position % HCA_RATIO;
    if !step.is_live(token) || (index > 0 && in_window > 0) {
        return None;
    }
    let left = HCA_RATIO - in_window;
    let tokens = if remaining < left { remaining + 1 } else { left };
    Some(Run {
        token: row,
        position,
        tokens,
        remaining: remaining + 1 - tokens,
        slot: slot.cast_unsigned(),
        continues_state: in_window > 0,
    })
}

/// The sums that a run starts from, with loads in flight.
///
/// # Safety
/// As [`update`].
#[inline(always)]
unsafe fn start(args: DecodeHca, run: Run, channel: u32) -> QuadSums {
    let rows = SumRows { ring: args.params.state_ring };
    if run.continues_state {
        // SAFETY: by this function's own contract.
        unsafe { load_sums(args.state.read_only(), rows.at(run.slot, run.position - 1), channel) }
    } else {
        [Sums::EMPTY; 4]
    }
}

/// Returns the sums after all tokens of a run, the first of which is loaded. Stores those from which a later step may
/// continue.
///
/// # Safety
/// As [`update`].
#[inline(always)]
unsafe fn fold(
    args: DecodeHca,
    projections: Projections<COLUMNS>,
    run: Run,
    channel: u32,
    (sums, first): (QuadSums, Loaded),
) -> QuadSums {
    let rows = SumRows { ring: args.params.state_ring };
    let load = |i: u32| {
        // Past the run's end, its last token again.
        let i = if i < run.tokens { i } else { run.tokens - 1 };
        // SAFETY: a token of the run.
        unsafe {
            let (key, gate) = projections.own(run.token + i, channel);
            Loaded { key, gate, bias: projections.bias(run.position + i, channel) }
        }
    };
    let fold = |sums: QuadSums, i: u32, token: Loaded| {
        let sums = token.fold_into(sums);
        if run.stores(i, rows.ring) {
            // SAFETY: a row of the slot's ring.
            unsafe { store_sums(args.state, rows.at(run.slot, run.position + i), channel, sums) }
        }
        sums
    };
    if run.tokens == 1 {
        return fold(sums, 0, first);
    }
    let batch = |first: u32| array_from_fn::<Loaded, BATCH>(|i| load(first + i as u32));
    let mut next = batch(1);
    let mut sums = fold(sums, 0, first);
    let mut done = 1;
    while done < run.tokens {
        let tokens = next;
        if done + (BATCH as u32) < run.tokens {
            next = batch(done + BATCH as u32);
        }
        unroll::<BATCH>(|i| {
            let at = done + i as u32;
            if at < run.tokens {
                sums = fold(sums, at, tokens[i]);
            }
        });
        done += BATCH as u32;
    }
    sums
}
