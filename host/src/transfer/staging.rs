//! Device staging memory for the parts of requests that move.

use super::error::MoveError;
use super::memory::{Parts, PartsMut, part};
use super::parts::PartLayout;
use super::rows::Rows;
use crate::config::CacheConfig;
use crate::device::{Backend, Buffer, Staged, Stream};
use crate::error::KvError;
use crate::ids::{BlockId, CacheId};
use crate::manager::core::Core;
use crate::memory::state_layout::unit_image_bytes;
use crate::ops::{self, BlockCopy, CopyArena, CopyDirection, JOB, StateCopies};
use crate::pool_kind::PoolUnit;
use crate::schema::Schema;
use std::fmt;

/// Most bytes of blocks that are copied at a time.
const STAGING: u64 = 8 << 20;

/// Device staging memory for exports from and imports to one cache, one transfer at a time.
pub struct TransferStaging<B: Backend> {
    pub(super) cache: CacheId,
    pub(super) layout: PartLayout,
    pub(super) rows: Rows,
    /// Bytes of the image of a slot.
    slot_bytes: u64,
    /// Blocks that are copied at a time.
    blocks: u32,
    /// The images of `blocks` blocks, or of a slot.
    images: Buffer<B, u8>,
    /// `[blocks, 4]`: the copies between units and their images.
    jobs: Staged<B, i32>,
}

impl<B: Backend> fmt::Debug for TransferStaging<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransferStaging").field("blocks", &self.blocks).finish_non_exhaustive()
    }
}

/// Number of blocks that are copied at a time, and bytes of staging memory for them or for a slot. The number is at
/// most a quarter of the longest request's blocks, so that a long request takes several rounds in a small cache too, as
/// it does in a large one.
fn staging(config: &CacheConfig, layout: &PartLayout, slot_bytes: u64) -> (u32, u64) {
    let most = STAGING.checked_div(layout.block_bytes()).unwrap_or(1);
    let quarter = config.max_blocks_per_request().div_ceil(4).max(1);
    let blocks = most.clamp(1, quarter.into()) as u32;
    (blocks, slot_bytes.max(u64::from(blocks) * layout.block_bytes()))
}

/// Bytes of device memory that the [`TransferStaging`] of a cache with this configuration takes.
#[must_use]
pub fn transfer_staging_bytes(config: &CacheConfig) -> u64 {
    let slot_bytes = unit_image_bytes(&Schema::new(config), PoolUnit::Slot);
    let (blocks, bytes) = staging(config, &PartLayout::new(config), slot_bytes);
    bytes + u64::from(blocks) * (JOB * size_of::<i32>()) as u64
}

impl<B: Backend> TransferStaging<B> {
    pub(super) fn new(core: &Core<B>, cache: CacheId) -> Result<Self, KvError> {
        let Core { device, schema, config, .. } = core;
        let layout = PartLayout::new(config);
        let slot_bytes = unit_image_bytes(schema, PoolUnit::Slot);
        let (blocks, bytes) = staging(config, &layout, slot_bytes);
        Ok(Self {
            cache,
            rows: Rows::new(schema),
            slot_bytes,
            blocks,
            images: device.allocate("parts of requests that move", bytes)?,
            jobs: Staged::new(device, "jobs of requests that move", blocks as usize * JOB, 2)?,
            layout,
        })
    }

    /// The layout of the parts of requests of its cache.
    #[must_use]
    pub fn layout(&self) -> &PartLayout {
        &self.layout
    }

    /// Bytes of the image of a slot.
    pub(super) fn slot_bytes(&self) -> usize {
        self.slot_bytes as usize
    }

    /// The first `bytes` bytes of the staging memory, for a slot or for blocks that are copied at a time.
    pub(super) fn images(&self, bytes: usize) -> Buffer<B, u8> {
        part(&self.images, 0..bytes)
    }

