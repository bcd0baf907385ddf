//! One-token decode of an HCA layer. Eight blocks share a few tokens, each block with its channels.
//!
//! While the launch before still runs, a block reads the step's tokens speculatively. It prefetches the
//! scores of the first window into the L2 cache, and loads them as soon as that launch has ended. If the
//! tokens are then different, it discards this and starts again.

use crate::args::DecodeHca;
use crate::params::DecodeParams;
use kv_layout::geometry::{HCA_RATIO, HEAD_DIM};
use simt::atomic::BlockAtomicU32;
use simt::shared::Shared;
use simt::{copy, grid, thread};

use super::{Appended, Step, Token, entry_row, store_entry};
use crate::compress::hca::{
    BufferParity, COLUMNS, GROUPS, QUADS, SHARED_BYTES as POOLING_BYTES, SPLITS, THREADS, collect,
    collects, column, holds_entry, holds_last, load_scores, publish,
};
use crate::compress::state::store;
use crate::compress::{BlockExchange, Closing, Finish, Projections, Scores, Window};
use crate::fault;
use crate::row::{ROW_WORDS, RowFormat};
use crate::table::shape::MULTIPROCESSORS;

/// Position of a token that is not live: no token has it, and it closes no window.
const NONE: u32 = u32::MAX - 1;

/// The most tokens of eight blocks: one for each group of threads.
const MAX_TOKENS: usize = GROUPS as usize;

/// The largest grid, in blocks, that prefetches keys too. In a larger one they would delay the scores of other
/// blocks, or the launch before. A multiprocessor of an H200 has room for one such block beside a block of
/// another launch; of a grid with more blocks than multiprocessors, some start only after the launch before.
const MAX_PREFETCH_BLOCKS: u32 = 128;

/// Shares that the tokens are cut into, if that many do: about as many groups of [`SPLITS`] blocks as run at
/// once, two blocks on each multiprocessor.
const SHARES: u32 = 32;
const _: () = assert!(SHARES * SPLITS <= 2 * MULTIPROCESSORS);

/// Blocks of a launch for `tokens` tokens.
pub const fn blocks(tokens: u32) -> u32 {
    let needed = tokens.div_ceil(MAX_TOKENS as u32);
    let shares = if needed > SHARES { needed } else { SHARES };
    SPLITS.saturating_mul(if tokens < shares { tokens } else { shares })
}

/// Byte offsets of the arrays in shared memory.
const ENTRY: u32 = POOLING_BYTES;
const POSITIONS: u32 = ENTRY + 4 * ROW_WORDS as u32;
const SLOTS: u32 = POSITIONS + 4 * MAX_TOKENS as u32;
const RING_ROWS: u32 = SLOTS + 4 * MAX_TOKENS as u32;
const CHANGED: u32 = RING_ROWS + 4 * MAX_TOKENS as u32;

/// Bytes of shared memory of a block.
pub const SHARED_BYTES: u32 = CHANGED + 4;

/// The tokens of a block: every `shares`-th token of the step, from `first` on.
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

/// The tokens of a block in shared memory.
#[derive(Clone, Copy)]
struct SharedTokens {
    share: Share,
    /// Position of each token; [`NONE`] if it is not live.
    positions: Shared<u32, MAX_TOKENS>,
    slots: Shared<u32, MAX_TOKENS>,
    /// Row in the state ring of each token's position.
    ring_rows: Shared<u32, MAX_TOKENS>,
}

impl SharedTokens {
    /// # Safety
    /// The arrays are those of this kernel.
    #[inline(always)]
    unsafe fn of(share: Share) -> Self {
        // SAFETY: inside the block's memory.
        let (positions, slots, ring_rows) =
            unsafe { (Shared::at(POSITIONS), Shared::at(SLOTS), Shared::at(RING_ROWS)) };
        Self { share, positions, slots, ring_rows }
    }

