//! One-token decode of an HCA layer: eight blocks a few tokens, each with its channels.
//!
//! While the launch before it runs, a block looks at the step as it is then, most likely as it will be. By
//! that it has the first window's scores brought to the L2 cache, and, when that launch has ended, asks for
//! them. If by then the tokens turn out to be others, it starts again with these.

use crate::args::DecodeHca;
use crate::params::DecodeParams;
use kv_layout::geometry::{HCA_RATIO, HEAD_DIM};
use simt::atomic::BlockAtomicU32;
use simt::shared::Shared;
use simt::{copy, grid, thread};

use super::{Appended, Step, Token, entry_row, store_entry};
use crate::compress::hca::{
    COLUMNS, GROUPS, QUADS, SHARED_BYTES, SPLITS, THREADS, Turn, ask, column, holds_entry,
    holds_last, join, joins, leave,
};
use crate::compress::state::store;
use crate::compress::{Closing, Finish, Meeting, Projections, Scores, Window};
use crate::fault;
use crate::row::{ROW_WORDS, RowFormat};

/// Stands for the position of a token that is not live: one that no token has, and that closes no window.
const NONE: u32 = u32::MAX - 1;

/// Most tokens that eight blocks can have: one for each group of threads.
const MOST_TOKENS: usize = GROUPS as usize;

/// Most blocks of a launch that has keys brought to the L2 cache too. With more, they come before the
/// scores of others, or in the way of the launch before. A multiprocessor of an H200 has room for one such
/// block beside another; more blocks than multiprocessors are not there before the launch before ends.
const FEW_BLOCKS: u32 = 128;

/// Where the arrays of shared memory are, in bytes.
const ENTRY: u32 = SHARED_BYTES;
const POSITIONS: u32 = ENTRY + 4 * ROW_WORDS as u32;
const SLOTS: u32 = POSITIONS + 4 * MOST_TOKENS as u32;
const RING_ROWS: u32 = SLOTS + 4 * MOST_TOKENS as u32;
const CHANGED: u32 = RING_ROWS + 4 * MOST_TOKENS as u32;

/// The tokens of a block: every so many of the step.
#[derive(Clone, Copy)]
struct Share {
    first: u32,
    shares: u32,
    /// Tokens of the step.
    tokens: u32,
}

impl Share {
    /// The `i`-th token's row in the step.
    #[inline(always)]
    fn row(self, i: u32) -> u32 {
        self.first + i * self.shares
    }

    #[inline(always)]
    fn has(self, i: u32) -> bool {
        self.row(i) < self.tokens
    }
}

/// What all threads of a block know of its tokens, in shared memory.
#[derive(Clone, Copy)]
struct Told {
    share: Share,
    /// [`NONE`] of a token that is not live.
    positions: Shared<u32, MOST_TOKENS>,
    slots: Shared<u32, MOST_TOKENS>,
    /// Row of the state ring that a token's position has.
    ring_rows: Shared<u32, MOST_TOKENS>,
}

impl Told {
    /// # Safety
    /// The arrays are those of this kernel.
    #[inline(always)]
    unsafe fn of(share: Share) -> Self {
        // SAFETY: inside the block's memory.
        let (positions, slots, ring_rows) =
            unsafe { (Shared::at(POSITIONS), Shared::at(SLOTS), Shared::at(RING_ROWS)) };
        Self { share, positions, slots, ring_rows }
    }

    /// Tells of the `i`-th token.
    ///
    /// # Safety
    /// One thread does, with barriers before and after it; the share has the token.
    #[inline(always)]
    unsafe fn tell(self, i: u32, token: Token, params: &DecodeParams) {
        let position = if token.is_live(params.slots) { token.position } else { NONE };
        // SAFETY: by this function's own contract.
        unsafe {
            self.positions.store(i, position);
            self.slots.store(i, token.slot.cast_unsigned());
            self.ring_rows.store(i, token.position % params.state_ring);
        }
    }

    /// The first token from the `i`-th on that closes a window; none if the share has not so many.
    ///
    /// # Safety
    /// All tokens were told of, with a barrier since.
    #[inline(always)]
    unsafe fn closing_from(self, mut i: u32) -> u32 {
        // SAFETY: by this function's own contract.
        while self.share.has(i) && !closes(unsafe { self.positions.load(i) }) {
            i += 1;
        }
        i
    }

    /// The `i`-th token, which closes a window, and its row in the ring.
    ///
    /// # Safety
    /// As [`Self::closing_from`]; the share has it.
    #[inline(always)]
    unsafe fn closing(self, i: u32) -> (Closing, u32) {
        let token = self.share.row(i);
        // SAFETY: by this function's own contract.
        unsafe {
            let (position, slot) = (self.positions.load(i), self.slots.load(i));
            (Closing { token, position, index: 0, slot }, self.ring_rows.load(i))
        }
    }
}

