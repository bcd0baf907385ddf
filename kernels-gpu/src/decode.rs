//! One-token decode: everything that a layer's cache does for a token in one launch. Window row,
//! state rows and, when the token closes a window, the entry and the indexer key.
//!
//! The pieces are those of the separate kernels, so the bytes are theirs too. With one token a
//! request, no ring row that is written is one that is read.

use kv_layout::geometry::{BLOCK_TOKENS, CSA_RATIO, HCA_RATIO, HEAD_DIM, INDEX_DIM};
use kv_layout::params::DecodeParams;
use simt::mem::{Global, GlobalMut};
use simt::shared::Shared;
use simt::thread;

use crate::compress::hca::{self, Meeting};
use crate::compress::overlap::{
    INDEX_COLUMNS, MAIN_COLUMNS, MAIN_WARPS, index_key, load_window, share_squares, softmax_sum,
    total_squares,
};
use crate::compress::state::store;
use crate::compress::{Closing, Finish, Projections};
use crate::fault;
use crate::index_row::{IndexRowFormat, hadamard, quad_from_bf16};
use crate::row::{Bf16Lane, ROW_WORDS, RowFormat};
use crate::table::TableRow;

/// The warp of a CSA block that makes the indexer key.
const INDEX_WARP: u32 = MAIN_WARPS as u32;
/// The warp of a CSA block that appends to the window.
const WINDOW_WARP: u32 = INDEX_WARP + 1;
/// The block of an HCA token, and its warp, that append to the window.
const WINDOW_SPLIT: u32 = hca::SPLITS - 1;

/// The token of this block, if it is one to work on. A token that is not the only one of its request
/// is refused and counted.
///
/// # Safety
/// The token arrays hold the block's token; all threads of the block call it.
#[inline(always)]
unsafe fn token(
    token_position: Global<i32>,
    token_slot: Global<i32>,
    token_index: Global<i32>,
    faults: GlobalMut<u32>,
    slots: u32,
) -> Option<Closing> {
    let token = thread::block_idx_x();
    let at = u64::from(token);
    // SAFETY: by this function's own contract.
    unsafe {
        let (slot, index) = (token_slot.load(at), token_index.load(at));
        let position = token_position.load(at) as u32;
        if slot < 0 {
            return None;
        }
        if slot as u32 >= slots || index != 0 {
            if thread::warp_id() == 0 && thread::block_idx_y() == 0 {
                fault::count(faults, thread::lane_id(), 1);
            }
            return None;
        }
        Some(Closing { token, position, index: 0, slot: slot as u32 })
    }
}

/// Appends the token's row to the window.
///
/// # Safety
/// `kv` and `ring_row` hold the token, the planes its row; all lanes of the warp call it together.
#[inline(always)]
unsafe fn append<F: RowFormat>(
    kv: Global<u16>,
    ring_row: Global<i32>,
    data: GlobalMut<u8>,
    scale: GlobalMut<u8>,
    token: u32,
    rows: u32,
) {
    let lane = thread::lane_id();
    // SAFETY: by this function's own contract; a row is checked before it is written.
    unsafe {
        let values = Bf16Lane::load(kv, u64::from(token), lane);
        let row = ring_row.load(u64::from(token)) as u32;
        if row < rows {
            values.store_quantised::<F>(data, scale, u64::from(row), lane);
        }
    }
}

/// The plane row of the entry that `closing` closes.
///
/// # Safety
/// `table` holds the slot's row.
#[inline(always)]
unsafe fn entry_row(
    table: Global<i32>,
    closing: Closing,
    ratio: u32,
    params: DecodeParams,
) -> Option<u64> {
    let row = TableRow {
        table,
        start: u64::from(closing.slot) * u64::from(params.max_blocks),
        max_blocks: params.max_blocks,
        num_blocks: params.num_blocks,
        block_shift: (BLOCK_TOKENS / ratio).trailing_zeros(),
    };
    // SAFETY: by this function's own contract.
    unsafe { row.plane_row(closing.position / ratio, true) }
}

