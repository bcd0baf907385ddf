//! The state ring: keys and scores of the tokens that later windows need, and moving them between slots
//! (decisions D2, D3).
//! See docs/specification.md, section 6.

use crate::args::{ResetState, RotateState, WriteState};
use crate::params::RotateStateParams;
use simt::mem::GlobalMut;
use simt::thread;

use super::{Projections, Quad, Scores};

/// Threads of a block.
const THREADS: u32 = 128;

/// Writes each token's keys and scores to its ring row, one block a token. Of a chunk longer than the ring it
/// writes only the last `ring` tokens, because earlier ones share a row with them.
///
/// It must run after the chunk's entries were pooled: it overwrites rows that pooling reads.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of the launch call it.
#[inline(always)]
pub unsafe fn write<const COLUMNS: u32, const RATIO: u32>(args: WriteState) {
    let params = args.params;
    let token = thread::block_idx_x();
    // SAFETY: the grid has one block a token; a slot below `slots` has its rows in the ring.
    unsafe {
        let slot = args.token_slot.load(u64::from(token));
        let remaining = args.token_remaining.load(u64::from(token)) as u32;
        if slot < 0 || slot as u32 >= params.slots || remaining >= params.ring {
            return;
        }
        let position = args.token_position.load(u64::from(token)) as u32;
        let projections: Projections<COLUMNS> = Projections {
            kv: args.kv,
            gate: args.gate,
            ape: args.ape,
            state: args.kv,
            ring: params.ring,
            ratio: RATIO,
        };
        let mut column = 4 * thread::thread_idx_x();
        while column < COLUMNS {
            let (key, gate) = projections.own(token, column);
            let score = Scores::of_gate(gate, projections.bias(position, column)).value();
            let (at, row) = ((position, slot as u32), (key, score));
            store::<COLUMNS>(args.state, params.ring, at, column, row);
            column += 4 * THREADS;
        }
    }
}

/// Writes four columns of the token at `position` of the request in `slot` to its ring row.
///
/// # Safety
/// The ring holds the row; `column` is a multiple of 4 below `COLUMNS`.
#[inline(always)]
pub unsafe fn store<const COLUMNS: u32>(
    state: GlobalMut<f32>,
    ring: u32,
    (position, slot): (u32, u32),
    column: u32,
    (key, score): (Quad, Quad),
) {
    let row = u64::from(slot) * u64::from(ring) + u64::from(position % ring);
    let to = row * u64::from(2 * COLUMNS) + u64::from(column);
    // SAFETY: by this function's own contract.
    unsafe {
        state.store_u32x4(to, key.map(f32::to_bits));
        state.store_u32x4(to + u64::from(COLUMNS), score.map(f32::to_bits));
    }
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
    let words = u64::from(params.row_words);
    let ring_row = |slot: u32| (u64::from(slot) * u64::from(params.ring) + phase) * words;
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
    let row = u64::from(params.slot) * u64::from(params.ring) + u64::from(thread::block_idx_x());
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
