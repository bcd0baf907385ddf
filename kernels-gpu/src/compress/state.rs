//! The state ring: what later windows need of a token. Source: spec sections 2.7 and 2.9.

use kv_layout::params::WriteStateParams;
use simt::mem::{Global, GlobalMut};
use simt::thread;

use super::{Projections, load_quad};

/// Threads of a block.
const THREADS: u32 = 128;

/// Writes each token's keys and scores to its ring row; of a chunk longer than the ring only the
/// last `ring` tokens, which are the only ones that have a row to themselves. One block a token.
///
/// Of a chunk it must run after the entries were pooled: it overwrites rows they read.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of the launch call it.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "one for each pointer of the kernel table")]
pub unsafe fn write<const COLUMNS: u32, const RATIO: u32>(
    kv: Global<f32>,
    gate: Global<f32>,
    ape: Global<f32>,
    token_position: Global<i32>,
    token_slot: Global<i32>,
    token_remaining: Global<i32>,
    state: GlobalMut<f32>,
    params: WriteStateParams,
) {
    let token = thread::block_idx_x();
    // SAFETY: the grid has one block a token; a slot below `slots` has its rows in the ring.
    unsafe {
        let slot = token_slot.load(u64::from(token));
        let remaining = token_remaining.load(u64::from(token)) as u32;
        if slot < 0 || slot as u32 >= params.slots || remaining >= params.ring {
            return;
        }
        let position = token_position.load(u64::from(token)) as u32;
        let projections: Projections<COLUMNS> =
            Projections { kv, gate, ape, state: kv, ring: params.ring, ratio: RATIO };
        let mut column = 4 * thread::thread_idx_x();
        while column < COLUMNS {
            store(projections, state, (token, position, slot as u32), column);
            column += 4 * THREADS;
        }
    }
}

/// Writes four columns of one token (row in the step, position, slot) to its ring row.
///
/// # Safety
/// The step holds the token, the ring its row; `column` is a multiple of 4 below `COLUMNS`.
#[inline(always)]
pub unsafe fn store<const COLUMNS: u32>(
    projections: Projections<COLUMNS>,
    state: GlobalMut<f32>,
    (token, position, slot): (u32, u32, u32),
    column: u32,
) {
    let ring = projections.ring;
    let row = u64::from(slot) * u64::from(ring) + u64::from(position % ring);
    let to = row * u64::from(2 * COLUMNS) + u64::from(column);
    let from = u64::from(token) * u64::from(COLUMNS) + u64::from(column);
    // SAFETY: by this function's own contract.
    unsafe {
        let (key, score) =
            (load_quad(projections.kv, from), projections.score(from, position, column));
        state.store_u32x4(to, key.map(f32::to_bits));
        state.store_u32x4(to + u64::from(COLUMNS), score.map(f32::to_bits));
    }
}