    /// Copies the images of units to `into`. Waits for the copy if `into` is host memory.
    pub(super) fn fetch(
        &mut self,
        core: &Core<B>,
        stream: &Stream<B>,
        (unit, units): (PoolUnit, &[u32]),
        mut into: PartsMut<'_, B>,
    ) -> Result<(), MoveError> {
        let (round, bytes) = self.round(unit);
        let (buffer, mut at) = (self.images.clone(), 0);
        for units in units.chunks(round) {
            let images = at..at + units.len() * bytes;
            at = images.end;
            match into.part(images) {
                PartsMut::Host(into) => {
                    self.copy(core, stream, (unit, units), (CopyDirection::Pack, &buffer))?;
                    stream.download(&buffer.view(), 0, into)?;
                }
                PartsMut::Device(into) => {
                    self.copy(core, stream, (unit, units), (CopyDirection::Pack, &into))?;
                }
            }
        }
        Ok(())
    }

    /// Fills a block's image with `byte`, except for the rows that the first `tokens` tokens of the block have closed.
    pub(super) fn fill_holes(
        &self,
        stream: &Stream<B>,
        (tokens, byte): (u32, u8),
        image: PartsMut<'_, B>,
    ) -> Result<(), MoveError> {
        let mut holes = self.rows.holes(tokens, image.bytes() as usize).into_iter();
        match image {
            PartsMut::Host(image) => holes.for_each(|hole| image[hole].fill(byte)),
            PartsMut::Device(image) => {
                holes.try_for_each(|hole| stream.fill(&part(&image, hole), byte))?;
            }
        }
        Ok(())
    }

    /// Copies the images in `from` to units. Waits until the images are read if they are in host memory.
    pub(super) fn store(
        &mut self,
        core: &Core<B>,
        stream: &Stream<B>,
        (unit, units): (PoolUnit, &[u32]),
        from: Parts<'_, B>,
    ) -> Result<(), MoveError> {
        let (round, bytes) = self.round(unit);
        let (buffer, mut at) = (self.images.clone(), 0);
        for units in units.chunks(round) {
            let images = at..at + units.len() * bytes;
            at = images.end;
            let from = match from.part(images) {
                Parts::Host(from) => {
                    stream.upload(from, &buffer, 0)?;
                    buffer.clone()
                }
                Parts::Device(from) => from,
            };
            self.copy(core, stream, (unit, units), (CopyDirection::Unpack, &from))?;
        }
        Ok(())
    }

    /// Number of units that are copied at a time, and bytes of the image of one.
    fn round(&self, unit: PoolUnit) -> (usize, usize) {
        match unit {
            PoolUnit::Slot => (1, self.slot_bytes()),
            PoolUnit::Block => (self.blocks as usize, self.layout.block_bytes() as usize),
        }
    }

    /// Queues one launch that copies between units and `images`, which lie one after the other in device memory.
    fn copy(
        &mut self,
        core: &Core<B>,
        stream: &Stream<B>,
        (unit, units): (PoolUnit, &[u32]),
        (direction, images): (CopyDirection, &Buffer<B, u8>),
    ) -> Result<(), KvError> {
        self.jobs.update(stream, |array| {
            let jobs = array.as_chunks_mut::<JOB>().0.iter_mut().zip(units).zip(0..);
            for ((words, &from), to) in jobs {
                *words = BlockCopy { from: BlockId(from), to: BlockId(to) }.words();
            }
            Ok::<_, KvError>((JOB * units.len(), ()))
        })?;
        let state = &core.memory.state;
        let (arena, pieces, image_bytes) = match unit {
            PoolUnit::Slot => (state.arena(), state.slot_pieces(), self.slot_bytes),
            PoolUnit::Block => {
                (state.block_arena(), state.block_pieces(), self.layout.block_bytes())
            }
        };
        let arena =
            CopyArena { images, number_of_images: units.len() as u32, image_bytes, ..arena };
        let jobs = self.jobs.buffer().view().slice(0, (JOB * units.len()) as u64);
        let copies = StateCopies {
            arena: &arena,
            pieces,
            jobs: &jobs.expect("a job for each unit was sent"),
            count: units.len() as u32,
            direction,
            faults: core.memory.copy_faults(),
        };
        Ok(ops::copy_state(stream, &copies)?)
    }
}
