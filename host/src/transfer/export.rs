//! Exports: copies of the parts of requests to host or device memory.

use std::ops::Range;

use super::error::MoveError;
use super::memory::{PartsMut, check_length, part};
use super::parts::{PartLayout, Positions};
use super::staging::TransferStaging;
use crate::device::{Backend, Stream};
use crate::ids::RequestId;
use crate::manager::KvCacheManager;
use crate::pool_kind::PoolUnit;

/// A request whose parts are being copied. It borrows the cache, so that the request takes no step before
/// all parts are copied.
pub struct Export<'c, B: Backend> {
    cache: &'c mut KvCacheManager<B>,
    stream: &'c Stream<B>,
    staging: &'c mut TransferStaging<B>,
    id: RequestId,
    at: Positions,
}

impl<B: Backend> KvCacheManager<B> {
    /// Allocates staging memory on the device, for exports and imports of requests: as much as a slot takes, or up to 8
    /// MiB for blocks.
    ///
    /// # Errors
    /// [`KvError::Device`](crate::KvError::Device).
    pub fn new_transfer_staging(&self) -> Result<TransferStaging<B>, MoveError> {
        let cache = self.core().read_ledger().id();
        Ok(TransferStaging::new(self.core(), cache)?)
    }

    /// Final tokens of a request in each layer group, which determine its parts ([`super::PartLayout::parts`]).
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`](crate::KvError::UnknownRequest),
    /// [`KvError::ForeignRequest`](crate::KvError::ForeignRequest);
    /// [`KvError::Overwritten`](crate::KvError::Overwritten) for a request that cannot continue.
    pub fn positions(&mut self, id: RequestId) -> Result<Positions, MoveError> {
        self.reject_leaked_steps();
        Ok(self.core().read_ledger().positions(id)?)
    }

    /// Begins the export of a request. The request takes no step meanwhile, so that all its parts are of one position.
    /// Copies are queued after the earlier steps; this call waits for nothing.
    ///
    /// # Errors
    /// [`MoveError::ForeignStaging`]; [`MoveError::Cache`] as of [`Self::positions`], and for a stream of another
    /// device.
    pub fn export<'c>(
        &'c mut self,
        stream: &'c Stream<B>,
        staging: &'c mut TransferStaging<B>,
        id: RequestId,
    ) -> Result<Export<'c, B>, MoveError> {
        self.core().check_stream(stream)?;
        self.check_staging(staging)?;
        let at = self.positions(id)?;
        Ok(Export { cache: self, stream, staging, id, at })
    }

    pub(super) fn check_staging(&self, staging: &TransferStaging<B>) -> Result<(), MoveError> {
        let is_own = staging.cache == self.core().read_ledger().id();
        if is_own { Ok(()) } else { Err(MoveError::ForeignStaging) }
    }
}

impl<B: Backend> Export<'_, B> {
    /// The device of its cache.
    #[must_use]
    pub fn device(&self) -> &crate::device::Device<B> {
        self.cache.device()
    }

    /// Id of the request.
    #[must_use]
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Final tokens of the request in each layer group.
    #[must_use]
    pub fn positions(&self) -> Positions {
        self.at
    }

    /// The layout of the parts of requests of its cache.
    #[must_use]
    pub fn layout(&self) -> &PartLayout {
        &self.staging.layout
    }

    /// Copies blocks of the request, counted from its first, to `into`: each is a part of [`PartLayout::block_bytes`]
    /// bytes. Full blocks ([`PartLayout::full_blocks`]) do not change any more, so that those of a long prompt can be
    /// copied while the rest of it is computed. In a last block that is not full, rows that no final token has closed
    /// are zero.
    ///
    /// # Errors
    /// [`MoveError::NoSuchBlock`], [`MoveError::Backward`], [`MoveError::Length`], [`MoveError::Cache`] if the device
    /// fails. The request is unchanged.
    pub fn blocks(&mut self, blocks: Range<u32>, into: &mut [u8]) -> Result<(), MoveError> {
        self.blocks_to(blocks, PartsMut::Host(into))
    }

    /// As [`Self::blocks`], to memory of either kind. Waits until the copies are done.
    ///
    /// # Errors
    /// As [`Self::blocks`].
    pub fn blocks_to(
        &mut self,
        blocks: Range<u32>,
        mut into: PartsMut<'_, B>,
    ) -> Result<(), MoveError> {
        let Self { cache, stream, staging, id, at } = self;
        let (request, held) = (*id, staging.layout.blocks(at.trunk));
        let Range { start: first, end } = blocks;
        if first > end {
            return Err(MoveError::Backward { request, first, end });
        }
        if end > held {
            return Err(MoveError::NoSuchBlock { request, block: end - 1, blocks: held });
        }
        let bytes = staging.layout.block_bytes();
        check_length(blocks.len() as u64 * bytes, into.bytes())?;
        let table = cache.block_table(*id)?;
        let units: Vec<_> = table.iter().map(|block| block.0).collect();
        let _running = stream.running("moving a request or a prefix")?;
        cache.follow_steps(stream)?;
        let units = &units[blocks.start as usize..blocks.end as usize];
        let whole = into.part(0..units.len() * bytes as usize);
        let mut copied = staging.fetch(cache.core(), stream, (PoolUnit::Block, units), whole);
        for (image, block) in blocks.enumerate() {
            let (bytes, tokens) = (bytes as usize, staging.layout.block(block, at.trunk).entries);
            let image = into.part(image * bytes..(image + 1) * bytes);
            copied = copied.and_then(|()| staging.fill_holes(stream, (tokens, 0), image));
        }
        into.settle(stream, copied)
    }

    /// Copies the contents of the request's slot to `into`: the parts of [`PartLayout::state`], one after the other.
    /// Rows are in order of position, and only those that the request needs to continue are copied.
    ///
    /// # Errors
    /// As [`Self::blocks`].
    pub fn state(&mut self, into: &mut [u8]) -> Result<(), MoveError> {
        self.state_to(PartsMut::Host(into))
    }

    /// As [`Self::state`], to memory of either kind. Waits until the copies are done.
    ///
    /// # Errors
    /// As [`Self::blocks`].
    pub fn state_to(&mut self, mut into: PartsMut<'_, B>) -> Result<(), MoveError> {
        check_length(
            self.staging.layout.state(self.at).map(|part| part.bytes).sum(),
            into.bytes(),
        )?;
        let bytes = into.bytes() as usize;
        let copied = self.queue_state(into.part(0..bytes));
        into.settle(self.stream, copied)
    }

    /// Queues the copies of [`Self::state_to`].
    fn queue_state(&mut self, into: PartsMut<'_, B>) -> Result<(), MoveError> {
        let Self { cache, stream, staging, id, at } = self;
        let _running = stream.running("moving a request or a prefix")?;
        cache.follow_steps(stream)?;
        let units = [id.slot().0];
        let parts: Vec<_> = staging.layout.state(*at).collect();
        match into {
            PartsMut::Host(mut rest) => {
                let mut slot = vec![0; staging.slot_bytes()];
                let whole = PartsMut::Host(&mut slot);
                staging.fetch(cache.core(), stream, (PoolUnit::Slot, &units), whole)?;
                for part in parts {
                    let bytes =
                        rest.split_off_mut(..part.bytes as usize).expect("they were counted");
                    staging.rows.take(&part, &slot, bytes);
                }
                Ok(())
            }
            PartsMut::Device(into) => {
                let slot = staging.images(staging.slot_bytes());
                let whole = PartsMut::Device(slot.clone());
                staging.fetch(cache.core(), stream, (PoolUnit::Slot, &units), whole)?;
                let mut at = 0;
                for from in parts.iter().flat_map(|part| staging.rows.runs(part)) {
                    let to = part(&into, at..at + from.len());
                    at += from.len();
                    stream.copy(&part(&slot, from).view(), &to)?;
                }
                Ok(())
            }
        }
    }

    /// Copies all of the request to `into`: its blocks, then its state.
    ///
    /// # Errors
    /// As [`Self::blocks`].
    pub fn all(&mut self, into: &mut [u8]) -> Result<(), MoveError> {
        let layout = &self.staging.layout;
        check_length(layout.bytes(self.at), into.len() as u64)?;
        let blocks = layout.blocks(self.at.trunk);
        let (of_blocks, of_state) =
            into.split_at_mut((u64::from(blocks) * layout.block_bytes()) as usize);
        self.blocks(0..blocks, of_blocks)?;
        self.state(of_state)
    }
}

impl<B: Backend> std::fmt::Debug for Export<'_, B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Export").field("id", &self.id).field("at", &self.at).finish_non_exhaustive()
    }
}
