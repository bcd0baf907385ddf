//! Flush: stores CSA entries and indexer keys (from BF16), and pooled HCA windows, as rows of the paged planes.

use crate::args::{FlushCsa, FlushHca};
use crate::compress::{EntryMemory, Finish, load_quad};
use crate::params::FlushParams;
use kv_layout::geometry::{BLOCK_TOKENS, CSA_RATIO, HCA_RATIO, HEAD_DIM, INDEX_DIM};
use simt::mem::Global;
use simt::thread;

use crate::block_table::TableRow;
use crate::fault;
use crate::index_row::{IndexRowFormat, Lanes, WholeWarp, quad_from_bf16};
use crate::row::{Bf16Lane, RowFormat};

/// Warps of a block of [`csa`].
const WARPS: u32 = 4;
/// Records of a block of [`csa`], two warps each.
pub const CSA_RECORDS: u32 = WARPS / 2;
/// Bytes of shared memory of a block of [`hca`].
pub const HCA_SHARED_BYTES: u32 = EntryMemory::BYTES;

/// The work list, and the data that give the destinations of its tokens' entries.
#[derive(Clone, Copy)]
struct Records {
    closing: Global<i32>,
    token_position: Global<i32>,
    token_slot: Global<i32>,
    token_index: Global<i32>,
    /// For HCA.
    token_remaining: Option<Global<i32>>,
    table: Global<i32>,
    ratio: u32,
    params: FlushParams,
}

impl Records {
    /// The destination of the entry of `record`.
    ///
    /// # Safety
    /// The pointers have the shapes of the kernel table; `record < capacity`.
    #[inline(always)]
    unsafe fn destination(self, record: u32) -> Destination {
        let Self { closing, token_position, token_slot, table, ratio, params, .. } = self;
        // SAFETY: by this function's own contract; a slot is checked before its table row is read.
        unsafe {
            let token = closing.load(u64::from(record));
            if token < 0 {
                return Destination::Nothing;
            }
            if token as u32 >= params.tokens {
                return Destination::Refused;
            }
            let position = token_position.load(token as u64) as u32;
            if !position.wrapping_add(1).is_multiple_of(ratio) {
                return Destination::Nothing;
            }
            let slot = token_slot.load(token as u64) as u32;
            if slot >= params.slots || !self.has_tokens(token as u32) {
                return Destination::Refused;
            }
            let FlushParams { max_blocks, num_blocks, .. } = params;
            let block_shift = (BLOCK_TOKENS / ratio).trailing_zeros();
            let row = TableRow::of_slot(table, slot, max_blocks, num_blocks, block_shift);
            let entry = position / ratio;
            let row = row.plane_row(entry, true);
            row.map_or(Destination::Refused, |row| Destination::Row { row, entry })
        }
    }
}

impl Records {
    /// Whether the step has the tokens that a token says come before and after it. If not, the compressor has pooled nothing for
    /// it, and the record's place holds an entry of an earlier step.
    ///
    /// # Safety
    /// As [`Self::destination`]; `token < tokens`.
    #[inline(always)]
    unsafe fn has_tokens(self, token: u32) -> bool {
        // SAFETY: by this function's own contract.
        unsafe {
            let index = self.token_index.load(token.into()) as u32;
            let remaining = self.token_remaining.map_or(0, |all| all.load(token.into()) as u32);
            index <= token && remaining < self.params.tokens - token
        }
    }
}

/// The destination of a record.
enum Destination {
    /// No record, or one that closes no window.
    Nothing,
    /// The record's token, slot or block does not exist, or tokens that it says come before or after it.
    Refused,
    /// The plane row, and the index of the entry.
    Row { row: u64, entry: u32 },
}

/// CSA: one warp stores the entry, the next one the indexer key; two records a block.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of the launch call it.
#[inline(always)]
pub unsafe fn csa<F: RowFormat, I: IndexRowFormat>(args: FlushCsa) {
    let (lane, warp_id) = (thread::lane_id(), thread::warp_id());
    let record = (thread::block_idx_x() * WARPS + warp_id) / 2;
    if record >= args.params.capacity {
        return;
    }
    // SAFETY: a warp has one half of one record, so it stays together; rows come from the table.
    unsafe {
        let records = Records {
            closing: args.closing,
            token_position: args.token_position,
            token_slot: args.token_slot,
            token_index: args.token_index,
            token_remaining: None,
            table: args.table,
            ratio: CSA_RATIO,
            params: args.params,
        };
        match records.destination(record) {
            Destination::Nothing => {}
            Destination::Refused => fault::count(args.faults, lane, 1 - warp_id % 2),
            Destination::Row { row, .. } if warp_id.is_multiple_of(2) => {
                let values = Bf16Lane::load(args.entries, u64::from(record), lane);
                values.store_quantised::<F>(args.entry_data, args.entry_scale, Some(row), lane);
            }
            Destination::Row { row, .. } => {
                let at = u64::from(record) * u64::from(INDEX_DIM) + u64::from(4 * lane);
                let key = quad_from_bf16(args.keys.load_u32x2(at));
                let is_transformed = args.params.hadamard == 1;
                let [key] = if is_transformed { WholeWarp::hadamard([key]) } else { [key] };
                I::store(args.index_code, args.index_scale, row, lane, key);
            }
        }
    }
}

/// HCA: one block a record, which norms and rotates the pooled vector of a run before it quantises it. Leaves out runs
/// that close no window.
///
/// # Safety
/// As [`csa`].
#[inline(always)]
pub unsafe fn hca<F: RowFormat>(args: FlushHca) {
    let record = thread::block_idx_x();
    let channel = 4 * thread::thread_idx_x();
    // SAFETY: the grid has one block a record, which stays together; channels are below 512; rows come from
    // the table.
    unsafe {
        let records = Records {
            closing: args.runs,
            token_position: args.token_position,
            token_slot: args.token_slot,
            token_index: args.token_index,
            token_remaining: Some(args.token_remaining),
            table: args.table,
            ratio: HCA_RATIO,
            params: args.params,
        };
        match records.destination(record) {
            Destination::Nothing => {}
            Destination::Refused => {
                let lane = thread::thread_idx_x();
                fault::count(args.faults, lane, 1);
            }
            Destination::Row { row, entry } => {
                let finish = Finish::load::<HEAD_DIM>(args.norm, args.frequencies, channel);
                let at = u64::from(record) * u64::from(HEAD_DIM) + u64::from(channel);
                let pooled = load_quad(args.pooled, at);
                let rotation = finish.rotation(entry * HCA_RATIO);
                let planes = [args.entry_data, args.entry_scale];
                let finish = (finish, rotation);
                EntryMemory::new().store::<F>(pooled, finish, planes, Some(row), args.faults);
            }
        }
    }
}
