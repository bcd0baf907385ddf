//! The fence: the transport is closed, after which no read writes any memory, and opened again.
//!
//! A failed read may write for as long as a running one: only closing the transport stops it. So the second deadline
//! applies to both. After it, no read begins until the reads that are still needed have ended, each by its own first
//! deadline at the latest. Then the transport is closed and opened again, and the other reads begin. Bytes that have
//! arrived stay: their memory is taken from the old transport and given to the new one.

use std::time::Duration;

use super::error::TransferError;
use super::memory::Share;
use super::quarantine::Quarantined;
use super::reading::{Memory, Reading, Whole};
use super::receiver::Receiver;
use super::verified::verify;
use crate::mistake::{Mistake, made};
use crate::transport::{Polled, RegionMut, Registered, Transport};

impl<T: Transport> Receiver<T> {
    /// Quarantines the memory of a read that is no longer needed, and that may go on.
    pub(super) fn shut_in(&mut self, memory: Quarantined) {
        if made(Mistake::NoQuarantine) {
            self.release(memory.read.taken_for_ended(), memory.share);
            return;
        }
        self.quarantine.add(memory);
    }

    /// Frees the memory of quarantined reads that have ended with the right bytes. Fences the transport when other
    /// memory has reached the second deadline.
    pub(super) fn poll_quarantine(&mut self) {
        if let Some(is_due) = self.quarantine.is_to_be_made_again() {
            if is_due && !made(Mistake::FenceOnce) {
                // Until the transport is open again, new reads fail with the reason.
                let _ = self.fence();
            }
            return;
        }
        self.free_what_ended();
        if self.quarantine.drain(self.deadlines.fence) && self.can_fence() {
            // As above, on an error.
            let _ = self.fence();
        }
    }

    fn free_what_ended(&mut self) {
        for quarantined in self.quarantine.take_reads() {
            if quarantined.failed {
                self.quarantine.add(quarantined);
                continue;
            }
            match self.transport.poll(quarantined.read) {
                Polled::Done(memory) => {
                    self.stats.ended_late += 1;
                    let Quarantined { share, began, whole, .. } = quarantined;
                    self.compare_late(memory, (share, began), whole);
                }
                Polled::Failed(read, _) => {
                    self.quarantine.add(Quarantined { read, failed: true, ..quarantined });
                }
                Polled::Pending(read) => {
                    self.quarantine.add(Quarantined { read, ..quarantined });
                }
            }
        }
    }

    /// Frees the memory of a quarantined read that has ended, if all its bytes are right. Else the transport may have
    /// reported the end too early, and the memory stays until the fence.
    fn compare_late(
        &mut self,
        mut memory: Registered,
        (share, began): (Share, Duration),
        whole: Option<Whole>,
    ) {
        let is_right = whole.is_some_and(|Whole { manifest, digests }| {
            let compare = |region: RegionMut<'_>| verify(&manifest, &region, digests);
            matches!(self.transport.with_region(&mut memory, compare), Ok(Ok(())))
        });
        if is_right || made(Mistake::UncomparedReused) {
            self.release(memory, share);
        } else {
            self.quarantine.keep_since(share, began);
        }
    }

    /// Whether no read under way is still needed.
    fn can_fence(&self) -> bool {
        let goes_on = |reading: &Reading| matches!(reading.memory, Memory::Read { .. });
        !self.reading.iter().any(goes_on) || made(Mistake::FenceWithoutDraining)
    }

    /// Fences the transport now, to free what is quarantined, unless a read that is still needed is under way. Returns
    /// whether nothing is quarantined now. [`Self::poll`] does the same at the second deadline.
    ///
    /// # Errors
    /// [`TransferError::NoTransport`] if the transport could not be reopened; the memory counts as taken until it is.
    pub fn clear_quarantine(&mut self) -> Result<bool, TransferError> {
        let is_needed = !self.quarantine.is_empty() || self.quarantine.check_transport().is_err();
        if is_needed && self.can_fence() {
            self.fence()?;
        }
        Ok(self.quarantine.is_empty())
    }

    /// Closes the transport, and with it every read, and opens it again. Requests without a read under way keep their
    /// bytes.
    fn fence(&mut self) -> Result<(), TransferError> {
        for reading in std::mem::take(&mut self.reading) {
            self.take_out(reading);
        }
        let fenced = self.transport.fence();
        let waiting = std::mem::take(&mut self.reading);
        if let Err(error) = fenced {
            self.stats.failed_fences += 1;
            let lost = self.quarantine.lose_transport(&error);
            for Reading { id, memory, share, done, .. } in waiting {
                // Memory that nothing was read into is free now; other reads may still go on.
                if let Memory::Out(region) = memory
                    && done > 0
                {
                    self.quarantine.keep_out(share, region);
                }
                self.ended.push((id, Err(lost.error())));
            }
            return Err(lost.error());
        }
        self.stats.fences += 1;
        self.quarantine.clear();
        waiting.into_iter().for_each(|reading| self.put_back(reading));
        Ok(())
    }

    /// Takes the memory of a request out of the transport before the transport is closed, if no read writes that
    /// memory.
    fn take_out(&mut self, reading: Reading) {
        let Reading { memory: Memory::Idle(memory), .. } = reading else {
            self.reading.push(reading);
            return;
        };
        match self.transport.deregister(memory) {
            Ok(region) => self.reading.push(Reading { memory: Memory::Out(region), ..reading }),
            Err(error) => {
                self.quarantine.keep(reading.share);
                self.ended.push((reading.id, Err(error.into())));
            }
        }
    }

    /// Registers the memory of a request with the reopened transport.
    fn put_back(&mut self, reading: Reading) {
        let Reading { memory: Memory::Out(region), .. } = reading else {
            self.reading.push(reading);
            return;
        };
        match self.transport.register(region) {
            Ok(memory) => self.reading.push(Reading { memory: Memory::Idle(memory), ..reading }),
            Err(error) => self.ended.push((reading.id, Err(error.into()))),
        }
    }

    /// Bytes in quarantine: memory that a read may still write, that has wrong bytes or bytes that were not compared
    /// with digests, or that the transport could not give back.
    #[must_use]
    pub fn quarantined_bytes(&self) -> u64 {
        self.quarantine.bytes()
    }
}
