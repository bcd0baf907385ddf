//! The copies of one direction between the device and host memory: their streams, and the staging memory for blocks.
//!
//! A kernel packs a round of blocks into one half of that memory while the round before is copied from the other half,
//! and unpacks likewise in the other direction. So copies follow each other without a gap, and each kernel uses the
//! device only briefly.

use std::ops::Range;
use std::sync::Arc;

use super::layout::TierLayout;
use super::mistake::{Mistake, made};
use crate::device::{Backend, Buffer, Device, Event, HostCopies, HostUnit, Staged, Stream};
use crate::error::KvError;
use crate::ids::BlockId;
use crate::manager::core::Core;
use crate::ops::{self, BlockCopy, CopyArena, CopyDirection, JOB, StateCopies};

/// The streams and the staging memory of one direction.
pub(super) struct CopyStreams<B: Backend> {
    /// Copies between host memory and the halves, and of checkpoints.
    pub copies: Stream<B>,
    /// Kernels that copy between blocks and the halves. Steps come first: their streams have a higher priority.
    pub kernels: Stream<B>,
    layout: TierLayout,
    halves: [Half<B>; 2],
    /// `[blocks, 4]`: the copies of blocks to and from their places in the staging memory.
    jobs: Staged<B, i32>,
    /// Recorded in a stream whose work the transfers wait for.
    before: Event<B>,
}

/// Memory of one round.
struct Half<B: Backend> {
    /// `[round_blocks, unit_bytes]`: images of blocks.
    images: Buffer<B, u8>,
    /// Recorded after the last kernel that wrote or read the images.
    after_kernel: Event<B>,
    /// Recorded after the last copy from or to host memory.
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
            jobs: Staged::new(device, "jobs of the host tier", layout.jobs() as usize, 2)?,
            before: device.event()?,
        })
    }

    /// Makes later work of both streams wait, on the device, for the work queued in `stream`.
    pub fn follow(&self, stream: &Stream<B>) -> Result<(), KvError> {
        stream.record(&self.before)?;
        self.kernels.wait_for(&self.before)?;
        Ok(self.copies.wait_for(&self.before)?)
    }

    /// Queues the copies of `blocks` to the first of the units, in order, and takes those units out. Call it when no
    /// transfer of this direction is in flight; else the host waits for that transfer. On an error the units that were
    /// not yet taken stay in `units`.
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
            self.launch(core, half, &round, CopyDirection::Pack)?;
            self.kernels.record(&half.after_kernel)?;
            wait(&self.copies, &half.after_kernel, Mistake::CopiedTooEarly)?;
            let units = units.drain(..round.len()).collect();
            copies.store(&self.images(half, &round).view(), units)?;
            self.copies.record(&half.after_copy)?;
        }
        Ok(())
    }

    /// Queues the copies of the units to `blocks`, in order. Call it when no transfer of this direction is in flight;
    /// else the host waits for that transfer.
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
            self.launch(core, half, &round, CopyDirection::Unpack)?;
            self.kernels.record(&half.after_kernel)?;
        }
        // The transfer ends with the stream of the copies, which therefore waits for the last kernels.
        let mut halves = self.halves.iter();
        halves.try_for_each(|half| wait(&self.copies, &half.after_kernel, Mistake::EndedTooEarly))
    }

    /// Sends the jobs of the copies of `blocks` to the device, in order.
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

    /// The rounds of a transfer of `blocks` blocks, and the half that each uses, in turn.
    fn rounds(&self, blocks: usize) -> impl Iterator<Item = (Range<usize>, &Half<B>)> {
        let round = self.layout.round_blocks as usize;
        let rounds = (0..blocks).step_by(round).map(move |first| first..blocks.min(first + round));
        rounds.zip(self.halves.iter().cycle())
    }

    /// The part of a half that a round uses.
    fn images(&self, half: &Half<B>, round: &Range<usize>) -> Buffer<B, u8> {
        let bytes = round.len() as u64 * self.layout.unit_bytes;
        half.images.slice(0, bytes).expect("a round is no longer than the memory")
    }

    /// Queues the copy of a round of blocks to a half ([`CopyDirection::Pack`]), or from it
    /// ([`CopyDirection::Unpack`]), in one launch.
    fn launch(
        &self,
        core: &Core<B>,
        half: &Half<B>,
        round: &Range<usize>,
        direction: CopyDirection,
    ) -> Result<(), KvError> {
        let state = &core.memory.state;
        let arena = CopyArena {
            images: &half.images,
            number_of_images: self.layout.round_blocks,
            image_bytes: self.layout.unit_bytes,
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

/// Makes later work of `stream` wait for `event`, unless a test makes `mistake`.
fn wait<B: Backend>(stream: &Stream<B>, event: &Event<B>, mistake: Mistake) -> Result<(), KvError> {
    if made(mistake) {
        return Ok(());
    }
    Ok(stream.wait_for(event)?)
}
