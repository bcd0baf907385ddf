//! The block table: finds the plane row of an entry of a request, and enters new blocks.

use crate::args::UpdateTable;
use simt::mem::Global;
use simt::thread;

/// One request's row of the block table.
#[derive(Clone, Copy)]
pub struct TableRow {
    /// `[slots, max_blocks]` physical block of each logical block; -1 = none.
    pub table: Global<i32>,
    /// Element at which the request's row starts.
    pub start: u64,
    /// Blocks in a row.
    pub max_blocks: u32,
    /// Blocks of the planes.
    pub num_blocks: u32,
    /// log2 of the entries of a block.
    pub block_shift: u32,
}

impl TableRow {
    /// The row of the request in `slot`.
    #[inline(always)]
    #[must_use]
    pub fn of_slot(
        table: Global<i32>,
        slot: u32,
        max_blocks: u32,
        num_blocks: u32,
        block_shift: u32,
    ) -> Self {
        let start = u64::from(slot) * u64::from(max_blocks);
        Self { table, start, max_blocks, num_blocks, block_shift }
    }

    /// The plane row of `entry`; `None` if it is not `wanted` or has no block.
    ///
    /// # Safety
    /// `table` holds the request's row.
    #[inline(always)]
    #[must_use]
    pub unsafe fn plane_row(self, entry: u32, wanted: bool) -> Option<u64> {
        let logical = entry >> self.block_shift;
        let known = wanted && logical < self.max_blocks;
        // Loaded in any case, from the start of the row if the entry has no place in it: without a branch the loads of
        // several entries overlap.
        let at = self.start + u64::from(if known { logical } else { 0 });
        // SAFETY: an element of the request's row of the table.
        let block = unsafe { self.table.load_u32_volatile(at) };
        let within = entry & ((1 << self.block_shift) - 1);
        // A block of -1 is larger than any number of blocks.
        let row = (u64::from(block) << self.block_shift) + u64::from(within);
        (known && block < self.num_blocks).then_some(row)
    }
}

/// Threads of a block of [`update`], each for one element.
pub const THREADS: u32 = 128;

/// Enters blocks into the table.
///
/// # Safety
/// Pointers and shapes as in the kernel table; no two updates are of one element; all threads of a
/// launch of 128 threads a block call it.
#[inline(always)]
pub unsafe fn update(args: UpdateTable) {
    let i = thread::block_idx_x() * THREADS + thread::thread_idx_x();
    if i >= args.params.count {
        return;
    }
    // SAFETY: `i < count`; an element of the table.
    unsafe {
        let at = args.update_index.load(u64::from(i)) as u32;
        if at < args.params.elements {
            args.table.store(u64::from(at), args.update_block.load(u64::from(i)));
        }
    }
}