    /// Writes the `i`-th token.
    ///
    /// # Safety
    /// One thread calls it for each token, with barriers before and after; the share has the token.
    #[inline(always)]
    unsafe fn write(self, i: u32, token: Token, params: &DecodeParams) {
        let position = if token.is_live(params.slots) { token.position } else { NONE };
        // SAFETY: by this function's own contract.
        unsafe {
            self.positions.store(i, position);
            self.slots.store(i, token.slot.cast_unsigned());
            self.ring_rows.store(i, token.position % params.state_ring);
        }
    }

    /// Index of the first token from the `i`-th on that closes a window; past the share's tokens if there is
    /// none.
    ///
    /// # Safety
    /// All tokens were written, with a barrier since.
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

/// An HCA layer. Eight consecutive blocks have a share of the tokens, at most 16, and each block 64 channels.
/// They write the state rows of all of their tokens at once, then pool the closing windows one by one.
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
    let step = step(args);
    // SAFETY: the state rows that are used are of other positions than the one written; rows come from the
    // table; shared words are written by one thread before a barrier. Speculated tokens have slots below
    // `params.slots` too, and what is read for wrong ones is discarded.
    unsafe {
        let projections = projections(args);
        let tokens = SharedTokens::of(share);
        let changed = BlockAtomicU32::new(Shared::<u32, 1>::at(CHANGED), 0);
        let writer = thread::thread_idx_x().wrapping_sub(THREADS / 2);
        let is_writer = writer < MAX_TOKENS as u32 && share.has(writer);
        let speculated = is_writer.then(|| step.peek(share.row(writer)));
        if let Some(speculated) = speculated {
            tokens.write(writer, speculated, &params);
        }
        if thread::thread_idx_x() == 0 {
            changed.store(0);
        }
        let mut parity = BufferParity::first();
        thread::sync_threads();
        let mut i = tokens.closing_from(0);
        if share.has(i) {
            prefetch(projections, tokens.closing(i), split);
        }
        grid::wait_for_dependencies();
        grid::launch_dependents();

        let load_window = |i| {
            let (closing, ring_row) = tokens.closing(i);
            load_scores(projections, closing, ring_row, split)
        };
        let pending = share.has(i).then(|| load_window(i));
        // The last warps, which have no state rows in small shares, append to the sliding windows.
        let appended = (THREADS / 32 - 1 - warp_id) * SPLITS + split;
        let append = || Appended::load(args.window_kv, step, share.row(appended));
        let appended = share.has(appended).then(append);
        let group = thread::thread_idx_x() / QUADS;
        let own = share.has(group).then(|| projections.own(share.row(group), column));
        if let Some(speculated) = speculated {
            let token = step.token(share.row(writer));
            revalidate(args, token, speculated, changed, split);
        }
        let mut pending_keys = pending.map(|pending| pending.load_keys(parity));
        thread::sync_threads();
        if changed.load() != 0 {
            copy::wait_for_groups::<0>();
            parity = BufferParity::first();
            if is_writer {
                tokens.write(writer, step.token(share.row(writer)), &params);
            }
            thread::sync_threads();
            i = tokens.closing_from(0);
            pending_keys = share.has(i).then(|| load_window(i).load_keys(parity));
            thread::sync_threads();
        }

        if let Some((key, gate)) = own {
            // Here, not in a function of its own: on sm_100a registers would spill.
            let position = tokens.positions.load(group);
            if position != NONE && !closes(position) {
                let score = Scores::of_gate(gate, projections.bias(position, column)).value();
                let at = (position, tokens.slots.load(group));
                store::<COLUMNS>(args.state, params.state_ring, at, column, (key, score));
            }
        }
        if pending_keys.is_none() {
            if let Some(appended) = appended {
                appended.store::<F>(args.ring_data, args.ring_scale, params);
            }
            return;
        }
        let exchange = BlockExchange { pooled: args.pooled };
        let entry = Shared::<u32, ROW_WORDS>::at(ENTRY);
        while let Some(keys) = pending_keys {
            let (closing, _) = tokens.closing(i);
            let last = keys.sum(parity);
            publish(exchange, closing.token, split, parity);
            if holds_last() {
                let at = (closing.position, closing.slot);
                store::<COLUMNS>(args.state, params.state_ring, at, column, last);
            }
            if collects(split) {
                collect_entry::<F>(args, exchange, entry, closing);
            }
            i = tokens.closing_from(i + 1);
            parity = parity.next();
            pending_keys = share.has(i).then(|| load_window(i).load_keys(parity));
            thread::sync_threads();
        }
        // Loaded again: to keep it would take registers from the windows.
        if appended.is_some() {
            append().store::<F>(args.ring_data, args.ring_scale, params);
        }
    }
}

