//! Compressed entries for attention: gathers by list, gathers of all, and the number that a query sees. See
//! docs/specification.md, section 11.

use crate::args::{CountEntries, GatherAll, GatherEntries};
use crate::params::GatherEntriesParams;
use simt::mem::{Global, GlobalMut};
use simt::thread;

use crate::block_table::TableRow;
use crate::fault;
use crate::fault_injection;
use crate::row::{Bf16Lane, RowFormat, StoredRow};

/// Warps of a block of either gather.
const WARPS: u32 = 4;
/// Rows of a tile that one warp fetches, all at once.
const ROWS_PER_WARP: u32 = 4;
/// Rows of a tile that one block fetches.
pub const BLOCK_ROWS: u32 = WARPS * ROWS_PER_WARP;
/// Threads of a block of [`count_entries`].
pub const THREADS: u32 = 128;

/// Gathers the entries that each query's list names, dequantised to BF16, into the tile row of the
/// same index; index -1 gives a zero row.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch of `tokens` times `rows / 16`
/// blocks, rounded up, of 4 warps call it.
#[inline(always)]
pub unsafe fn selected<F: RowFormat>(args: GatherEntries) {
    let params = args.params;
    let lane = thread::lane_id();
    let (query, first) = query_and_row(params.rows);
    if query >= params.tokens || first >= params.rows {
        return;
    }
    // SAFETY: `query < tokens`, and the list has `rows` indices, at least one.
    unsafe {
        let list = u64::from(query) * u64::from(params.rows);
        // Past the list's end this loads the last index again, and without a slot the first request's row of the table:
        // without a branch, all loads of a stage are in flight together.
        let index = |i: u32| args.selected.load(list + u64::from((first + i).min(params.rows - 1)));
        let indices = [index(0), index(1), index(2), index(3)];
        let query = Query::load(args.token_position, args.token_slot, args.table, query, params);
        let reader = Reader {
            data: args.entry_data,
            scale: args.entry_scale,
            tile: args.tile,
            faults: args.faults,
            lane,
        };
        let rows = if query.live { params.rows - first } else { 0 };
        reader.gather::<F>(query, indices, list + u64::from(first), rows);
        fault::count(args.faults, lane, u32::from(query.refused && first == 0));
    }
}

/// Gathers all entries that each query sees, oldest first, dequantised to BF16, and writes their number. Rows of the
/// tile past that number are left as they were.
///
/// # Safety
/// As for [`selected`].
#[inline(always)]
pub unsafe fn all<F: RowFormat>(args: GatherAll) {
    let params = args.params;
    let lane = thread::lane_id();
    let (query, first) = query_and_row(params.rows);
    if query >= params.tokens || first >= params.rows {
        return;
    }
    // SAFETY: `query < tokens`. The branches depend on query and row, never on the lane.
    unsafe {
        let state = Query::load(args.token_position, args.token_slot, args.table, query, params);
        let Query { visible, refused, .. } = state;
        let length = visible.min(params.rows);
        if first == 0 {
            if lane == 0 {
                args.lengths.store(u64::from(query), length as i32);
            }
            fault::count(args.faults, lane, u32::from(refused || visible > params.rows));
        }
        if first >= length {
            return;
        }
        let indices = [first, first + 1, first + 2, first + 3].map(|row| row as i32);
        let at = u64::from(query) * u64::from(params.rows) + u64::from(first);
        let reader = Reader {
            data: args.entry_data,
            scale: args.entry_scale,
            tile: args.tile,
            faults: args.faults,
            lane,
        };
        reader.gather::<F>(state, indices, at, length - first);
    }
}

/// Writes the number of entries that each query sees, whether or not its slot exists.
///
/// # Safety
/// Pointers and shapes as in the kernel table; one thread a query.
#[inline(always)]
pub unsafe fn count_entries(args: CountEntries) {
    let params = args.params;
    let query = thread::block_idx_x() * THREADS + thread::thread_idx_x();
    if query >= params.tokens {
        return;
    }
    let token = u64::from(params.first + query);
    // SAFETY: `query < tokens`.
    unsafe {
        let (slot, position) = (args.token_slot.load(token), args.token_position.load(token));
        let seen = (position as u32).wrapping_add(1) / params.ratio;
        let visible = if slot >= 0 && position >= 0 { seen } else { 0 };
        args.lengths.store(u64::from(query), visible as i32);
    }
}

