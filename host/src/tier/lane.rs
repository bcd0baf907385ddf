//! One direction between the device and host memory: a stream of its own, and memory through which blocks go.

use std::ops::Range;

use super::layout::TierLayout;
use crate::core::Core;
use crate::device::{Backend, Buffer, Device, Event, Staged, Stream};
use crate::error::KvError;
use crate::ids::BlockId;
use crate::ops::{self, BlockCopy, CopyDirection, JOB, StateArena, StateCopies};

/// One direction.
pub(super) struct Lane<B: Backend> {
    pub stream: Stream<B>,
    layout: TierLayout,
    /// `[staged_blocks, unit_bytes]`: images of blocks.
    staging: Buffer<B, u8>,
    /// `[blocks, 4]`: which block goes to which place.
    jobs: Staged<B, i32>,
    /// In the streams that it follows.
    before: Event<B>,
}

impl<B: Backend> Lane<B> {
    pub fn new(device: &Device<B>, layout: TierLayout) -> Result<Self, KvError> {
        let bytes = u64::from(layout.staged_blocks) * layout.unit_bytes;
        Ok(Self {
            stream: device.stream()?,
            layout,
            staging: device.allocate("blocks on their way", bytes)?,
            jobs: Staged::new(device, "jobs of the host tier", layout.jobs() as usize)?,
            before: device.event()?,
        })
    }

    /// What is queued from now on waits, on the device, for what is queued in `stream`.
    pub fn follow(&self, stream: &Stream<B>) -> Result<(), KvError> {
        stream.record(&self.before)?;
        Ok(self.stream.wait_for(&self.before)?)
    }

    /// Tells the device which blocks are copied, in order. No transfer of this lane may be in flight, or the host waits for it.
    pub fn upload_jobs(&mut self, blocks: &[BlockId]) -> Result<(), KvError> {
        let staged = self.layout.staged_blocks;
        let places = (0..staged).cycle().map(BlockId);
        self.jobs.update(&self.stream, |array| {
            let jobs = array.as_chunks_mut::<JOB>().0.iter_mut().zip(blocks).zip(places);
            for ((words, &from), to) in jobs {
                *words = BlockCopy { from, to }.words();
            }
            Ok((JOB * blocks.len(), ()))
        })
    }

    /// The rounds of `blocks` blocks: so many as there is memory for on their way.
    pub fn rounds(&self, blocks: usize) -> impl Iterator<Item = Range<usize>> + use<B> {
        let staged = self.layout.staged_blocks as usize;
        (0..blocks).step_by(staged).map(move |first| first..blocks.min(first + staged))
    }

    /// The memory through which a round goes.
    pub fn staged(&self, round: &Range<usize>) -> Buffer<B, u8> {
        let bytes = round.len() as u64 * self.layout.unit_bytes;
        self.staging.slice(0, bytes).expect("a round is no longer than the memory")
    }

    /// Queues the copy of a round of blocks to that memory ([`CopyDirection::Save`]), or from it
    /// ([`CopyDirection::Restore`]), in one launch.
    pub fn copy(
        &self,
        core: &Core<B>,
        round: &Range<usize>,
        direction: CopyDirection,
    ) -> Result<(), KvError> {
        let state = &core.memory.state;
        let arena = StateArena {
            checkpoints: &self.staging,
            number_of_checkpoints: self.layout.staged_blocks,
            checkpoint_bytes: self.layout.unit_bytes,
            ..state.block_arena()
        };
        let jobs = self.jobs.buffer().view();
        let jobs = jobs.slice((JOB * round.start) as u64, (JOB * round.len()) as u64);
        let copies = StateCopies {
            arena: &arena,
            pieces: state.block_pieces(),
            jobs: &jobs.expect("a job for each block was sent"),
            count: round.len() as u32,
            direction,
            faults: core.memory.copy_faults(),
        };
        Ok(ops::copy_state(&self.stream, &copies)?)
    }
}
