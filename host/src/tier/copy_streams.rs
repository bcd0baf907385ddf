//! The copies of one direction between the device and host memory: their streams, and the staging memory through which
//! blocks go.
//!
//! A kernel packs a round of blocks into one half of that memory while the round before is copied from the other half, and
//! likewise back: copies follow each other without a gap, and kernels take little of the device at a time.

use std::ops::Range;
use std::sync::Arc;

use super::layout::TierLayout;
use super::mistake::{Mistake, made};
use crate::device::{Backend, Buffer, Device, Event, HostCopies, HostUnit, Staged, Stream};
use crate::error::KvError;
use crate::ids::BlockId;
use crate::manager::core::Core;
use crate::ops::{self, BlockCopy, CopyDirection, JOB, StateArena, StateCopies};

/// The streams and the staging memory of one direction.
pub(super) struct CopyStreams<B: Backend> {
    /// Copies between host memory and the halves, and of checkpoints.
    pub copies: Stream<B>,
    /// Kernels that copy between blocks and the halves. Steps come first: their streams have a higher priority.
    pub kernels: Stream<B>,
    layout: TierLayout,
    halves: [Half<B>; 2],
    /// `[blocks, 4]`: which block goes to which place.
    jobs: Staged<B, i32>,
    /// In the streams that it follows.
    before: Event<B>,
}

/// Memory of one round.
struct Half<B: Backend> {
    /// `[round_blocks, unit_bytes]`: images of blocks.
    images: Buffer<B, u8>,
    /// Behind the last kernel that wrote or read it.
    after_kernel: Event<B>,
    /// Behind the last copy from or to host memory.
    after_copy: Event<B>,
}

impl<B: Backend> CopyStreams<B> {
    pub fn new(device: &Device<B>, layout: TierLayout) -> Result<Self, KvError> {
        let half = || -> Result<_, KvError> {
            Ok(Half {
                images: device.allocate("blocks on their way", layout.round_bytes())?,
                after_kernel: device.event()?,
                after_copy: device.event()?,
            })
        };
        Ok(Self {
            copies: device.background_stream()?,
            kernels: device.background_stream()?,
            layout,
            halves: [half()?, half()?],
            jobs: Staged::new(device, "jobs of the host tier", layout.jobs() as usize)?,
            before: device.event()?,
        })
    }

    /// What is queued from now on waits, on the device, for what is queued in `stream`.
    pub fn follow(&self, stream: &Stream<B>) -> Result<(), KvError> {
        stream.record(&self.before)?;
        self.kernels.wait_for(&self.before)?;
        Ok(self.copies.wait_for(&self.before)?)
    }

    /// Queues the copies of `blocks` to the first of the units, in order, and takes those units out. Call it when no
    /// transfer of this direction is in flight; else the host waits for that. On an error the units that were not taken
    /// stay.
    pub fn store(
        &mut self,
        core: &Core<B>,
        blocks: &[BlockId],
        units: &mut Vec<HostUnit<B>>,
        copies: &mut HostCopies<B>,
    ) -> Result<(), KvError> {
        self.upload_jobs(blocks)?;
        for (round, half) in self.rounds(blocks.len()) {
            wait(&self.kernels, &half.after_copy, Mistake::PackedTooEarly)?;
            self.launch(core, half, &round, CopyDirection::Save)?;
            self.kernels.record(&half.after_kernel)?;
            wait(&self.copies, &half.after_kernel, Mistake::CopiedTooEarly)?;
            let units = units.drain(..round.len()).collect();
            copies.store(&self.images(half, &round).view(), units)?;
            self.copies.record(&half.after_copy)?;
        }
        Ok(())
    }

    /// Queues the copies of the units to `blocks`, in order. Call it when no transfer of this direction is in flight;
    /// else the host waits for that.
    pub fn load(
        &mut self,
        core: &Core<B>,
        units: &[Arc<HostUnit<B>>],
        blocks: &[BlockId],
        copies: &mut HostCopies<B>,
    ) -> Result<(), KvError> {
        self.upload_jobs(blocks)?;
        for (round, half) in self.rounds(units.len()) {
            wait(&self.copies, &half.after_kernel, Mistake::OverwrittenTooEarly)?;
            copies.load(units[round.clone()].iter().cloned(), &self.images(half, &round))?;
            self.copies.record(&half.after_copy)?;
            wait(&self.kernels, &half.after_copy, Mistake::UnpackedTooEarly)?;
            self.launch(core, half, &round, CopyDirection::Restore)?;
            self.kernels.record(&half.after_kernel)?;
        }
        // The end of the copies' stream is that of the transfer.
        let mut halves = self.halves.iter();
        halves.try_for_each(|half| wait(&self.copies, &half.after_kernel, Mistake::EndedTooEarly))
    }

    /// Tells the device which blocks are copied, in order.
    fn upload_jobs(&mut self, blocks: &[BlockId]) -> Result<(), KvError> {
        let places = (0..self.layout.round_blocks).cycle().map(BlockId);
        self.jobs.update(&self.kernels, |array| {
            let jobs = array.as_chunks_mut::<JOB>().0.iter_mut().zip(blocks).zip(places);
            for ((words, &from), to) in jobs {
                *words = BlockCopy { from, to }.words();
            }
            Ok((JOB * blocks.len(), ()))
        })
    }

    /// The rounds of `blocks` blocks, and the half that each goes through, in turn.
    fn rounds(&self, blocks: usize) -> impl Iterator<Item = (Range<usize>, &Half<B>)> {
        let round = self.layout.round_blocks as usize;
        let rounds = (0..blocks).step_by(round).map(move |first| first..blocks.min(first + round));
        rounds.zip(self.halves.iter().cycle())
    }

    /// The memory through which a round goes.
    fn images(&self, half: &Half<B>, round: &Range<usize>) -> Buffer<B, u8> {
        let bytes = round.len() as u64 * self.layout.unit_bytes;
        half.images.slice(0, bytes).expect("a round is no longer than the memory")
    }

    /// Queues the copy of a round of blocks to a half ([`CopyDirection::Save`]), or from it ([`CopyDirection::Restore`]), in
    /// one launch.
    fn launch(
        &self,
        core: &Core<B>,
        half: &Half<B>,
        round: &Range<usize>,
        direction: CopyDirection,
    ) -> Result<(), KvError> {
        let state = &core.memory.state;
        let arena = StateArena {
            checkpoints: &half.images,
            number_of_checkpoints: self.layout.round_blocks,
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
        Ok(ops::copy_state(&self.kernels, &copies)?)
    }
}

/// What is queued in `stream` from now on waits for `event`, but for a mistake.
fn wait<B: Backend>(stream: &Stream<B>, event: &Event<B>, mistake: Mistake) -> Result<(), KvError> {
    if made(mistake) {
        return Ok(());
    }
    Ok(stream.wait_for(event)?)
}
