//! The indexer's scores and lists in one launch.

use kv_layout::params::IndexScoreTopkParams;

use super::indexer::{MOST_SELECTED, SHORT, TILE, check_argument, check_keys, check_queries};
use super::{BlockTable, GatherQueries, IndexKeys, IndexQueries, check};
use crate::device::{Buffer, Device, DeviceError};
use crate::kernels::IndexScoreTopk;

/// Whether one launch of [`index_score_topk`] takes less time on an H200 than [`super::index_score`] and
/// [`super::index_topk`], by measurement (docs/performance.md): with a block of threads a query, it needs
/// queries enough to fill more than half of the GPU.
#[must_use]
pub fn one_launch_is_faster(columns: u32, queries: u32) -> bool {
    /// More than these, a query on every second multiprocessor.
    const FEW: u32 = 66;
    columns <= SHORT && queries > FEW
}

/// Queues `index_score_topk_*`: the lists that [`super::index_score`], with `k` entries to skip, and
/// [`super::index_topk`] make, in one launch without scores in memory. `columns`: most entries of a query,
/// at most 2048; `selected`: `[queries, k]`, -1 behind the last and for a slot outside the table.
///
/// A query that sees more than `columns` entries is counted in `faults` and its list made of the first of
/// them; an entry whose block is missing comes last and is counted too.
///
/// # Errors
/// [`DeviceError::Argument`] for too many heads, columns or entries of a list, or no blocks;
/// [`DeviceError::Length`] for a buffer shorter than its shape; as [`Device::launch`].
#[expect(clippy::too_many_arguments, reason = "one for each tensor of the operation")]
pub fn index_score_topk<D: Device>(
    device: &D,
    stream: &D::Stream,
    queries: &GatherQueries<'_, D>,
    from: &IndexQueries<'_, D>,
    table: &BlockTable<'_, D>,
    (keys, num_blocks): (&IndexKeys<'_, D>, u32),
    (columns, k): (u32, u32),
    selected: &Buffer<D, i32>,
    faults: &Buffer<D, u32>,
) -> Result<(), DeviceError> {
    let count = queries.count;
    if count == 0 {
        return Ok(());
    }
    check_queries(queries)?;
    from.check(count)?;
    table.check()?;
    check_argument("columns of scores in one launch", columns, TILE, SHORT)?;
    check_argument("indices of a list", k, 1, MOST_SELECTED)?;
    check("selected entries", selected, u64::from(count) * u64::from(k))?;
    check("fault word", faults, 1)?;
    check_keys(keys, num_blocks)?;
    let operation = IndexScoreTopk {
        query: from.query.ptr(),
        weight: from.weight.ptr(),
        token_position: queries.position.ptr(),
        token_slot: queries.slot.ptr(),
        table: table.table.ptr(),
        index_code: keys.code.ptr(),
        index_scale: keys.scale.ptr(),
        selected: selected.ptr(),
        faults: faults.ptr(),
        params: IndexScoreTopkParams {
            first: queries.first,
            heads: from.heads,
            k,
            columns,
            slots: table.slots,
            max_blocks: table.max_blocks,
            num_blocks,
        },
    };
    // SAFETY: every buffer has the shape of the kernel table (checked above); the kernel refuses
    // slots outside the table and blocks outside the planes.
    unsafe { device.launch(stream, keys.format, (count, 1), &operation) }
}
