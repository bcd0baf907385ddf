//! Memory for payloads: from the pool or the storage before the first read, and back to the pool or to quarantine after
//! the last one.

use std::ops::Range;

use super::error::TransferError;
use super::memory::Share;
use super::quarantine::Quarantined;
use super::reading::{Memory, Reading};
use super::receiver::Receiver;
use crate::image::{Section, places};
use crate::mistake::{Mistake, made};
use crate::transport::{Region, Registered, Transport, TransportError};

/// Bytes that an empty payload takes. It takes a mapping too: counting bytes for it bounds the number of mappings.
pub(super) const EMPTY_BYTES: u64 = 64 << 10;

impl<T: Transport> Receiver<T> {
    /// Memory of at least `needed` bytes, from the pool if possible.
    pub(super) fn take_memory(&mut self, needed: u64) -> Result<(Share, Region), TransferError> {
        let needed = if needed == 0 { EMPTY_BYTES } else { needed };
        if let Some(region) = self.pool.take(self.storage.kind(), needed)
            && let Some(share) = self.budget.take(region.len() as u64)
        {
            return Ok((share, region));
        }
        let share = self.take_share(needed)?;
        self.pool.trim(self.budget.left());
        let region = self.storage.region(needed as usize).or_else(|_| {
            self.pool.trim(0);
            self.storage.region(needed as usize)
        })?;
        Ok((share, region))
    }

    fn take_share(&mut self, needed: u64) -> Result<Share, TransferError> {
        if let Some(share) = self.budget.take(needed) {
            return Ok(share);
        }
        if self.quarantine.none_ends_by_itself() {
            self.clear_quarantine()?;
        }
        let (taken, budget) = (self.budget.taken(), self.budget.most);
        let quarantined = self.quarantined_bytes();
        let none = TransferError::NoMemory { needed, taken, quarantined, budget };
        self.budget.take(needed).ok_or(none)
    }

    /// Overwrites part of the memory into which `bytes` of a payload are about to be read. It may have these very bytes
    /// already: of an earlier payload with the same first blocks, or zeros where the payload has zeros. If the transport
    /// then reports the end of the read too early, the digests match, and the memory would be used again while bytes
    /// still arrive.
    pub(super) fn scrub(
        &mut self,
        memory: &mut Registered,
        bytes: Range<usize>,
        sections: &[Section],
    ) -> Result<(), TransportError> {
        if made(Mistake::LeftoversStay) {
            return Ok(());
        }
        let places: Vec<_> = places(sections, 0).collect();
        self.transport.with_region(memory, |mut region| region.scrub(bytes, &places))?
    }

    /// Gives memory back for the next payload. Every read into it has ended, as the transport reports and the digests
    /// do not contradict.
    pub(super) fn release(&mut self, memory: Registered, share: Share) {
        match self.transport.deregister(memory) {
            Ok(region) => self.pool.put(region),
            Err(_) => self.quarantine.keep(share),
        }
    }

    /// Gives the memory of a transfer back that has ended without being verified, or quarantines it.
    pub(super) fn let_go(&mut self, mut reading: Reading) {
        let whole = reading.whole_after_read();
        let Reading { memory, share, began, done, .. } = reading;
        match memory {
            Memory::Out(_) => {}
            Memory::Idle(memory) => self.give_back(memory, share, done),
            Memory::Read { read, .. } => {
                self.shut_in(Quarantined { read, share, began, failed: false, whole });
            }
        }
    }

    /// Gives memory back of whose payload `read` bytes were read and not compared with digests. If there are any, the
    /// transport may have reported the end of their read too early, and the memory is quarantined.
    pub(super) fn give_back(&mut self, memory: Registered, share: Share, read: usize) {
        if read == 0 || made(Mistake::UncomparedReused) {
            self.release(memory, share);
        } else {
            self.quarantine.keep(share);
        }
    }
}
