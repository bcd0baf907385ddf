//! The end of the transport, behind which no read writes anything.
//!
//! A read that has failed may write as long as one that goes on: only its transport's end stops it. So both have the second
//! deadline. Behind it no read begins until those that somebody waits for have ended, each by its own first deadline at
//! the latest; then the transport is ended and made again, and the others begin. Bytes that came before stay: their memory
//! is taken from the old transport and given to the new one.

use super::error::TransferError;
use super::quarantine::Quarantined;
use super::reading::{Memory, Reading};
use super::receiver::Receiver;
use crate::mistake::{Mistake, made};
use crate::transport::{Polled, Transport};

impl<T: Transport> Receiver<T> {
    /// Nobody waits for a read any more, which may go on.
    pub(super) fn shut_in(&mut self, memory: Quarantined) {
        if made(Mistake::NoQuarantine) {
            self.release(memory.read.taken_for_ended(), memory.share);
            return;
        }
        self.quarantine.add(memory);
    }

    /// Frees the memory of reads that have ended, and ends the transport for that of others when it is time.
    pub(super) fn poll_quarantine(&mut self) {
        if let Some(is_due) = self.quarantine.is_to_be_made_again() {
            if is_due && !made(Mistake::FenceOnce) {
                // Until it can be made again, what begins is told why.
                let _ = self.fence();
            }
            return;
        }
        self.free_what_ended();
        if self.quarantine.drain(self.deadlines.fence) && self.can_fence() {
            // As above.
            let _ = self.fence();
        }
    }

    fn free_what_ended(&mut self) {
        for memory in self.quarantine.take_reads() {
            let Quarantined { read, share, began, failed } = memory;
            if failed {
                self.quarantine.add(Quarantined { read, share, began, failed });
                continue;
            }
            match self.transport.poll(read) {
                Polled::Done(memory) => {
                    self.stats.ended_late += 1;
                    self.release(memory, share);
                }
                Polled::Failed(read, _) => {
                    self.quarantine.add(Quarantined { read, share, began, failed: true });
                }
                Polled::Pending(read) => {
                    self.quarantine.add(Quarantined { read, share, began, failed });
                }
            }
        }
    }

    /// Whether nobody waits for a read that goes on.
    fn can_fence(&self) -> bool {
        let goes_on = |reading: &Reading| matches!(reading.memory, Memory::Read { .. });
        !self.reading.iter().any(goes_on) || made(Mistake::FenceWithoutDraining)
    }

    /// Ends the transport now to free what is quarantined, unless a read goes on that somebody waits for; whether nothing is
    /// quarantined now. [`Self::poll`] does so at the second deadline.
    ///
    /// # Errors
    /// [`TransferError::NoTransport`] if it could not be made again; the memory counts as taken until it can.
    pub fn clear_quarantine(&mut self) -> Result<bool, TransferError> {
        let is_needed = !self.quarantine.is_empty() || self.quarantine.check_transport().is_err();
        if is_needed && self.can_fence() {
            self.fence()?;
        }
        Ok(self.quarantine.is_empty())
    }

    /// Ends the transport, and with it every read, and makes it again. Requests that wait for nothing keep their bytes.
    fn fence(&mut self) -> Result<(), TransferError> {
        for reading in std::mem::take(&mut self.reading) {
            self.take_out(reading);
        }
        let fenced = self.transport.fence();
        let waiting = std::mem::take(&mut self.reading);
        if let Err(error) = fenced {
            self.stats.failed_fences += 1;
            let lost = self.quarantine.lose_transport(&error);
            // Their memory is with nobody, and free.
            let gone = |reading: Reading| (reading.id, Err(lost.error()));
            self.ended.extend(waiting.into_iter().map(gone));
            return Err(lost.error());
        }
        self.stats.fences += 1;
        self.quarantine.clear();
        waiting.into_iter().for_each(|reading| self.put_back(reading));
        Ok(())
    }

    /// The memory of a request is taken from the transport, which would end with it, if no read writes it.
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

    /// The transport has it again.
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

    /// Bytes of memory that nobody waits for and that is not free: a read may write it, or the transport could not give it
    /// back.
    #[must_use]
    pub fn quarantined_bytes(&self) -> u64 {
        self.quarantine.bytes()
    }
}
