//! The search for indexer keys that were scored although no kernel had written them.

use kernels_gpu::params::FindPoisonedKeysParams;

use super::poison::capacity;
use super::{BlockTable, IndexKeys, StepQueries};
use crate::device::{Backend, Buffer, DeviceError, Stream};
use crate::ids::LayerId;
use kernels_gpu::launch::FindPoisonedKeys;

/// Which scores [`super::index_score`] made: those of queries that see more than `skip` entries, for
/// their first `columns` entries.
#[derive(Clone, Copy)]
pub struct Scored {
    /// Queries that see at most this many entries were left out.
    pub skip: u32,
    /// Most entries of a query.
    pub columns: u32,
}

/// Arguments of [`find_poisoned_keys`].
pub struct PoisonedKeySearch<'a, B: Backend> {
    /// The queries that were scored.
    pub queries: &'a StepQueries<'a, B>,
    /// Their layer.
    pub layer: LayerId,
    /// The blocks of their requests.
    pub table: &'a BlockTable<'a, B>,
    /// The layer's keys.
    pub keys: &'a IndexKeys<'a, B>,
    /// Which scores were made.
    pub scored: Scored,
    /// `[2 + 5 * capacity]` as of `find_poison`.
    pub found: &'a Buffer<B, u32>,
}

/// Queues `find_poisoned_keys_*`: counts the keys that were scored although no kernel has written them
/// since the cache was poisoned, once for each query, and records them while there is room. An entry
/// without a block has no key.
///
/// # Errors
/// [`DeviceError::Argument`] for queries past `u32::MAX`;
/// [`DeviceError::TooShort`] for a buffer shorter than its shape; as [`Stream::launch`].
pub fn find_poisoned_keys<B: Backend>(
    stream: &Stream<B>,
    search: &PoisonedKeySearch<'_, B>,
) -> Result<(), DeviceError> {
    let PoisonedKeySearch { queries, layer, table, keys, scored, found } = *search;
    let num_blocks = keys.num_blocks;
    let StepQueries { position, slot, first, count, .. } = *queries;
    let Scored { skip, columns } = scored;
    if count == 0 || columns <= skip {
        return Ok(());
    }
    queries.check()?;
    let operation = FindPoisonedKeys {
        token_position: position.ptr(),
        token_slot: slot.ptr(),
        table: table.table.ptr(),
        index_code: keys.code.ptr(),
        index_scale: keys.scale.ptr(),
        found: found.ptr_mut(),
        params: FindPoisonedKeysParams {
            first,
            tokens: count,
            skip,
            columns,
            layer: layer.0,
            capacity: capacity(found),
            slots: table.slots,
            max_blocks: table.max_blocks,
            num_blocks,
        },
    };
    // SAFETY: the launch checks every buffer; the kernel refuses
    // slots outside the table and blocks outside the planes; work of one stream runs in order.
    unsafe { stream.launch(keys.format, &operation) }
}
