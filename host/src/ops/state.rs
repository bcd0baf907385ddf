//! Whole state rows: copied into another slot (fork, resume, import), or overwritten with one word.

use kernels_gpu::params::{ResetStateParams, RotateStateParams};

use super::{StateRing, check_length};
use crate::device::{Backend, DeviceError, Stream, View};
use crate::ids::SlotId;
use kernels_gpu::launch::{ResetState, RotateState};

/// Where state rows come from.
pub enum StateSource<'a, B: Backend> {
    /// Another slot of the same ring.
    Slot(SlotId),
    /// `[rows, 2 * columns]` f32, in order of position.
    Image(&'a View<B, f32>),
}

/// The state of one request's compressor.
pub struct StateSlot<'a, B: Backend> {
    /// The ring of all slots.
    pub state: &'a StateRing<B>,
    /// Columns of the compressor: 1024, 256 or 512.
    pub columns: u32,
    /// The request's slot.
    pub slot: SlotId,
}

/// State rows on their way into another slot.
pub struct StateMove<'a, B: Backend> {
    /// From where.
    pub from: StateSource<'a, B>,
    /// Position of the first row.
    pub position: u32,
    /// Rows, at most as many as the ring has.
    pub rows: u32,
}

/// Queues `csa_rotate_state`, which serves every compressor: rows into slot `to`, each to the ring row of its
/// position.
///
/// # Errors
/// [`DeviceError::Length`] for a slot that does not exist, or more rows than the ring has;
/// [`DeviceError::TooShort`] for a buffer shorter than its shape; as [`Stream::launch`].
pub fn rotate_state<B: Backend>(
    stream: &Stream<B>,
    to: &StateSlot<'_, B>,
    moved: &StateMove<'_, B>,
) -> Result<(), DeviceError> {
    let StateSlot { state, columns, slot: to } = *to;
    let StateMove { ref from, position, rows } = *moved;
    if rows == 0 {
        return Ok(());
    }
    let row_words = check_state(state, columns, to)?;
    check_length("rows of the ring", state.ring.into(), rows.into())?;
    let (from, image) = match *from {
        StateSource::Slot(slot) => {
            check_state(state, columns, slot)?;
            // The image is not read: none of the ring, which is written.
            (slot.0, state.rows.view().slice(0, 0).expect("every buffer has no elements"))
        }
        StateSource::Image(image) => (RotateStateParams::IMAGE, image.clone()),
    };
    let operation = RotateState {
        image: image.cast()?.ptr(),
        state: state.rows.cast()?.ptr_mut(),
        params: RotateStateParams { rows, position, from, to: to.0, ring: state.ring, row_words },
    };
    // SAFETY: the launch checks image and ring, both slots exist,
    // and at most a ring of consecutive positions have rows of their own. From a slot the image is
    // not read.
    unsafe { stream.launch((), &operation) }
}

/// Queues `hca_reset_state`, which serves every compressor: all rows of a slot become `word`, a NaN
/// pattern to poison them or 0 to clear them.
///
/// # Errors
/// [`DeviceError::Length`] for a slot that does not exist; [`DeviceError::TooShort`] for a buffer shorter than its
/// shape; as [`Stream::launch`].
pub fn reset_state<B: Backend>(
    stream: &Stream<B>,
    of: &StateSlot<'_, B>,
    word: u32,
) -> Result<(), DeviceError> {
    let StateSlot { state, columns, slot } = *of;
    let row_words = check_state(state, columns, slot)?;
    let operation = ResetState {
        state: state.rows.cast()?.ptr_mut(),
        params: ResetStateParams { slot: slot.0, ring: state.ring, row_words, word },
    };
    // SAFETY: the launch checks the ring.
    unsafe { stream.launch((), &operation) }
}

/// Checks a ring of rows of `columns` keys and as many scores, and a slot of it; the words of a row.
fn check_state<B: Backend>(
    state: &StateRing<B>,
    columns: u32,
    slot: SlotId,
) -> Result<u32, DeviceError> {
    check_length("columns", columns.into(), 4)?;
    let row_words = columns.checked_next_multiple_of(4).unwrap_or(u32::MAX).saturating_mul(2);
    check_length("state slots", state.slots.into(), u64::from(slot.0) + 1)?;
    Ok(row_words)
}
