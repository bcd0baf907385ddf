//! The sliding-window ring: append and gather. See docs/specification.md, section 7.

use crate::args::{AppendSwa, GatherSwa};
use crate::params::AppendSwaParams;
use kv_layout::geometry::WINDOW;
use simt::mem::{Global, GlobalMut};
use simt::thread;

use crate::fault;
use crate::fault_injection;
use crate::row::{Bf16Lane, RowFormat, StoredRow};

/// Warps of a block of [`append`] and of [`gather`].
pub const WARPS: u32 = 4;
/// Blocks that share a window.
pub const GATHER_BLOCKS: u32 = 8;
/// Rows of a window that one warp of [`gather`] fetches, all at once: a block fetches an eighth of the window.
const ROWS_PER_WARP: u32 = WINDOW / GATHER_BLOCKS / WARPS;

const _: () = assert!(ROWS_PER_WARP == 4, "`gather` spells its rows out");

/// Quantises each token's row, and stores it in its ring row and in its row of a checkpoint. Row -1 means none.
///
/// # Safety
/// Pointers and shapes as in the kernel table; no two tokens share a ring row; all threads of a
/// launch of 4 warps a block call it.
#[inline(always)]
pub unsafe fn append<F: RowFormat>(args: AppendSwa) {
    let lane = thread::lane_id();
    let token = thread::block_idx_x() * WARPS + thread::warp_id();
    if token >= args.params.tokens {
        return;
    }
    // SAFETY: `token < tokens`. The branches depend on the token alone, so a warp stays together.
    unsafe {
        let values = Bf16Lane::load(args.kv, u64::from(token), lane);
        let row = args.token_ring_row.load_u32_volatile(u64::from(token)).cast_signed();
        let wanted = row >= 0 && row.cast_unsigned() < args.params.rows;
        fault::count(args.faults, lane, u32::from(row >= 0 && !wanted));
        let row = wanted.then_some(u64::from(row.cast_unsigned()));
        let saved = checkpoint_row(args, token);
        values.store_quantised_twice::<F>(args.ring_data, args.ring_scale, row, saved, lane);
    }
}

/// The planes of the checkpoint in which a token has a row, and its row there; `None` if it has none.
///
/// # Safety
/// As [`append`]; `token < tokens`.
#[inline(always)]
unsafe fn checkpoint_row(args: AppendSwa, token: u32) -> Option<([GlobalMut<u8>; 2], u64)> {
    let AppendSwaParams { checkpoints, checkpoint_granules, data_granules, scale_granules, .. } =
        args.params;
    if checkpoints == 0 {
        return None;
    }
    // SAFETY: there is a row a token where there are checkpoints.
    let (checkpoint, row) = unsafe { row_of_checkpoint(args.token_checkpoint_row, token) };
    let first = u64::from(checkpoint) * u64::from(checkpoint_granules);
    let plane = |granules: u32| args.checkpoints.skip(256 * (first + u64::from(granules)));
    (checkpoint < checkpoints)
        .then(|| ([plane(data_granules), plane(scale_granules)], u64::from(row)))
}

