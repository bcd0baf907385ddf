//! One-token decode of an HCA layer: eight blocks a few tokens, each with its channels.

use kv_layout::geometry::{HCA_RATIO, HEAD_DIM};
use kv_layout::params::DecodeParams;
use simt::mem::{Global, GlobalMut};
use simt::shared::Shared;
use simt::{grid, thread};

use super::{Appended, Step, entry_row, store_entry};
use crate::compress::hca::{
    COLUMNS, GROUPS, Meeting, QUADS, SHARED_BYTES, SPLITS, THREADS, column, holds_entry,
    holds_last, join, leave, weigh,
};
use crate::compress::state::store;
use crate::compress::{Closing, Finish, Projections, Scores};
use crate::fault;
use crate::row::{ROW_WORDS, RowFormat};

/// Stands for the position of a token that is not live: one that no token has, and that closes no window.
const NONE: u32 = u32::MAX - 1;

/// Most tokens that eight blocks can have: one for each group of threads.
const MOST_TOKENS: usize = GROUPS as usize;

/// Where the arrays of shared memory are, in bytes.
const ENTRY: u32 = SHARED_BYTES;
const POSITIONS: u32 = ENTRY + 4 * ROW_WORDS as u32;
const SLOTS: u32 = POSITIONS + 4 * MOST_TOKENS as u32;

/// An HCA layer. Block `(x, y)` has channels `64 y..64 (y + 1)` of an equal share of the tokens, at
/// most sixteen: state rows and windows of all of them at once, then their entries, one by one.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of the launch call it.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "one for each pointer of the kernel table")]
pub unsafe fn layer<F: RowFormat>(
    window_kv: Global<u16>,
    kv: Global<f32>,
    gate: Global<f32>,
    ape: Global<f32>,
    norm: Global<f32>,
    frequencies: Global<f32>,
    token_position: Global<i32>,
    token_slot: Global<i32>,
    token_index: Global<i32>,
    token_ring_row: Global<i32>,
    table: Global<i32>,
    pooled: GlobalMut<f32>,
    arrivals: GlobalMut<u32>,
    ring_data: GlobalMut<u8>,
    ring_scale: GlobalMut<u8>,
    state: GlobalMut<f32>,
    entry_data: GlobalMut<u8>,
    entry_scale: GlobalMut<u8>,
    faults: GlobalMut<u32>,
    params: DecodeParams,
) {
    let share = params.tokens.div_ceil(thread::grid_dim_x());
    let first = thread::block_idx_x() * share;
    let end = (first + share).min(params.tokens);
    let (warp_id, split) = (thread::warp_id(), thread::block_idx_y());
    let column = column(split);
    let step = Step {
        position: token_position,
        slot: token_slot,
        index: token_index,
        ring_row: token_ring_row,
    };
    // SAFETY: the state rows that are read are of other positions than the one written; rows come
    // from the table; shared words are written by one thread before a barrier.
    unsafe {
        let projections: Projections<COLUMNS> = Projections {
            kv,
            gate,
            ape,
            state: state.read_only(),
            ring: params.state_ring,
            ratio: HCA_RATIO,
        };
        grid::wait_for_dependencies();
        grid::launch_dependents();
        let positions = Shared::<u32, MOST_TOKENS>::at(POSITIONS);
        let slots = Shared::<u32, MOST_TOKENS>::at(SLOTS);

        // The last warps, which have no state rows of small shares, append to the windows.
        let appended = first + (SPLITS * THREADS / 32 - 1) - (warp_id * SPLITS + split);
        let appended = (appended < end).then(|| Appended::load(window_kv, step, appended));
        let group = thread::thread_idx_x() / QUADS;
        let own = (first + group < end).then(|| projections.own(first + group, column));
        // Told by threads that do not wait for such rows, unless there are many.
        let told = thread::thread_idx_x().wrapping_sub(THREADS / 2);
        if told < MOST_TOKENS as u32 && first + told < end {
            let token = step.token(first + told);
            let is_live = token.is_live(params.slots);
            positions.store(told, if is_live { token.position } else { NONE });
            slots.store(told, token.slot.cast_unsigned());
            if split == 0 {
                fault::count(faults, 0, u32::from(token.is_refused(params.slots)));
            }
        }
        thread::sync_threads();
        if let Some(appended) = appended {
            appended.store::<F>(ring_data, ring_scale, params);
        }
        if let Some((key, gate)) = own {
            let position = positions.load(group);
            if position != NONE && !closes(position) {
                let score = Scores::of_gate(gate, projections.bias(position, column)).value();
                let at = (position, slots.load(group));
                store::<COLUMNS>(state, params.state_ring, at, column, (key, score));
            }
        }

        // The first token from `row` on that closes a window.
        let next = |mut row: u32| {
            while row < end && !closes(positions.load(row - first)) {
                row += 1;
            }
            row
        };
        let mut row = next(first);
        if row >= end {
            return;
        }
        let meeting = Meeting { pooled, arrivals };
        let entry = Shared::<u32, ROW_WORDS>::at(ENTRY);
        let channel = 4 * (thread::thread_idx_x() % (HEAD_DIM / 4));
        while row < end {
            let (position, slot) = (positions.load(row - first), slots.load(row - first));
            let closing = Closing { token: row, position, index: 0, slot };
            let last = weigh(projections, closing, split);
            leave(meeting, row, split);
            if holds_last() {
                let at = (position, slot);
                store::<COLUMNS>(state, params.state_ring, at, column, last);
            }
            let meanwhile = || {
                let finish = Finish::load::<HEAD_DIM>(norm, frequencies, channel);
                let plane_row = entry_row(table, closing, HCA_RATIO, params);
                (finish, finish.rotation(position + 1 - HCA_RATIO), plane_row)
            };
            let joined = join(meeting, row, meanwhile);
            if let Some((pooled, squares, (finish, rotation, plane_row))) = joined {
                let words = finish.apply::<HEAD_DIM>(pooled, squares, rotation);
                if holds_entry() {
                    entry.store(channel / 2, words[0]);
                    entry.store(channel / 2 + 1, words[1]);
                }
                thread::sync_threads();
                if warp_id == 0 {
                    store_entry::<F>(entry, entry_data, entry_scale, plane_row, faults);
                }
            }
            row = next(row + 1);
        }
    }
}

/// Whether the token at `position` closes a window.
#[inline(always)]
fn closes(position: u32) -> bool {
    (position + 1).is_multiple_of(HCA_RATIO)
}
