//! The sliding-window ring: append and gather. Source: spec section 6.

use kv_layout::geometry::WINDOW;
use kv_layout::main_row::ring_row;
use kv_layout::params::{AppendSwaParams, GatherSwaParams};
use simt::atomic::DeviceAtomicU32;
use simt::mem::{Global, GlobalMut};
use simt::thread;

use crate::row::{Bf16Lane, RowFormat, StoredLane};

/// Warps, and so rows in flight, of a block of either kernel.
const WARPS: u32 = 4;
/// Rows of a window that one warp of [`gather`] fetches: a block does a quarter of the window.
const ROWS_PER_WARP: u32 = WINDOW / 4 / WARPS;
/// Rows whose loads a warp of [`gather`] issues before it uses the first.
const IN_FLIGHT: usize = 4;

const _: () = assert!(ROWS_PER_WARP as usize % IN_FLIGHT == 0);

/// Quantises each token's row and stores it in its ring row; a token with row -1 does nothing.
///
/// # Safety
/// Pointers and shapes as in the kernel table; no two tokens share a ring row; all threads of a
/// launch of 4 warps a block call it.
#[inline(always)]
pub unsafe fn append<F: RowFormat>(
    kv: Global<u16>,
    token_ring_row: Global<i32>,
    ring_data: GlobalMut<u8>,
    ring_scale: GlobalMut<u8>,
    faults: GlobalMut<u32>,
    params: AppendSwaParams,
) {
    let lane = thread::lane_id();
    let token = thread::block_idx_x() * WARPS + thread::warp_id();
    if token >= params.tokens {
        return;
    }
    // SAFETY: `token < tokens`. The branches depend on the token alone, so a warp stays together.
    unsafe {
        // The row is fetched before it is known whether it is wanted: the two loads overlap.
        let values = Bf16Lane::load(kv, u64::from(token), lane);
        let row = token_ring_row.load(u64::from(token));
        if row < 0 {
            return;
        }
        if row as u32 >= params.rows {
            count_fault(faults, lane);
            return;
        }
        let (stored, scales) = values.quantise::<F>(lane);
        stored.store(ring_data, row as u64, lane);
        F::store_scales(ring_scale, row as u64, lane, scales);
    }
}

/// Gathers the window of each query, oldest key first, as BF16; rows past the window's length are
/// zero.
///
/// Keys of the step itself come from `kv`, through the same quantisation that the cache applies, so
/// a query sees the same values in prefill as in any later decode. Older keys come from the ring.
/// The kernel may run before the step's append, or after it if no request has more than
/// `ring - 127` tokens in the step.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch of grid `(tokens, 4)` with 4
/// warps a block call it.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "one for each pointer of the kernel table")]
pub unsafe fn gather<F: RowFormat>(
    kv: Global<u16>,
    token_position: Global<i32>,
    token_slot: Global<i32>,
    token_index: Global<i32>,
    ring_data: Global<u8>,
    ring_scale: Global<u8>,
    tile: GlobalMut<u16>,
    lengths: GlobalMut<i32>,
    faults: GlobalMut<u32>,
    params: GatherSwaParams,
) {
    let lane = thread::lane_id();
    let query = thread::block_idx_x();
    if query >= params.tokens {
        return;
    }
    let token = params.first + query;
    let first = (thread::block_idx_y() * WARPS + thread::warp_id()) * ROWS_PER_WARP;
    // SAFETY: `query < tokens`; a query's slot is checked before its ring is read, and its own rows
    // are the `index` tokens before it. The branches depend on token and row, never on the lane.
    unsafe {
        let slot = token_slot.load(u64::from(token));
        let position = token_position.load(u64::from(token)) as u32;
        let index = token_index.load(u64::from(token)) as u32;
        let refused = slot >= 0 && slot as u32 >= params.slots;
        let live = slot >= 0 && !refused;
        let length = if live { (position + 1).min(WINDOW) } else { 0 };
        if first == 0 {
            if lane == 0 {
                lengths.store(u64::from(query), length as i32);
            }
            if refused {
                count_fault(faults, lane);
            }
        }
        if !live {
            return;
        }
        let window = Window {
            token,
            oldest: position + 1 - length,
            length,
            in_ring: length.saturating_sub(index + 1),
            slot: slot as u32,
            ring: params.ring,
        };
        let out = u64::from(query) * u64::from(WINDOW);
        let mut row = first;
        while row < first + ROWS_PER_WARP {
            if row + IN_FLIGHT as u32 <= window.in_ring {
                let rows = window.load_ring::<F>(ring_data, ring_scale, row, lane);
                for (i, values) in rows.into_iter().enumerate() {
                    values.store(tile, out + u64::from(row) + i as u64, lane);
                }
            } else {
                for row in row..row + IN_FLIGHT as u32 {
                    let values = window.load::<F>(kv, ring_data, ring_scale, row, lane);
                    values.store(tile, out + u64::from(row), lane);
                }
            }
            row += IN_FLIGHT as u32;
        }
    }
}