/// The checkpoint in which a token has a row, and its row there, 0 to 127. For a token that has none
/// (-1), a number above that of any checkpoint.
///
/// # Safety
/// `rows` has a row for the token.
#[inline(always)]
pub unsafe fn row_of_checkpoint(rows: Global<i32>, token: u32) -> (u32, u32) {
    // SAFETY: by this function's own contract.
    let row = unsafe { rows.load(u64::from(token)) }.cast_unsigned();
    (row / WINDOW, row % WINDOW)
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
/// Pointers and shapes as in the kernel table; all threads of a launch of grid `(tokens, 8)` with 4
/// warps a block call it.
#[inline(always)]
pub unsafe fn gather<F: RowFormat>(args: GatherSwa) {
    let params = args.params;
    let lane = thread::lane_id();
    let query = thread::block_idx_x();
    if query >= params.tokens {
        return;
    }
    let token = params.first + query;
    let first = (thread::block_idx_y() * WARPS + thread::warp_id()) * ROWS_PER_WARP;
    // SAFETY: `query < tokens`; a query's slot is checked before its ring is read, and that the step
    // has the `index` tokens before it, its own rows. The branches depend on token and row, never on the lane.
    unsafe {
        let slot = args.token_slot.load(u64::from(token));
        let position = args.token_position.load(u64::from(token));
        let index = args.token_index.load(u64::from(token)) as u32;
        let exists = (slot as u32) < params.slots && index <= token && position >= 0;
        let (live, refused) = (slot >= 0 && exists, slot >= 0 && !exists);
        let position = position as u32;
        let length = if live { position.wrapping_add(1).min(WINDOW) } else { 0 };
        if first == 0 {
            if lane == 0 {
                args.lengths.store(u64::from(query), length as i32);
            }
            if refused {
                fault::count(args.faults, lane, 1);
            }
        }
        if !live {
            return;
        }
        let oldest = position.wrapping_add(1) - length;
        let window = Window {
            token,
            length,
            in_ring: length.saturating_sub(index + 1),
            first,
            slot: slot as u32,
            ring: params.ring,
            first_in_ring: (oldest + first) % fault_injection::ring_rows(params.ring),
        };
        let fetch =
            |i| window.fetch::<F>(args.kv, args.ring_data, args.ring_scale, first + i, lane);
        let store = |i, row: Fetched| {
            let at = u64::from(query) * u64::from(WINDOW) + u64::from(first + i);
            row.into_bf16::<F>(lane).store(args.tile, at, lane);
        };
        // Unrolled by hand: an array that a loop indexes would be in local memory. All loads are in flight before the
        // first row is used.
        let (a, b, c, d) = (fetch(0), fetch(1), fetch(2), fetch(3));
        store(0, a);
        store(1, b);
        store(2, c);
        store(3, d);
    }
}

/// The part of one query's window that a warp gathers. Rows count from 0, the oldest, to `length`.
#[derive(Clone, Copy)]
struct Window {
    /// The query's row in the step.
    token: u32,
    /// Number of rows that the query sees, its own included.
    length: u32,
    /// Number of leading rows that come from the ring; the others are the step's own.
    in_ring: u32,
    /// The warp's first row.
    first: u32,
    slot: u32,
    ring: u32,
    /// Ring row of the warp's first row, if that comes from the ring.
    first_in_ring: u32,
}

/// One lane's share of a row as it was loaded, with its source.
#[derive(Clone, Copy)]
enum Fetched {
    /// From the ring.
    Stored(StoredRow),
    /// From the step's own rows, not yet quantised.
    Own(Bf16Lane),
    /// Past the window's end.
    Nothing,
}

impl Window {
    /// Loads row `row` from its source. The branches depend on the row, never on the lane.
    ///
    /// # Safety
    /// `kv` and the planes hold the window.
    #[inline(always)]
    unsafe fn fetch<F: RowFormat>(
        self,
        kv: Global<u16>,
        data: Global<u8>,
        scale: Global<u8>,
        row: u32,
        lane: u32,
    ) -> Fetched {
        // SAFETY: a row of this slot's ring, or one of the tokens before the query in its request.
        unsafe {
            if row < self.in_ring {
                Fetched::Stored(StoredRow::load::<F>(data, scale, self.ring_row(row), lane))
            } else if row < self.length {
                let token = self.token + 1 + row - self.length;
                Fetched::Own(Bf16Lane::load(kv, u64::from(token), lane))
            } else {
                Fetched::Nothing
            }
        }
    }

    /// The plane row of window row `row`, which is one of the warp's.
    #[inline(always)]
    fn ring_row(self, row: u32) -> u64 {
        let unwrapped = self.first_in_ring + row - self.first;
        let row = if unwrapped < self.ring { unwrapped } else { unwrapped - self.ring };
        u64::from(self.slot) * u64::from(self.ring) + u64::from(row)
    }
}

impl Fetched {
    /// The row as attention sees it: quantised and dequantised in the cache's format, whatever its source.
    ///
    /// # Safety
    /// All 32 lanes of the warp call it together, for the same row.
    #[inline(always)]
    unsafe fn into_bf16<F: RowFormat>(self, lane: u32) -> Bf16Lane {
        match self {
            Self::Stored(row) => row.dequantise::<F>(lane),
            Self::Own(values) => {
                // SAFETY: the lanes are together, by this function's own contract.
                let (stored, scales) = unsafe { values.quantise::<F>(lane) };
                stored.dequantise(scales, lane)
            }
            Self::Nothing => Bf16Lane::ZERO,
        }
    }
}