/// A CSA layer, one block of six warps a token: four for the entry, one for the indexer key, one for
/// the window.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of the launch call it.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "one for each pointer of the kernel table")]
pub unsafe fn csa<F: RowFormat, I: IndexRowFormat>(
    window_kv: Global<u16>,
    main_kv: Global<f32>,
    main_gate: Global<f32>,
    main_ape: Global<f32>,
    main_norm: Global<f32>,
    index_kv: Global<f32>,
    index_gate: Global<f32>,
    index_ape: Global<f32>,
    index_norm: Global<f32>,
    frequencies: Global<f32>,
    token_position: Global<i32>,
    token_slot: Global<i32>,
    token_index: Global<i32>,
    token_ring_row: Global<i32>,
    table: Global<i32>,
    ring_data: GlobalMut<u8>,
    ring_scale: GlobalMut<u8>,
    main_state: GlobalMut<f32>,
    index_state: GlobalMut<f32>,
    entry_data: GlobalMut<u8>,
    entry_scale: GlobalMut<u8>,
    index_code: GlobalMut<u8>,
    index_scale: GlobalMut<u8>,
    faults: GlobalMut<u32>,
    params: DecodeParams,
) {
    let (lane, warp_id) = (thread::lane_id(), thread::warp_id());
    // SAFETY: the whole block has one token and leaves or stays together; the state rows that are
    // read are of other positions than the one written; rows come from the table.
    unsafe {
        let partial = Shared::<f32, MAIN_WARPS>::at(0);
        let entry = Shared::<u32, ROW_WORDS>::at(16);
        // Weights and frequencies are on their way while it is found out what is to be done.
        let channel = 4 * (thread::thread_idx_x() % (HEAD_DIM / 4));
        let finish = if warp_id < INDEX_WARP {
            Finish::load::<HEAD_DIM>(main_norm, frequencies, channel)
        } else {
            Finish::load::<INDEX_DIM>(index_norm, frequencies, 4 * lane)
        };
        let token = token(token_position, token_slot, token_index, faults, params.slots);
        let Some(closing) = token else { return };
        let closes = (closing.position + 1).is_multiple_of(CSA_RATIO);
        let at = (closing.token, closing.position, closing.slot);
        let start = closing.position.wrapping_sub(CSA_RATIO - 1);
        let mut rotation = [(1.0, 0.0); 2];
        let row = entry_row(table, closing, CSA_RATIO, params);
        let mut pooled = [0.0; 4];
        if warp_id < INDEX_WARP {
            let projections: Projections<MAIN_COLUMNS> = Projections {
                kv: main_kv,
                gate: main_gate,
                ape: main_ape,
                state: main_state.read_only(),
                ring: params.state_ring,
                ratio: CSA_RATIO,
            };
            if closes {
                let window = load_window(projections, closing, channel);
                rotation = finish.rotation(start);
                pooled = softmax_sum(window);
                share_squares(partial, warp_id, pooled);
            }
            store(projections, main_state, at, channel);
            store(projections, main_state, at, channel + HEAD_DIM);
        } else if warp_id == INDEX_WARP {
            let channel = 4 * lane;
            let projections: Projections<INDEX_COLUMNS> = Projections {
                kv: index_kv,
                gate: index_gate,
                ape: index_ape,
                state: index_state.read_only(),
                ring: params.state_ring,
                ratio: CSA_RATIO,
            };
            if closes {
                let words = index_key(projections, finish, closing, channel);
                let key = hadamard(quad_from_bf16(words), lane);
                if let Some(row) = row {
                    I::store(index_code, index_scale, row, lane, key);
                }
            }
            store(projections, index_state, at, channel);
            store(projections, index_state, at, channel + INDEX_DIM);
        } else if warp_id == WINDOW_WARP {
            let (token, rows) = (closing.token, params.window_rows);
            append::<F>(window_kv, token_ring_row, ring_data, ring_scale, token, rows);
        }
        if !closes {
            return;
        }
        thread::sync_threads();
        if warp_id < INDEX_WARP {
            let squares = total_squares(partial);
            let words = finish.apply::<HEAD_DIM>(pooled, squares, rotation);
            entry.store(channel / 2, words[0]);
            entry.store(channel / 2 + 1, words[1]);
        }
        thread::sync_threads();
        if warp_id == 0 {
            store_entry::<F>(entry, entry_data, entry_scale, row, faults, lane);
        }
    }
}

/// An HCA layer, [`hca::SPLITS`] blocks a token, each with its channels.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of the launch call it.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "one for each pointer of the kernel table")]
pub unsafe fn hca<F: RowFormat>(
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
    let (lane, warp_id, split) = (thread::lane_id(), thread::warp_id(), thread::block_idx_y());
    // SAFETY: the blocks of a token leave or stay together; the state rows that are read are of
    // other positions than the one written; rows come from the table.
    unsafe {
        let token = token(token_position, token_slot, token_index, faults, params.slots);
        let Some(closing) = token else { return };
        let projections: Projections<{ hca::COLUMNS }> = Projections {
            kv,
            gate,
            ape,
            state: state.read_only(),
            ring: params.state_ring,
            ratio: HCA_RATIO,
        };
        if thread::thread_idx_x() < hca::QUADS {
            let at = (closing.token, closing.position, closing.slot);
            let column = split * hca::SPLIT_CHANNELS + 4 * thread::thread_idx_x();
            store(projections, state, at, column);
        }
        if split == WINDOW_SPLIT && warp_id == 1 {
            let (token, rows) = (closing.token, params.window_rows);
            append::<F>(window_kv, token_ring_row, ring_data, ring_scale, token, rows);
        }
        if !(closing.position + 1).is_multiple_of(HCA_RATIO) {
            return;
        }
        let channel = 4 * (thread::thread_idx_x() % (HEAD_DIM / 4));
        let finish = Finish::load::<HEAD_DIM>(norm, frequencies, channel);
        let row = entry_row(table, closing, HCA_RATIO, params);
        let meeting = Meeting { pooled, arrivals };
        let entry = Shared::<u32, ROW_WORDS>::at(hca::SHARED_BYTES);
        let whole = hca::pool(projections, closing, meeting, closing.token, split);
        let Some((pooled, squares)) = whole else { return };
        let rotation = finish.rotation(closing.position + 1 - HCA_RATIO);
        let words = finish.apply::<HEAD_DIM>(pooled, squares, rotation);
        if hca::holds_entry() {
            entry.store(channel / 2, words[0]);
            entry.store(channel / 2 + 1, words[1]);
        }
        thread::sync_threads();
        if warp_id == 0 {
            store_entry::<F>(entry, entry_data, entry_scale, row, faults, lane);
        }
    }
}

/// Quantises the entry that lies in shared memory into its plane row; without one it is refused.
///
/// # Safety
/// The entry was written, with a barrier since; all lanes of the warp call it together.
#[inline(always)]
unsafe fn store_entry<F: RowFormat>(
    entry: Shared<u32, ROW_WORDS>,
    data: GlobalMut<u8>,
    scale: GlobalMut<u8>,
    row: Option<u64>,
    faults: GlobalMut<u32>,
    lane: u32,
) {
    // SAFETY: by this function's own contract; rows come from the table.
    unsafe {
        match row {
            Some(row) => {
                Bf16Lane::from_shared(entry, lane).store_quantised::<F>(data, scale, row, lane);
            }
            None => fault::count(faults, lane, 1),
        }
    }
}
