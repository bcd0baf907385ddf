//! Parts of requests to host memory.

use std::ops::Range;

use super::error::MoveError;
use super::parts::{PartLayout, Positions};
use super::port::Port;
use crate::device::{Backend, Stream};
use crate::ids::RequestId;
use crate::manager::KvCacheManager;
use crate::pool_kind::PoolUnit;

/// A request whose parts are copied. It borrows the cache, so that the request is where it is until all are.
pub struct Export<'c, B: Backend> {
    cache: &'c mut KvCacheManager<B>,
    stream: &'c Stream<B>,
    port: &'c mut Port<B>,
    id: RequestId,
    at: Positions,
}

impl<B: Backend> KvCacheManager<B> {
    /// Memory through which requests leave this cache and come to it. It is on the device: as much as a slot takes, or 8 MiB.
    ///
    /// # Errors
    /// [`KvError::Device`](crate::KvError::Device).
    pub fn open_port(&self) -> Result<Port<B>, MoveError> {
        let cache = self.core().read_ledger().id();
        Ok(Port::new(self.core(), cache)?)
    }

    /// How far a request is: what its parts follow from ([`super::PartLayout::parts`]).
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`](crate::KvError::UnknownRequest),
    /// [`KvError::ForeignRequest`](crate::KvError::ForeignRequest); [`KvError::Overwritten`](crate::KvError::Overwritten)
    /// for one that cannot go on.
    pub fn positions(&mut self, id: RequestId) -> Result<Positions, MoveError> {
        self.reject_leaked_steps();
        Ok(self.core().ledger().positions(id)?)
    }

    /// A request, to copy its parts: it takes no step meanwhile, so that all of them are of one position. Waits for the steps
    /// before.
    ///
    /// # Errors
    /// [`MoveError::ForeignPort`]; [`MoveError::Cache`] as of [`Self::positions`], and for a stream of another device.
    pub fn export<'c>(
        &'c mut self,
        stream: &'c Stream<B>,
        port: &'c mut Port<B>,
        id: RequestId,
    ) -> Result<Export<'c, B>, MoveError> {
        self.core().check_stream(stream)?;
        self.check_port(port)?;
        let at = self.positions(id)?;
        Ok(Export { cache: self, stream, port, id, at })
    }

    pub(super) fn check_port(&self, port: &Port<B>) -> Result<(), MoveError> {
        let is_own = port.cache == self.core().read_ledger().id();
        if is_own { Ok(()) } else { Err(MoveError::ForeignPort) }
    }
}

impl<B: Backend> Export<'_, B> {
    /// Which request.
    #[must_use]
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// How far it is.
    #[must_use]
    pub fn positions(&self) -> Positions {
        self.at
    }

    /// Which parts the requests of its cache have.
    #[must_use]
    pub fn layout(&self) -> &PartLayout {
        &self.port.layout
    }

    /// Copies blocks of the request, counted from its first, to `into`: each is a part of
    /// [`PartLayout::block_bytes`] bytes. Those that are full ([`PartLayout::full_blocks`]) do not change any more, so that
    /// those of a long prompt can go while the rest of it is computed. Of the last one that is not full, rows that no
    /// final token has closed are zero.
    ///
    /// # Errors
    /// [`MoveError::NoSuchBlock`], [`MoveError::Length`], [`MoveError::Cache`] if the device fails. The request is as it
    /// was.
    pub fn blocks(&mut self, blocks: Range<u32>, into: &mut [u8]) -> Result<(), MoveError> {
        let Self { cache, stream, port, id, at } = self;
        let held = port.layout.blocks(at.trunk);
        if blocks.end > held || blocks.start > blocks.end {
            let block = blocks.end.max(1) - 1;
            return Err(MoveError::NoSuchBlock { request: *id, block, blocks: held });
        }
        let bytes = port.layout.block_bytes();
        check_length(blocks.len() as u64 * bytes, into)?;
        let table = cache.block_table(*id)?;
        let units: Vec<_> = table.iter().map(|block| block.0).collect();
        cache.transfer(stream, &[], None).map_err(crate::KvError::from)?;
        let units = &units[blocks.start as usize..blocks.end as usize];
        port.fetch(cache.core(), stream, (PoolUnit::Block, units), into)?;
        for (block, image) in blocks.zip(into.chunks_mut(bytes.max(1) as usize)) {
            port.rows.clear_behind(port.layout.block(block, at.trunk).entries, image, 0);
        }
        Ok(())
    }

    /// Copies what the slot of the request holds to `into`: the parts of [`PartLayout::state`], one behind the other. Rows
    /// are in order of position, and there are only those that the request needs to go on.
    ///
    /// # Errors
    /// As [`Self::blocks`].
    pub fn state(&mut self, into: &mut [u8]) -> Result<(), MoveError> {
        let Self { cache, stream, port, id, at } = self;
        check_length(port.layout.state(*at).map(|part| part.bytes).sum(), into)?;
        cache.transfer(stream, &[], None).map_err(crate::KvError::from)?;
        let mut slot = vec![0; port.slot_bytes()];
        let units = [id.slot().0];
        port.fetch(cache.core(), stream, (PoolUnit::Slot, &units), &mut slot)?;
        let mut rest = into;
        for part in port.layout.state(*at) {
            let bytes = rest.split_off_mut(..part.bytes as usize).expect("they were counted");
            port.rows.take(&part, &slot, bytes);
        }
        Ok(())
    }

    /// Copies all of the request to `into`: its blocks, then its state.
    ///
    /// # Errors
    /// As [`Self::blocks`].
    pub fn all(&mut self, into: &mut [u8]) -> Result<(), MoveError> {
        let layout = &self.port.layout;
        check_length(layout.bytes(self.at), into)?;
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

pub(super) fn check_length(needed: u64, memory: &[u8]) -> Result<(), MoveError> {
    let found = memory.len() as u64;
    if needed == found { Ok(()) } else { Err(MoveError::Length { needed, found }) }
}
