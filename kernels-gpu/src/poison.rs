//! The search for rows that were never written: checks the rows that attention is about to read.
//!
//! In a poisoned cache, memory that has not been written since it was freed has all bytes 0xFF. Rotary channels are
//! stored bit for bit, so all 64 of such a row are NaN, which a token's row does not have. The same holds for an entry
//! that was pooled from such rows.

use crate::args::FindPoison;
use crate::params::FindPoisonParams;
use kv_layout::geometry::{HEAD_DIM, NOPE_DIM};
use simt::atomic::DeviceAtomicU32;
use simt::mem::{Global, GlobalMut};
use simt::{thread, warp};

/// Warps of a block; each checks one row at a time.
pub const WARPS: u32 = 4;
/// Most blocks for the rows of one query; each block continues with further rows.
pub const MAX_ROW_BLOCKS: u32 = 256;

/// Counts and records, of the rows in use of each query's tile, those whose rotary channels are all NaN.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch of grid `(tokens, any)` with 4
/// warps a block call it.
#[inline(always)]
pub unsafe fn find(args: FindPoison) {
    let params = args.params;
    let (lane, query) = (thread::lane_id(), thread::block_idx_x());
    if query >= params.tokens {
        return;
    }
    let token = u64::from(params.first + query);
    // SAFETY: `query < tokens`, rows are below `rows`. The branches depend on query and row, never on
    // the lane, so the warp stays together.
    unsafe {
        let slot = args.token_slot.load(token);
        if slot < 0 {
            return;
        }
        let position = args.token_position.load(token) as u32;
        let list = params.source == FindPoisonParams::LIST;
        let length = if list { params.rows } else { args.lengths.load(u64::from(query)) as u32 }
            .min(params.rows);
        let mut row = thread::block_idx_y() * WARPS + thread::warp_id();
        while row < length {
            let at = u64::from(query) * u64::from(params.rows) + u64::from(row);
            if is_poison(args.tile, at, lane) && lane == 0 {
                let what = match params.source {
                    FindPoisonParams::WINDOW => position.wrapping_add(1 + row).wrapping_sub(length),
                    FindPoisonParams::LIST => args.selected.load(at) as u32,
                    _ => row,
                };
                let place = params.layer * FindPoisonParams::LAYER + params.source;
                record(args.found, [place, slot as u32, position, what], params.capacity);
            }
            row += thread::grid_dim_y() * WARPS;
        }
    }
}

/// Whether the rotary channels of tile row `at` are all NaN; the same for all lanes.
///
/// # Safety
/// The tile has the row; all lanes of the warp call it together.
#[inline(always)]
unsafe fn is_poison(tile: Global<u16>, at: u64, lane: u32) -> bool {
    let channel = at * u64::from(HEAD_DIM) + u64::from(NOPE_DIM);
    // SAFETY: 64 rotary channels are 32 words of two; the lanes are together.
    unsafe {
        let pair = tile.cast::<u32>().load(channel / 2 + u64::from(lane));
        let is_nan = |half: u32| half & 0x7FFF > 0x7F80;
        warp::all(is_nan(pair & 0xFFFF) && is_nan(pair >> 16))
    }
}

/// Counts a row, and records it while there is room.
///
/// # Safety
/// `found` has its head and `capacity` records. Kernels write it by this function only, and the host only its second word.
#[inline(always)]
pub(crate) unsafe fn record(found: GlobalMut<u32>, words: [u32; 4], capacity: u32) {
    // SAFETY: the count is only ever accessed atomically, and hands out each record once.
    unsafe {
        let index = DeviceAtomicU32::new(found, 0).add(1);
        if index.wrapping_sub(found.load(1)) < capacity {
            let [a, b, c, d] = words;
            let place = u64::from(index % capacity) * u64::from(FindPoisonParams::RECORD);
            let at = u64::from(FindPoisonParams::HEAD) + place;
            found.store(at, a);
            found.store(at + 1, b);
            found.store(at + 2, c);
            found.store(at + 3, d);
            found.store(at + 4, index.wrapping_add(1));
        }
    }
}