/// The window of one query, as rows 0 (oldest) to `length`.
#[derive(Clone, Copy)]
struct Window {
    /// The query's row in the step.
    token: u32,
    /// Position of row 0.
    oldest: u32,
    /// Rows the query sees, itself included.
    length: u32,
    /// Leading rows that come from the ring; the others are the step's own.
    in_ring: u32,
    slot: u32,
    ring: u32,
}

impl Window {
    /// [`IN_FLIGHT`] rows from `row` on, all from the ring: every load is issued before any is used.
    ///
    /// # Safety
    /// The rows are in the ring, and the planes hold it.
    #[inline(always)]
    unsafe fn load_ring<F: RowFormat>(
        self,
        data: Global<u8>,
        scale: Global<u8>,
        row: u32,
        lane: u32,
    ) -> [Bf16Lane; IN_FLIGHT] {
        let at: [u64; IN_FLIGHT] = core::array::from_fn(|i| self.ring_row(row + i as u32));
        // SAFETY: rows of this slot's ring, which the planes hold.
        unsafe {
            let stored = at.map(|at| StoredLane::load(data, at, lane));
            let scales = at.map(|at| F::load_scales(scale, at, lane));
            core::array::from_fn(|i| stored[i].dequantise(scales[i], lane))
        }
    }

    /// One row from wherever it is.
    ///
    /// # Safety
    /// All lanes of the warp call it for the same row; `kv` and the planes hold the window.
    #[inline(always)]
    unsafe fn load<F: RowFormat>(
        self,
        kv: Global<u16>,
        data: Global<u8>,
        scale: Global<u8>,
        row: u32,
        lane: u32,
    ) -> Bf16Lane {
        if row >= self.length {
            return Bf16Lane::ZERO;
        }
        // SAFETY: a row of this slot's ring, or one of the `index` tokens before the query.
        unsafe {
            if row < self.in_ring {
                let at = self.ring_row(row);
                let scales = F::load_scales(scale, at, lane);
                StoredLane::load(data, at, lane).dequantise(scales, lane)
            } else {
                let token = self.token + 1 + row - self.length;
                let values = Bf16Lane::load(kv, u64::from(token), lane);
                let (stored, scales) = values.quantise::<F>(lane);
                stored.dequantise(scales, lane)
            }
        }
    }

    #[inline(always)]
    fn ring_row(self, row: u32) -> u64 {
        ring_row(self.slot, self.ring, self.oldest + row)
    }
}

/// Counts one refusal in the launch's fault word.
///
/// # Safety
/// `faults` holds one word.
#[inline(always)]
unsafe fn count_fault(faults: GlobalMut<u32>, lane: u32) {
    if lane == 0 {
        // SAFETY: word 0 exists.
        unsafe { DeviceAtomicU32::new(faults, 0).add(1) };
    }
}
