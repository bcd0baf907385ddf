//! The sliding-window ring: append and gather.

use kernels_gpu::params::{AppendSwaParams, GatherSwaParams};
use kv_layout::geometry::WINDOW;
use kv_layout::main_row::DATA_BYTES;

use super::check_length;
use super::checkpoint_rows::{CheckpointArguments, CheckpointRows};
use super::pools::SwaRing;
use super::step_tokens::StepQueries;
use crate::device::{Backend, Buffer, DeviceError, Stream, View, bf16};
use kernels_gpu::launch::{AppendSwa, GatherSwa};

/// Arguments of [`append_swa`]: window rows to write to the ring.
pub struct WindowAppend<'a, B: Backend> {
    /// `[tokens, 512]` BF16.
    pub kv: &'a View<B, bf16>,
    /// `[tokens]` ring row of each token, distinct; -1 = none.
    pub row: &'a View<B, i32>,
    /// The ring.
    pub ring: &'a SwaRing<'a, B>,
    /// `[1]` count of rows refused.
    pub faults: &'a Buffer<B, u32>,
    /// Tokens.
    pub tokens: u32,
}

/// Queues `append_swa`: each row of `kv` is quantised into the ring row that `row` names.
///
/// # Errors
/// [`DeviceError::Argument`] for a ring of more than `i32::MAX` rows;
/// [`DeviceError::TooShort`] for a buffer shorter than its shape; as [`Stream::launch`].
pub fn append_swa<B: Backend>(
    stream: &Stream<B>,
    append: &WindowAppend<'_, B>,
) -> Result<(), DeviceError> {
    append_swa_saving(stream, append, None)
}

/// As [`append_swa`]; also writes the rows that tokens have in `checkpoints`.
///
/// # Errors
/// As [`append_swa`]; [`DeviceError::Length`] for rows that do not lie in a checkpoint.
pub fn append_swa_saving<B: Backend>(
    stream: &Stream<B>,
    append: &WindowAppend<'_, B>,
    checkpoints: Option<&CheckpointRows<'_, B>>,
) -> Result<(), DeviceError> {
    let WindowAppend { kv, row, ring, faults, tokens } = *append;
    if tokens == 0 {
        return Ok(());
    }
    let rows = ring.rows()?;
    let window = u64::from(WINDOW);
    let bytes = [window * DATA_BYTES, window * ring.format.scale_bytes()];
    let saved = match checkpoints {
        None => CheckpointArguments::none(row, ring.data),
        Some(rows) => {
            let [data, scale] = rows.image.window;
            rows.arguments([(data, bytes[0]), (scale, bytes[1])])?
        }
    };
    let operation = AppendSwa {
        kv: kv.ptr(),
        token_ring_row: row.ptr(),
        ring_data: ring.data.ptr_mut(),
        ring_scale: ring.scale.ptr_mut(),
        token_checkpoint_row: saved.row,
        checkpoints: saved.checkpoints,
        faults: faults.ptr_mut(),
        params: AppendSwaParams {
            tokens,
            rows,
            checkpoints: saved.number,
            checkpoint_granules: saved.granules,
            data_granules: saved.places[0],
            scale_granules: saved.places[1],
        },
    };
    // SAFETY: the launch checks every buffer, and a checkpoint has the layer's rows; the kernel refuses
    // rows outside the ring, and leaves out those of no checkpoint; work of one stream runs in order.
    unsafe { stream.launch(ring.format, &operation) }
}

/// The windows of queries, and where they go.
pub struct WindowGather<'a, B: Backend> {
    /// `[step, 512]` BF16, the step's own rows.
    pub kv: &'a View<B, bf16>,
    /// The queries.
    pub queries: &'a StepQueries<'a, B>,
    /// The ring.
    pub ring: &'a SwaRing<'a, B>,
    /// `[queries, 128, 512]` BF16.
    pub tile: &'a Buffer<B, bf16>,
    /// `[queries]` rows of each window.
    pub lengths: &'a Buffer<B, i32>,
    /// `[1]` count of queries refused.
    pub faults: &'a Buffer<B, u32>,
}

/// Queues `gather_swa`: the window of each query into its tile, and its number of rows. A query whose slot is past the last, whose
/// position is negative, or that has fewer tokens before it in the step than its index says, has no rows and is counted in the
/// fault word.
///
/// # Errors
/// [`DeviceError::Length`] for a ring shorter than a window; [`DeviceError::Argument`] for rings of more than `i32::MAX`
/// rows, or queries past `u32::MAX`; [`DeviceError::TooShort`] for a buffer shorter than its shape; as
/// [`Stream::launch`].
pub fn gather_swa<B: Backend>(
    stream: &Stream<B>,
    gather: &WindowGather<'_, B>,
) -> Result<(), DeviceError> {
    let WindowGather { kv, queries, ring, tile, lengths, faults } = *gather;
    let StepQueries { position, slot, index, first, count } = *queries;
    if count == 0 {
        return Ok(());
    }
    ring.rows()?;
    queries.check()?;
    // A warp's rows wrap round at most once.
    check_length("rows of the ring", ring.ring.into(), WINDOW.into())?;
    let operation = GatherSwa {
        kv: kv.ptr(),
        token_position: position.ptr(),
        token_slot: slot.ptr(),
        token_index: index.ptr(),
        ring_data: ring.data.ptr(),
        ring_scale: ring.scale.ptr(),
        tile: tile.ptr_mut(),
        lengths: lengths.ptr_mut(),
        faults: faults.ptr_mut(),
        params: GatherSwaParams { first, tokens: count, ring: ring.ring, slots: ring.slots },
    };
    // SAFETY: the launch checks every buffer; the kernel refuses
    // slots outside the ring and queries with more tokens before them than there are; work of one stream runs in order.
    unsafe { stream.launch(ring.format, &operation) }
}
