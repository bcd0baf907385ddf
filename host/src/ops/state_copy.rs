//! Copies of slots and blocks, all layers in one launch: from slots to checkpoints, from slots or blocks to other
//! images, back, between slots, and between blocks.

use kernels_gpu::launch::CopyState;
use kernels_gpu::params::CopyStateParams;

use super::check_argument;
use crate::device::{ARENA_ALIGN, Backend, Buffer, DeviceError, Stream, View};
use crate::ids::{BlockId, CheckpointId, SlotId};

/// Bytes of a granule, in which the kernel counts memory: the alignment of pools in an arena.
pub(crate) const COPY_GRANULE: u64 = ARENA_ALIGN;
const _: () = assert!(COPY_GRANULE == 256, "what kernels take a granule to be");

/// A number of bytes in granules. Refuses one that is no multiple of 256, and more granules than a kernel can count.
pub(super) fn in_granules(what: &'static str, value: u64) -> Result<u32, DeviceError> {
    let most = COPY_GRANULE * u64::from(u32::MAX);
    let refused = DeviceError::Argument { what, value, multiple: COPY_GRANULE, most };
    let granules = u32::try_from(value / COPY_GRANULE).ok();
    granules.filter(|_| value.is_multiple_of(COPY_GRANULE)).ok_or(refused)
}

/// The memory of units, which are all slots or all blocks, and that of images.
pub struct CopyArena<'a, B: Backend> {
    /// The memory that holds the pools of all slots, or of all blocks.
    pub units: &'a Buffer<B, u8>,
    /// Slots, those of suspended requests included, or blocks.
    pub number_of_units: u32,
    /// `[images, image_bytes]` u8: checkpoints, or images of whole slots or blocks.
    pub images: &'a Buffer<B, u8>,
    /// Images.
    pub number_of_images: u32,
    /// Bytes of an image, a multiple of 256.
    pub image_bytes: u64,
}

/// Which part of a pool each thread block copies: `[pieces, 8]` u32; see `kernels_gpu::state_copy`.
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
    /// From units to images. Jobs are [`CheckpointCopy::words`] if the images are checkpoints. If they are of whole
    /// slots or blocks, jobs are [`SlotCopy::words`] or [`BlockCopy::words`]: `from` is the unit, `to` the image.
    Pack,
    /// From images to units, with jobs as for [`Self::Pack`].
    Unpack,
    /// From slots to other slots, or blocks to other blocks: jobs are [`SlotCopy::words`] or [`BlockCopy::words`].
    Copy,
}

/// Copies of one direction, on the device.
pub struct StateCopies<'a, B: Backend> {
    /// The memory.
    pub arena: &'a CopyArena<'a, B>,
    /// The pieces of checkpoints, of slots, or of blocks.
    pub pieces: CopyPieces<'a, B>,
    /// `[count, 4]` i32. No two jobs may write the same unit or image, and none may read what another writes.
    pub jobs: &'a View<B, i32>,
    /// Jobs.
    pub count: u32,
    /// The direction of all of them.
    pub direction: CopyDirection,
    /// `[1]` count of jobs refused, by piece: a slot, block or image that does not exist.
    pub faults: &'a Buffer<B, u32>,
}

/// Queues `copy_state`: all layers of all jobs in one launch.
///
/// # Errors
/// [`DeviceError::Argument`] for memory of less than 256 bytes, or of more than 2^40, for images whose size is no
/// multiple of 256, or if there are no images; [`DeviceError::TooShort`] for a buffer shorter than its shape; as
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
    let granules = |what, bytes: u64| {
        let granules = bytes / COPY_GRANULE;
        check_argument(what, granules, 1, u32::MAX)?;
        Ok::<_, DeviceError>(granules as u32)
    };
    check_argument("pieces of a copy", number, 1, u32::MAX)?;
    let memory_granules = granules("256-byte granules of all slots or blocks", arena.units.len())?;
    let (mode, images) = match direction {
        CopyDirection::Pack => (CopyStateParams::PACK, arena.number_of_images),
        CopyDirection::Unpack => (CopyStateParams::UNPACK, arena.number_of_images),
        CopyDirection::Copy => (CopyStateParams::COPY, 0),
    };
    let image_granules = match images {
        0 => 0,
        _ => {
            granules("256-byte granules of an image", arena.image_bytes)?;
            in_granules("bytes of an image", arena.image_bytes)?
        }
    };
    if images == 0 && direction != CopyDirection::Copy {
        check_argument("number of images", images, 1, u32::MAX)?;
    }
    let operation = CopyState {
        pieces: pieces.ptr(),
        jobs: jobs.ptr(),
        units: arena.units.ptr_mut(),
        images: arena.images.ptr_mut(),
        faults: faults.ptr_mut(),
        params: CopyStateParams {
            mode,
            pieces: number as u32,
            jobs: count,
            units: arena.number_of_units,
            memory_granules,
            images,
            image_granules,
        },
    };
    // SAFETY: the launch checks every buffer; the kernel refuses units and images that do not exist and leaves
    // out what lies outside both; work of one stream runs in order.
    unsafe { stream.launch((), &operation) }
}
