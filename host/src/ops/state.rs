//! Whole state rows, as in the original design: copied into another slot, or overwritten with one word. No step
//! launches these kernels (docs/architecture.md, D3); forks and resumed requests have [`super::copy_state`]. They are
//! for programs that keep state of their own.

use kernels_gpu::params::{ResetStateParams, RotateStateParams};
use kv_layout::geometry::{CompressorKind, CsaCompressor, csa_previous_rows, csa_state_rows};

use super::{StateRing, check_length, check_most};
use crate::device::{Backend, DeviceError, Stream, View};
use crate::ids::SlotId;
use kernels_gpu::launch::{ResetState, RotateState};

/// Source of state rows.
pub enum StateSource<'a, B: Backend> {
    /// Another slot of the same ring.
    Slot(SlotId),
    /// `[rows, row]` f32, in order of position.
    Image(&'a View<B, f32>),
}

/// One of the rings of a compressor's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatePart {
    /// The own halves of a CSA compressor, which the token's own window pools.
    Own(CsaCompressor),
    /// The previous halves of a CSA compressor, which the window after the token's own pools.
    Previous(CsaCompressor),
    /// The running sums of an HCA layer.
    Sums,
}

/// Where a ring is in a slot.
struct Place {
    ring: u32,
    slot_rows: u32,
    first_row: u32,
    row_words: u32,
}

impl StatePart {
    /// Its place in a state whose `StateRing::ring` is `ring`.
    fn place(self, ring: u32) -> Place {
        let (first_row, rows) = match self {
            Self::Own(_) | Self::Sums => (0, ring),
            Self::Previous(_) => (ring, csa_previous_rows(ring)),
        };
        let (which, slot_rows) = match self {
            Self::Own(which) | Self::Previous(which) => (which.into(), csa_state_rows(ring)),
            Self::Sums => (CompressorKind::Hca, ring),
        };
        Place { ring: rows, slot_rows, first_row, row_words: which.row_floats() }
    }
}

/// The state of one request's compressor.
pub struct StateSlot<'a, B: Backend> {
    /// The state of all slots.
    pub state: &'a StateRing<'a, B>,
    /// Which of its rings.
    pub part: StatePart,
    /// The request's slot.
    pub slot: SlotId,
}

/// State rows to copy into a slot.
pub struct StateMove<'a, B: Backend> {
    /// Source of the rows.
    pub from: StateSource<'a, B>,
    /// Position of the first row.
    pub position: u32,
    /// Rows, at most as many as the ring has.
    pub rows: u32,
}

/// Queues `csa_rotate_state`, which serves every compressor: rows into slot `to`, each to the ring row of its
/// position. No step launches it.
///
/// # Errors
/// [`DeviceError::Length`] for a slot that does not exist, or more rows than the ring has;
/// [`DeviceError::TooShort`] for a buffer shorter than its shape; as [`Stream::launch`].
pub fn rotate_state<B: Backend>(
    stream: &Stream<B>,
    to: &StateSlot<'_, B>,
    moved: &StateMove<'_, B>,
) -> Result<(), DeviceError> {
    let StateSlot { state, part, slot: to } = *to;
    let StateMove { ref from, position, rows } = *moved;
    if rows == 0 {
        return Ok(());
    }
    let Place { ring, slot_rows, first_row, row_words } = part.place(state.ring);
    check_slot(state, to)?;
    check_length("rows of the ring", ring.into(), rows.into())?;
    // Positions that wrap would share a row of a ring whose length is no power of two.
    check_most("position of the last row", u64::from(position) + u64::from(rows) - 1, u32::MAX)?;
    let (from, image) = match *from {
        StateSource::Slot(slot) => {
            check_slot(state, slot)?;
            // The kernel does not read an image then: it gets an empty part of the ring.
            (slot.0, state.rows.view().slice(0, 0).expect("every buffer has no elements"))
        }
        StateSource::Image(image) => (RotateStateParams::IMAGE, image.clone()),
    };
    let operation = RotateState {
        image: image.cast()?.ptr(),
        state: state.rows.cast()?.ptr_mut(),
        params: RotateStateParams {
            rows,
            position,
            from,
            to: to.0,
            ring,
            slot_rows,
            first_row,
            row_words,
        },
    };
    // SAFETY: the launch checks image and ring, both slots exist,
    // and at most a ring of consecutive positions have rows of their own. From a slot the image is
    // not read.
    unsafe { stream.launch((), &operation) }
}

/// Queues `hca_reset_state`, which serves every compressor: all rows of a slot, of all its rings, become `word`,
/// a NaN pattern to poison them or 0 to clear them. No step launches it.
///
/// # Errors
/// [`DeviceError::Length`] for a slot that does not exist; [`DeviceError::TooShort`] for a buffer shorter than its
/// shape; as [`Stream::launch`].
pub fn reset_state<B: Backend>(
    stream: &Stream<B>,
    of: &StateSlot<'_, B>,
    word: u32,
) -> Result<(), DeviceError> {
    let StateSlot { state, part, slot } = *of;
    let Place { slot_rows, row_words, .. } = part.place(state.ring);
    check_slot(state, slot)?;
    let operation = ResetState {
        state: state.rows.cast()?.ptr_mut(),
        params: ResetStateParams { slot: slot.0, slot_rows, row_words, word },
    };
    // SAFETY: the launch checks the rows.
    unsafe { stream.launch((), &operation) }
}

/// Refuses a slot that the state does not have.
fn check_slot<B: Backend>(state: &StateRing<'_, B>, slot: SlotId) -> Result<(), DeviceError> {
    check_length("state slots", state.slots.into(), u64::from(slot.0) + 1)
}