/// The step's arrays.
#[inline(always)]
fn step(args: DecodeHca) -> Step {
    Step {
        position: args.token_position,
        slot: args.token_slot,
        index: args.token_index,
        ring_row: args.token_ring_row,
    }
}

/// The compressor's tensors, its state to be read.
///
/// # Safety
/// No state row is read that this launch writes.
#[inline(always)]
unsafe fn projections(args: DecodeHca) -> Projections<COLUMNS> {
    Projections {
        kv: args.kv,
        gate: args.gate,
        ape: args.ape,
        // SAFETY: by this function's own contract.
        state: unsafe { args.state.read_only() },
        ring: args.params.state_ring,
        ratio: HCA_RATIO,
    }
}

/// Notes in `changed` that a token is not what it was speculated to be; counts it if it is refused.
///
/// # Safety
/// One thread a token calls it; a barrier follows.
#[inline(always)]
unsafe fn revalidate(
    args: DecodeHca,
    token: Token,
    speculated: Token,
    changed: BlockAtomicU32,
    split: u32,
) {
    if token != speculated {
        changed.store(1);
    }
    if split == 0 {
        // SAFETY: the fault word, accessed atomically.
        unsafe { fault::count(args.faults, 0, u32::from(token.is_refused(args.params.slots))) }
    }
}

/// Collects the pooled window that `closing` closes; norms, rotates and stores its entry. `entry` is shared memory
/// for it.
///
/// # Safety
/// All threads of the block call it together, the one that [`collects`], after [`publish`].
#[inline(always)]
unsafe fn collect_entry<F: RowFormat>(
    args: DecodeHca,
    exchange: BlockExchange,
    entry: Shared<u32, ROW_WORDS>,
    closing: Closing,
) {
    let channel = 4 * (thread::thread_idx_x() % (HEAD_DIM / 4));
    // SAFETY: by this function's own contract; rows come from the table; each word of the entry is written by
    // one thread before a barrier.
    unsafe {
        let finish = Finish::load::<HEAD_DIM>(args.norm, args.frequencies, channel);
        let plane_row = entry_row(args.table, closing, HCA_RATIO, args.params);
        let rotation = finish.rotation(closing.position + 1 - HCA_RATIO);
        let (pooled, squares) = collect(exchange, closing.token);
        let words = finish.apply::<HEAD_DIM>(pooled, squares, rotation);
        if holds_entry() {
            entry.store(channel / 2, words[0]);
            entry.store(channel / 2 + 1, words[1]);
        }
        thread::sync_threads();
        if thread::warp_id() == 0 {
            store_entry::<F>(entry, args.entry_data, args.entry_scale, plane_row, args.faults);
        }
    }
}

/// Prefetches what block `split` will read of a window into the L2 cache, each thread a token's row.
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
        } else if thread::grid_dim_x() <= MAX_PREFETCH_BLOCKS {
            row.prefetch_keys(COLUMNS_OF_BLOCK);
        }
    }
}

/// Whether the token at `position` closes a window.
#[inline(always)]
fn closes(position: u32) -> bool {
    (position + 1).is_multiple_of(HCA_RATIO)
}
