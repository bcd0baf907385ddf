//! Parts of requests to host memory.

use std::ops::Range;

use super::error::MoveError;
use super::parts::Positions;
use super::port::Port;
use crate::device::{Backend, Stream};
use crate::ids::RequestId;
use crate::manager::KvCacheManager;
use crate::pool_kind::PoolUnit;

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

    /// Copies blocks of a request, counted from its first, to `into`: each is a part of
    /// [`PartLayout::block_bytes`](super::PartLayout::block_bytes) bytes. Between steps, and as soon as blocks are full,
    /// so that those of a long prompt go while the rest of it is computed: a full block does not change any more. Of the
    /// last one that is not full, rows that no final token has closed are zero. Waits for the steps before.
    ///
    /// # Errors
    /// [`MoveError::ForeignPort`], [`MoveError::NoSuchBlock`], [`MoveError::Length`]; [`MoveError::Cache`] as of
    /// [`Self::positions`], and if the device fails. The request is as it was.
    pub fn export_blocks(
        &mut self,
        stream: &Stream<B>,
        port: &mut Port<B>,
        (id, blocks): (RequestId, Range<u32>),
        into: &mut [u8],
    ) -> Result<(), MoveError> {
        let at = self.check_export(stream, port, id)?;
        let held = port.layout.blocks(at.trunk);
        if blocks.end > held || blocks.start > blocks.end {
            return Err(MoveError::NoSuchBlock {
                request: id,
                block: blocks.end.max(1) - 1,
                blocks: held,
            });
        }
        let bytes = port.layout.block_bytes();
        check_length(blocks.len() as u64 * bytes, into)?;
        let table = self.block_table(id)?;
        let units: Vec<_> = table.iter().map(|block| block.0).collect();
        self.transfer(stream, &[], None).map_err(crate::KvError::from)?;
        let units = &units[blocks.start as usize..blocks.end as usize];
        port.fetch(self.core(), stream, (PoolUnit::Block, units), into)?;
        for (block, image) in blocks.zip(into.chunks_mut(bytes.max(1) as usize)) {
            port.rows.clear_behind(port.layout.block(block, at.trunk).entries, image, 0);
        }
        Ok(())
    }

    /// Copies what the slot of a request holds to `into`: the parts of
    /// [`PartLayout::state`](super::PartLayout::state), one behind the other. Rows are in order of position, and there are
    /// only those that the request needs to go on. Waits for the steps before.
    ///
    /// # Errors
    /// As [`Self::export_blocks`].
    pub fn export_state(
        &mut self,
        stream: &Stream<B>,
        port: &mut Port<B>,
        id: RequestId,
        into: &mut [u8],
    ) -> Result<(), MoveError> {
        let at = self.check_export(stream, port, id)?;
        check_length(port.layout.state(at).map(|part| part.bytes).sum(), into)?;
        self.transfer(stream, &[], None).map_err(crate::KvError::from)?;
        let mut slot = vec![0; port.slot_bytes()];
        let units = [id.slot().0];
        port.fetch(self.core(), stream, (PoolUnit::Slot, &units), &mut slot)?;
        let mut rest = into;
        for part in port.layout.state(at) {
            let bytes = rest.split_off_mut(..part.bytes as usize).expect("they were counted");
            port.rows.take(&part, &slot, bytes);
        }
        Ok(())
    }

    fn check_export(
        &mut self,
        stream: &Stream<B>,
        port: &Port<B>,
        id: RequestId,
    ) -> Result<Positions, MoveError> {
        self.core().check_stream(stream)?;
        self.check_port(port)?;
        self.positions(id)
    }

    pub(super) fn check_port(&self, port: &Port<B>) -> Result<(), MoveError> {
        let is_own = port.cache == self.core().read_ledger().id();
        if is_own { Ok(()) } else { Err(MoveError::ForeignPort) }
    }
}

pub(super) fn check_length(needed: u64, memory: &[u8]) -> Result<(), MoveError> {
    let found = memory.len() as u64;
    if needed == found { Ok(()) } else { Err(MoveError::Length { needed, found }) }
}
