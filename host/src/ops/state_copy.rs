//! Copies of request state, all layers in one launch: from slots to checkpoints and back, between slots, and
//! between blocks.

use kernels_gpu::launch::CopyState;
use kernels_gpu::params::CopyStateParams;

use super::check_argument;
use crate::device::{ARENA_ALIGN, Backend, Buffer, DeviceError, Stream, View};
use crate::ids::{BlockId, CheckpointId, SlotId};

/// Bytes of the unit in which the kernel counts memory: the alignment of pools in an arena.
pub(crate) const UNIT: u64 = ARENA_ALIGN;
const _: () = assert!(UNIT == 256, "what kernels take a unit to be");

/// A number of bytes in units. Refuses one that is no multiple of 256, and more units than a kernel can count.
pub(super) fn in_units(what: &'static str, value: u64) -> Result<u32, DeviceError> {
    let refused =
        DeviceError::Argument { what, value, multiple: UNIT, most: UNIT * u64::from(u32::MAX) };
    let units = u32::try_from(value / UNIT).ok();
    units.filter(|_| value.is_multiple_of(UNIT)).ok_or(refused)
}

/// The memory of slots and checkpoints.
pub struct StateArena<'a, B: Backend> {
    /// The memory that holds the pools of all slots.
    pub slots: &'a Buffer<B, u8>,
    /// Slots, those of suspended requests included.
    pub number_of_slots: u32,
    /// `[checkpoints, checkpoint_bytes]` u8.
    pub checkpoints: &'a Buffer<B, u8>,
    /// Checkpoints.
    pub number_of_checkpoints: u32,
    /// Bytes of a checkpoint, a multiple of 256.
    pub checkpoint_bytes: u64,
}

/// Which part of a pool each block copies: `[pieces, 8]` u32; see `kernels_gpu::state_copy`.
pub struct CopyPieces<'a, B: Backend>(pub &'a View<B, u32>);

/// A copy between a slot and a checkpoint, in the direction of the launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckpointCopy {
    /// The request's slot.
    pub slot: SlotId,
    /// The checkpoint.
    pub checkpoint: CheckpointId,
    /// The position at which a request continues from the checkpoint.
    pub boundary: u32,
    /// Only rows of positions before `end` are copied: `boundary`, or less if a step writes the later rows itself.
    pub end: u32,
}

/// A slot that becomes a copy of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotCopy {
    /// The slot that is read.
    pub from: SlotId,
    /// The slot that is written.
    pub to: SlotId,
}

/// A block that becomes a copy of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// The block that is read.
    pub from: BlockId,
    /// The block that is written.
    pub to: BlockId,
}

/// A job as the kernel reads it.
pub type JobWords = [i32; JOB];

/// Elements of a job.
pub(crate) const JOB: usize = CopyStateParams::JOB as usize;

impl CheckpointCopy {
    /// The job as the kernel reads it.
    #[must_use]
    pub const fn words(self) -> JobWords {
        let Self { slot, checkpoint, boundary, end } = self;
        [slot.0 as i32, checkpoint.0 as i32, boundary as i32, end as i32]
    }
}

impl SlotCopy {
    /// The job as the kernel reads it.
    #[must_use]
    pub const fn words(self) -> JobWords {
        whole(self.from.0, self.to.0)
    }
}

impl BlockCopy {
    /// The job as the kernel reads it.
    #[must_use]
    pub const fn words(self) -> JobWords {
        whole(self.from.0, self.to.0)
    }
}

/// The copy of a whole slot or block: it counts as one row in a ring of one.
const fn whole(from: u32, to: u32) -> JobWords {
    [from as i32, to as i32, 1, 1]
}

/// Source and destination of the copies of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyDirection {
    /// From slots to checkpoints: jobs are [`CheckpointCopy::words`].
    Save,
    /// From checkpoints to slots: jobs are [`CheckpointCopy::words`].
    Restore,
    /// From slots to other slots, or blocks to other blocks: jobs are [`SlotCopy::words`] or [`BlockCopy::words`].
    Slot,
}

/// Copies of one direction, on the device.
pub struct StateCopies<'a, B: Backend> {
    /// The memory.
    pub arena: &'a StateArena<'a, B>,
    /// The pieces of checkpoints, or of slots.
    pub pieces: CopyPieces<'a, B>,
    /// `[count, 4]` i32. No two jobs may write the same slot or checkpoint, and none may read what another writes.
    pub jobs: &'a View<B, i32>,
    /// Jobs.
    pub count: u32,
    /// The direction of all of them.
    pub direction: CopyDirection,
    /// `[1]` count of jobs refused, by piece: a slot or checkpoint that does not exist.
    pub faults: &'a Buffer<B, u32>,
}

/// Queues `copy_state`: all layers of all jobs in one launch.
///
/// # Errors
/// [`DeviceError::Argument`] for memory of less than 256 bytes, or of more than 2^40, for checkpoints whose size is no
/// multiple of 256, or if there are no checkpoints; [`DeviceError::TooShort`] for a buffer shorter than its shape; as
/// [`Stream::launch`].
pub fn copy_state<B: Backend>(
    stream: &Stream<B>,
    copies: &StateCopies<'_, B>,
) -> Result<(), DeviceError> {
    let StateCopies { arena, ref pieces, jobs, count, direction, faults } = *copies;
    let pieces = pieces.0;
    let number = pieces.len() / u64::from(CopyStateParams::PIECE);
    if count == 0 || number == 0 {
        return Ok(());
    }
    let units = |what, bytes: u64| {
        let units = bytes / UNIT;
        check_argument(what, units, 1, u32::MAX)?;
        Ok::<_, DeviceError>(units as u32)
    };
    check_argument("pieces of a copy", number, 1, u32::MAX)?;
    let slot_units = units("units of 256 bytes of all slots", arena.slots.len())?;
    let (mode, checkpoints) = match direction {
        CopyDirection::Save => (CopyStateParams::SAVE, arena.number_of_checkpoints),
        CopyDirection::Restore => (CopyStateParams::RESTORE, arena.number_of_checkpoints),
        CopyDirection::Slot => (CopyStateParams::SLOT, 0),
    };
    let checkpoint_units = match checkpoints {
        0 => 0,
        _ => {
            units("units of 256 bytes of a checkpoint", arena.checkpoint_bytes)?;
            in_units("bytes of a checkpoint", arena.checkpoint_bytes)?
        }
    };
    if checkpoints == 0 && direction != CopyDirection::Slot {
        check_argument("number of checkpoints", checkpoints, 1, u32::MAX)?;
    }
    let operation = CopyState {
        pieces: pieces.ptr(),
        jobs: jobs.ptr(),
        slots: arena.slots.ptr_mut(),
        checkpoints: arena.checkpoints.ptr_mut(),
        faults: faults.ptr_mut(),
        params: CopyStateParams {
            mode,
            pieces: number as u32,
            jobs: count,
            slots: arena.number_of_slots,
            slot_units,
            checkpoints,
            checkpoint_units,
        },
    };
    // SAFETY: the launch checks every buffer; the kernel refuses slots and checkpoints that do not exist and leaves
    // out what lies outside both; work of one stream runs in order.
    unsafe { stream.launch((), &operation) }
}
