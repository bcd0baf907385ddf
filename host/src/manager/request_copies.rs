//! Between steps: forks, suspension and resumption of requests.

use crate::device::{Backend, Stream};
use crate::error::KvError;
use crate::ids::{RequestId, SlotId};
use crate::ledger::Fork;
use crate::manager::KvCacheManager;
use crate::manager::copy_kind::CopyKind;
use crate::manager::suspended::{StillSuspended, Suspended};
use crate::ops::{BlockCopy, SlotCopy};

impl<B: Backend> KvCacheManager<B> {
    /// Admits a request that is a copy of another: it has the same tokens in all layers, rejected drafts included, and
    /// each then continues on its own. They share all full blocks; the new request gets a copy of the last block if
    /// that is not full. Queued in `stream`, after the earlier steps.
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`], [`KvError::ForeignRequest`], [`KvError::NoFreeSlot`], [`KvError::OutOfBlocks`],
    /// [`KvError::Device`]. Then nothing has changed, except that prefixes may have been evicted.
    pub fn fork(&mut self, stream: &Stream<B>, id: RequestId) -> Result<RequestId, KvError> {
        self.core().check_stream(stream)?;
        self.reject_leaked_steps();
        let fork = self.ledger_mut().begin_fork(id)?;
        match self.copy_fork(stream, &fork) {
            Ok(()) => Ok(self.ledger_mut().enter_fork(fork)),
            Err(error) => {
                self.poison_slot(fork.id.slot());
                self.ledger_mut().undo_fork(fork);
                Err(error)
            }
        }
    }

    fn copy_fork(&mut self, stream: &Stream<B>, fork: &Fork) -> Result<(), KvError> {
        let Fork { of, id, shared, copied } = fork;
        let slots = SlotCopy { from: of.slot(), to: id.slot() };
        let mut jobs = vec![(CopyKind::Slots, slots.words())];
        let mut blocks: Vec<_> =
            self.core().read_ledger().block_table(*of)?.take(*shared as usize).collect();
        if let Some((from, to)) = copied {
            let block = BlockCopy { from: *from, to: to.id() };
            jobs.push((CopyKind::Blocks, block.words()));
            blocks.push(to.id());
        }
        Ok(self.queue_copies(stream, &jobs, Some((id.slot(), &blocks)))?)
    }

    /// Suspends a request, at any position, also after rejected drafts. One launch copies the contents of its slot to
    /// spare memory for [`CacheConfig::max_suspended`](crate::CacheConfig::max_suspended) requests; blocks stay where
    /// they are. The slot becomes free and the id invalid. Queued in `stream`, after the earlier steps.
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`], [`KvError::ForeignRequest`], [`KvError::NoRoomToSuspend`], [`KvError::Device`].
    /// Nothing has changed then.
    pub fn suspend(&mut self, stream: &Stream<B>, id: RequestId) -> Result<Suspended, KvError> {
        self.core().check_stream(stream)?;
        self.reject_leaked_steps();
        let saved_slot = self.ledger_mut().take_suspended_slot(id)?;
        let copy = SlotCopy { from: id.slot(), to: saved_slot };
        if let Err(error) = self.queue_copies(stream, &[(CopyKind::Slots, copy.words())], None) {
            self.ledger_mut().return_suspended_slot(saved_slot);
            self.poison_slot(saved_slot);
            return Err(error.into());
        }
        let suspended = self.ledger_mut().detach(id, saved_slot);
        self.poison_slot(id.slot());
        suspended
    }

    /// Resumes a suspended request in a free slot, with the bytes that it had and under a new id. Queued in `stream`,
    /// after the earlier steps.
    ///
    /// # Errors
    /// [`StillSuspended`], which holds the request, unchanged: [`KvError::ForeignSuspended`], [`KvError::NoFreeSlot`],
    /// [`KvError::Device`].
    pub fn resume(
        &mut self,
        stream: &Stream<B>,
        suspended: Suspended,
    ) -> Result<RequestId, StillSuspended> {
        self.reject_leaked_steps();
        let admitted = self.core().check_stream(stream).and_then(|()| {
            let ledger = self.ledger_mut();
            ledger.check_suspended(&suspended)?;
            ledger.admit()
        });
        let id = match admitted {
            Ok(id) => id,
            Err(error) => return Err(StillSuspended::new(suspended, error)),
        };
        let saved_slot = suspended.saved_slot;
        let copy = SlotCopy { from: saved_slot, to: id.slot() };
        let blocks: Vec<_> = suspended.blocks.iter().map(|held| held.id()).collect();
        let jobs = [(CopyKind::Slots, copy.words())];
        match self.queue_copies(stream, &jobs, Some((id.slot(), &blocks))) {
            Ok(()) => {
                self.ledger_mut().attach(id, suspended);
                self.poison_slot(saved_slot);
                Ok(id)
            }
            Err(error) => {
                // It was just admitted, and takes part in no step.
                let _ = self.release(id);
                Err(StillSuspended::new(suspended, error.into()))
            }
        }
    }

    /// Ends a suspended request and frees what it held.
    ///
    /// # Errors
    /// [`StillSuspended`] with [`KvError::ForeignSuspended`].
    pub fn discard(&mut self, suspended: Suspended) -> Result<(), StillSuspended> {
        let saved_slot = suspended.saved_slot;
        self.ledger_mut().discard(suspended)?;
        self.poison_slot(saved_slot);
        Ok(())
    }

    /// In a poisoned cache, marks the slot to be poisoned before its next use.
    pub(crate) fn poison_slot(&mut self, slot: SlotId) {
        let (_, trunk, draft) = self.parts();
        std::iter::once(trunk).chain(draft).for_each(|memory| memory.to_poison.add_slot(slot));
    }
}