/// An HCA layer. Eight consecutive blocks have an equal share of the tokens, at most sixteen, and each 64
/// of their channels: state rows and windows of all of them at once, then their entries, one by one.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of the launch call it.
#[inline(always)]
pub unsafe fn layer<F: RowFormat>(args: DecodeHca) {
    let params = args.params;
    let (first, shares) = (thread::block_idx_x() / SPLITS, thread::grid_dim_x() / SPLITS);
    let share = Share { first, shares, tokens: params.tokens };
    let (warp_id, split) = (thread::warp_id(), thread::block_idx_x() % SPLITS);
    let column = column(split);
    let step = Step {
        position: args.token_position,
        slot: args.token_slot,
        index: args.token_index,
        ring_row: args.token_ring_row,
    };
    // SAFETY: the state rows that count are of other positions than the one written; rows come from the
    // table; shared words are written by one thread before a barrier. Tokens that are not what they were
    // are slots below `params.slots` all the same, and what is read for them is thrown away.
    unsafe {
        let projections: Projections<COLUMNS> = Projections {
            kv: args.kv,
            gate: args.gate,
            ape: args.ape,
            state: args.state.read_only(),
            ring: params.state_ring,
            ratio: HCA_RATIO,
        };
        let told = Told::of(share);
        let changed = BlockAtomicU32::new(Shared::<u32, 1>::at(CHANGED), 0);
        let teller = thread::thread_idx_x().wrapping_sub(THREADS / 2);
        let tells = teller < MOST_TOKENS as u32 && share.has(teller);
        let guess = tells.then(|| step.peek(share.row(teller)));
        if let Some(guess) = guess {
            told.tell(teller, guess, &params);
        }
        if thread::thread_idx_x() == 0 {
            changed.store(0);
        }
        let mut turn = Turn::first();
        thread::sync_threads();
        let mut i = told.closing_from(0);
        if share.has(i) {
            prefetch(projections, told.closing(i), split);
        }
        grid::wait_for_dependencies();
        grid::launch_dependents();

        let ask_for = |i| {
            let (closing, ring_row) = told.closing(i);
            ask(projections, closing, ring_row, split)
        };
        let asked = share.has(i).then(|| ask_for(i));
        // The last warps, which have no state rows of small shares, append to the windows.
        let appended = (THREADS / 32 - 1 - warp_id) * SPLITS + split;
        let append = || Appended::load(args.window_kv, step, share.row(appended));
        let appended = share.has(appended).then(append);
        let group = thread::thread_idx_x() / QUADS;
        let own = share.has(group).then(|| projections.own(share.row(group), column));
        if let Some(guess) = guess {
            let token = step.token(share.row(teller));
            if token != guess {
                changed.store(1);
            }
            if split == 0 {
                fault::count(args.faults, 0, u32::from(token.is_refused(params.slots)));
            }
        }
        let mut begun = asked.map(|asked| asked.begin(turn));
        thread::sync_threads();
        if changed.load() != 0 {
            copy::wait_for_groups::<0>();
            turn = Turn::first();
            if tells {
                told.tell(teller, step.token(share.row(teller)), &params);
            }
            thread::sync_threads();
            i = told.closing_from(0);
            begun = share.has(i).then(|| ask_for(i).begin(turn));
            thread::sync_threads();
        }

        if let Some((key, gate)) = own {
            let position = told.positions.load(group);
            if position != NONE && !closes(position) {
                let score = Scores::of_gate(gate, projections.bias(position, column)).value();
                let at = (position, told.slots.load(group));
                store::<COLUMNS>(args.state, params.state_ring, at, column, (key, score));
            }
        }
        if begun.is_none() {
            if let Some(appended) = appended {
                appended.store::<F>(args.ring_data, args.ring_scale, params);
            }
            return;
        }
        let meeting = Meeting { pooled: args.pooled };
        let entry = Shared::<u32, ROW_WORDS>::at(ENTRY);
        let channel = 4 * (thread::thread_idx_x() % (HEAD_DIM / 4));
        while let Some(window) = begun {
            let (closing, _) = told.closing(i);
            let last = window.end(turn);
            leave(meeting, closing.token, split, turn);
            if holds_last() {
                let at = (closing.position, closing.slot);
                store::<COLUMNS>(args.state, params.state_ring, at, column, last);
            }
            if joins(split) {
                let finish = Finish::load::<HEAD_DIM>(args.norm, args.frequencies, channel);
                let plane_row = entry_row(args.table, closing, HCA_RATIO, params);
                let rotation = finish.rotation(closing.position + 1 - HCA_RATIO);
                let (pooled, squares) = join(meeting, closing.token);
                let words = finish.apply::<HEAD_DIM>(pooled, squares, rotation);
                if holds_entry() {
                    entry.store(channel / 2, words[0]);
                    entry.store(channel / 2 + 1, words[1]);
                }
                thread::sync_threads();
                if warp_id == 0 {
                    store_entry::<F>(
                        entry,
                        args.entry_data,
                        args.entry_scale,
                        plane_row,
                        args.faults,
                    );
                }
            }
            i = told.closing_from(i + 1);
            turn = turn.next();
            begun = share.has(i).then(|| ask_for(i).begin(turn));
            thread::sync_threads();
        }
        // Loaded again: it would have been in the way of the windows.
        if appended.is_some() {
            append().store::<F>(args.ring_data, args.ring_scale, params);
        }
    }
}

/// Has what block `split` will read of a window brought to the L2 cache, a token's row by each thread.
///
/// # Safety
/// The slot exists; all threads of the block call it.
#[inline(always)]
unsafe fn prefetch(
    projections: Projections<COLUMNS>,
    (closing, ring_row): (Closing, u32),
    split: u32,
) {
    const { assert!(THREADS == 2 * HCA_RATIO, "scores and keys of a token each") };
    const COLUMNS_OF_BLOCK: u32 = HEAD_DIM / SPLITS;
    let back = thread::thread_idx_x() % HCA_RATIO;
    let row = Window::new(projections, closing, ring_row, back, split * COLUMNS_OF_BLOCK);
    // SAFETY: columns of the block, in the slot's ring.
    unsafe {
        if thread::thread_idx_x() < HCA_RATIO {
            row.prefetch_scores(COLUMNS_OF_BLOCK);
        } else if thread::grid_dim_x() <= FEW_BLOCKS {
            row.prefetch_keys(COLUMNS_OF_BLOCK);
        }
    }
}

/// Whether the token at `position` closes a window.
#[inline(always)]
fn closes(position: u32) -> bool {
    (position + 1).is_multiple_of(HCA_RATIO)
}
