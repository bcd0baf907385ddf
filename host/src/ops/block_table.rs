//! The block table: which block of the pool holds each block of each request.

use kernels_gpu::launch::UpdateTable;
use kernels_gpu::params::UpdateTableParams;

use crate::device::{Backend, Buffer, DeviceError, Stream, View};

/// Which block of the pool holds each block of each request.
pub struct BlockTable<'a, B: Backend> {
    /// `[slots, max_blocks]` block of the pool; -1 = none.
    pub table: &'a Buffer<B, i32>,
    /// Request slots.
    pub slots: u32,
    /// Most blocks of a request.
    pub max_blocks: u32,
}

/// Arguments of [`update_table`]: blocks to enter in the block table.
pub struct TableUpdate<'a, B: Backend> {
    /// `[count]` element of the table, distinct.
    pub index: &'a View<B, i32>,
    /// `[count]` block of the pool.
    pub block: &'a View<B, i32>,
    /// The table.
    pub table: &'a BlockTable<'a, B>,
    /// Blocks.
    pub count: u32,
}

/// Queues `update_table`: each block into its element of the table.
///
/// # Errors
/// [`DeviceError::TooShort`] for a buffer shorter than its shape; as [`Stream::launch`].
pub fn update_table<B: Backend>(
    stream: &Stream<B>,
    update: &TableUpdate<'_, B>,
) -> Result<(), DeviceError> {
    let TableUpdate { index, block, table, count } = *update;
    if count == 0 {
        return Ok(());
    }
    let elements = table.slots.saturating_mul(table.max_blocks);
    let operation = UpdateTable {
        update_index: index.ptr(),
        update_block: block.ptr(),
        table: table.table.ptr_mut(),
        params: UpdateTableParams { count, elements },
    };
    // SAFETY: the launch checks every buffer; the kernel leaves out
    // elements beyond the table.
    unsafe { stream.launch((), &operation) }
}