/// The query of this block, and the first row of its tile of `rows` rows that this warp gathers. Adjacent blocks have
/// adjacent rows, so that the accesses under way at a time are to few, long ranges of memory.
#[inline(always)]
fn query_and_row(rows: u32) -> (u32, u32) {
    let parts = rows.div_ceil(BLOCK_ROWS);
    let (query, part) = (thread::block_idx_x() / parts, thread::block_idx_x() % parts);
    (query, (part * WARPS + thread::warp_id()) * ROWS_PER_WARP)
}

/// A query: the row of the block table of its request, and the entries that it sees.
#[derive(Clone, Copy)]
struct Query {
    /// Whether the query is valid: it is not padding, its slot exists, and its position is not negative.
    live: bool,
    /// Whether it is neither valid nor padding.
    refused: bool,
    /// Number of entries that the query sees; 0 unless it is live.
    visible: u32,
    /// The row of the block table of the query's request; the first row if the query is not live.
    row: TableRow,
}

impl Query {
    /// # Safety
    /// `position` and `slot` hold the launch's queries, of which `query` is one.
    #[inline(always)]
    unsafe fn load(
        position: Global<i32>,
        slot: Global<i32>,
        table: Global<i32>,
        query: u32,
        params: GatherEntriesParams,
    ) -> Self {
        let GatherEntriesParams { first, slots, max_blocks, num_blocks, entries_log2, .. } = params;
        let token = u64::from(first + query);
        // SAFETY: a query of the launch, by this function's own contract.
        let (slot, position) = unsafe { (slot.load(token), position.load(token)) };
        let live = slot >= 0 && (slot as u32) < slots && position >= 0;
        let seen = (position as u32).wrapping_add(1) >> params.ratio_log2;
        let visible = fault_injection::visible(seen);
        let start = if live { slot as u64 * u64::from(max_blocks) } else { 0 };
        Self {
            live,
            refused: slot >= 0 && !live,
            visible: if live { visible } else { 0 },
            row: TableRow { table, start, max_blocks, num_blocks, block_shift: entries_log2 },
        }
    }
}

/// The memory that both gathers read and write, and the calling lane.
#[derive(Clone, Copy)]
struct Reader {
    data: Global<u8>,
    scale: Global<u8>,
    tile: GlobalMut<u16>,
    faults: GlobalMut<u32>,
    lane: u32,
}

impl Reader {
    /// Gathers the entries `indices` of `query` into the tile from row `at` on, or the first `rows` of them. Index -1
    /// gives a zero row, as does an entry that cannot be read, which is counted.
    ///
    /// # Safety
    /// The pointers have the shapes of the kernel table, the tile has the rows, and all lanes of the
    /// warp call it together with the same query, indices and rows.
    #[inline(always)]
    unsafe fn gather<F: RowFormat>(
        self,
        query: Query,
        indices: [i32; ROWS_PER_WARP as usize],
        at: u64,
        rows: u32,
    ) {
        let Self { data, scale, tile, faults, lane } = self;
        // Unrolled by hand: an array that a loop indexes would be in local memory. Each stage starts its loads for all
        // rows before the next stage waits for the first of them.
        let [a, b, c, d] = indices;
        // SAFETY: `plane_row` checks entry and block; the tile has the rows that are stored.
        unsafe {
            let row = |index: i32| {
                let wanted = index >= 0 && (index as u32) < query.visible;
                query.row.plane_row(index as u32, wanted)
            };
            let [a_row, b_row, c_row, d_row] = [row(a), row(b), row(c), row(d)];
            let fetch =
                |row: Option<u64>| row.map(|row| StoredRow::load::<F>(data, scale, row, lane));
            let stored = [fetch(a_row), fetch(b_row), fetch(c_row), fetch(d_row)];
            let missing = |i: u32, index: i32, row: Option<u64>| {
                u32::from(i < rows && index >= 0 && row.is_none())
            };
            let refusals = missing(0, a, a_row)
                + missing(1, b, b_row)
                + missing(2, c, c_row)
                + missing(3, d, d_row);
            fault::count(faults, lane, refusals);
            let store = |i: u32, row: Option<StoredRow>| {
                if i < rows {
                    let values = row.map_or(Bf16Lane::ZERO, |row| row.dequantise::<F>(lane));
                    values.store(tile, at + u64::from(i), lane);
                }
            };
            let [a, b, c, d] = stored;
            store(0, a);
            store(1, b);
            store(2, c);
            store(3, d);
        }
    }
}
