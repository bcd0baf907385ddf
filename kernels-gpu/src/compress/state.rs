//! Kernels on state rows: write the rows of CSA compressors; move any rows between slots, or overwrite them (decisions
//! D2, D3).

use crate::args::{ResetState, RotateState, WriteState};
use crate::params::{RotateStateParams, WriteStateParams};
use kv_layout::geometry::{CSA_RATIO, WINDOW};
use simt::thread;

use super::{Half, HalfRows, Projections, Scores};
use crate::swa::row_of_checkpoint;

/// Threads of a block that moves or overwrites rows.
const THREADS: u32 = 128;
/// Number of threads that write a token's rows.
const TOKEN_THREADS: u32 = 64;
/// Threads of a block that writes rows.
pub const WRITE_THREADS: u32 = 256;
/// Number of tokens of a block that writes rows. Most tokens of a long chunk write nothing: with a block for each,
/// starting those blocks would take longer than the writes of the others.
pub const TOKENS: u32 = WRITE_THREADS / TOKEN_THREADS;

/// Writes each token's keys and scores to the rows of its halves. In a chunk longer than a half's ring it writes only
/// the last rows, because earlier tokens share them. It also writes previous halves to the checkpoint that keeps them.
///
/// It must run after the chunk's entries were pooled, because it overwrites rows that pooling reads.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of the launch call it.
#[inline(always)]
pub unsafe fn write<const COLUMNS: u32>(args: WriteState) {
    let params = args.params;
    let token = TOKENS * thread::block_idx_x() + thread::thread_idx_x() / TOKEN_THREADS;
    if token >= params.tokens {
        return;
    }
    let rows = HalfRows::<COLUMNS> { own_ring: params.ring };
    let projections =
        Projections::<COLUMNS> { kv: args.kv, gate: args.gate, ape: args.ape, ratio: CSA_RATIO };
    // SAFETY: the token is one of the step's; a slot below `slots` has its rows in the rings.
    unsafe {
        let slot = args.token_slot.load(u64::from(token));
        let remaining = args.token_remaining.load(u64::from(token)) as u32;
        let saved = checkpoint_row::<COLUMNS>(args, token);
        let is_kept = remaining < rows.ring(Half::Previous);
        if slot < 0 || slot as u32 >= params.slots || !(is_kept || saved.is_some()) {
            return;
        }
        let at = (args.token_position.load(u64::from(token)) as u32, slot as u32);
        let mut column = 4 * (thread::thread_idx_x() % TOKEN_THREADS);
        while column < COLUMNS {
            let (key, gate) = projections.own(token, column);
            let score = Scores::of_gate(gate, projections.bias(at.0, column)).value();
            let half = if column < COLUMNS / 2 { Half::Previous } else { Half::Own };
            let channel = column % (COLUMNS / 2);
            if remaining < rows.ring(half) && half.is_kept(at.0) {
                rows.store(args.state, at, half, channel, (key, score));
            }
            if let Some(row) = saved.filter(|_| half == Half::Previous) {
                let to = row + u64::from(channel);
                args.checkpoints.cast::<u32>().store_u32x4(to, key.map(f32::to_bits));
                let scores = to + u64::from(COLUMNS / 2);
                args.checkpoints.cast::<u32>().store_u32x4(scores, score.map(f32::to_bits));
            }
            column += 4 * TOKEN_THREADS;
        }
    }
}

/// The first element of the row of a token's previous half in a checkpoint; `None` if it has no row there. A checkpoint
/// has window rows of 128 tokens; the last four of these also have a row for the previous half.
///
/// # Safety
/// As [`write`]; `token < tokens`.
#[inline(always)]
unsafe fn checkpoint_row<const COLUMNS: u32>(args: WriteState, token: u32) -> Option<u64> {
    let WriteStateParams { checkpoints, checkpoint_granules, row_granules, .. } = args.params;
    if checkpoints == 0 {
        return None;
    }
    // SAFETY: there is a row a token where there are checkpoints.
    let (checkpoint, row) = unsafe { row_of_checkpoint(args.token_checkpoint_row, token) };
    let is_saved = checkpoint < checkpoints && row >= WINDOW - CSA_RATIO;
    is_saved.then(|| {
        let granules =
            u64::from(checkpoint) * u64::from(checkpoint_granules) + u64::from(row_granules);
        granules * (256 / 4) + u64::from(row - (WINDOW - CSA_RATIO)) * u64::from(COLUMNS)
    })
}

/// Moves the rows of consecutive positions into slot `to`, each to the ring row of its position.
///
/// # Safety
/// Pointers and shapes as in the kernel table; both slots exist, the positions have distinct ring
/// rows; all threads of a launch of one block a row call it.
#[inline(always)]
pub unsafe fn rotate(args: RotateState) {
    let params = args.params;
    let row = thread::block_idx_x();
    let phase = u64::from(params.position.wrapping_add(row) % params.ring);
    let (first, words) = (u64::from(params.first_row), u64::from(params.row_words));
    let ring_row =
        |slot: u32| (u64::from(slot) * u64::from(params.slot_rows) + first + phase) * words;
    let mut word = 4 * thread::thread_idx_x();
    while word < params.row_words {
        let at = u64::from(word);
        // SAFETY: a row of the image or of a slot's ring; no block writes what another reads, since
        // a position's row has the same phase in both slots.
        unsafe {
            let values = if params.from == RotateStateParams::IMAGE {
                args.image.load_u32x4(u64::from(row) * words + at)
            } else {
                args.state.load_u32x4(ring_row(params.from) + at)
            };
            args.state.store_u32x4(ring_row(params.to) + at, values);
        }
        word += 4 * THREADS;
    }
}

/// Overwrites every word of a slot's rows.
///
/// # Safety
/// Pointers and shapes as in the kernel table; the slot exists; all threads of a launch of one block
/// a row call it.
#[inline(always)]
pub unsafe fn reset(args: ResetState) {
    let params = args.params;
    let row =
        u64::from(params.slot) * u64::from(params.slot_rows) + u64::from(thread::block_idx_x());
    let mut word = 4 * thread::thread_idx_x();
    while word < params.row_words {
        // SAFETY: a row of the slot's ring.
        unsafe {
            let at = row * u64::from(params.row_words) + u64::from(word);
            args.state.store_u32x4(at, [params.word; 4]);
        }
        word += 4 * THREADS;
    }
}
