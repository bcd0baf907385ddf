//! Suspended requests, in the ledger.

use super::Ledger;
use super::prefix_tree::Pools;
use crate::error::KvError;
use crate::ids::{LayerGroup, RequestId, SlotId};
use crate::manager::suspended::{StillSuspended, Suspended};

impl Ledger {
    /// Suspends a request: it gives up its slot and keeps its blocks, and its id becomes invalid. For a ledger without
    /// device memory, as [`Self::resume`] and [`Self::discard`] are; with a cache, call
    /// [`KvCacheManager::suspend`](crate::KvCacheManager::suspend).
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`], [`KvError::ForeignRequest`], [`KvError::RequestInStep`],
    /// [`KvError::NoRoomToSuspend`]. Nothing has changed then.
    pub fn suspend(&mut self, id: RequestId) -> Result<Suspended, KvError> {
        let saved_slot = self.take_suspended_slot(id)?;
        self.detach(id, saved_slot)
    }

    /// Resumes a suspended request, in a free slot and under a new id.
    ///
    /// # Errors
    /// [`StillSuspended`], which holds the request, unchanged: [`KvError::ForeignSuspended`], [`KvError::NoFreeSlot`].
    pub fn resume(&mut self, suspended: Suspended) -> Result<RequestId, StillSuspended> {
        match self.check_suspended(&suspended).and_then(|()| self.admit()) {
            Ok(id) => {
                self.attach(id, suspended);
                Ok(id)
            }
            Err(error) => Err(StillSuspended::new(suspended, error)),
        }
    }

    /// Ends a suspended request and frees what it held.
    ///
    /// # Errors
    /// [`StillSuspended`] with [`KvError::ForeignSuspended`].
    pub fn discard(&mut self, suspended: Suspended) -> Result<(), StillSuspended> {
        if let Err(error) = self.check_suspended(&suspended) {
            return Err(StillSuspended::new(suspended, error));
        }
        self.discard_suspended(suspended);
        Ok(())
    }

    /// Takes a spare slot for the copy of a request's state.
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`], [`KvError::ForeignRequest`], [`KvError::RequestInStep`],
    /// [`KvError::NoRoomToSuspend`].
    pub(crate) fn take_suspended_slot(&mut self, id: RequestId) -> Result<SlotId, KvError> {
        self.request(id)?;
        self.check_in_no_step(id)?;
        let suspended = self.max_suspended;
        self.free_suspended_slots.pop().ok_or(KvError::NoRoomToSuspend { suspended })
    }

    /// Returns the spare slot of a suspended request.
    pub(crate) fn return_suspended_slot(&mut self, saved_slot: SlotId) {
        self.free_suspended_slots.push(saved_slot);
    }

    /// Gives up the slot of a request whose state is copied to `saved_slot`. Returns everything
    /// else that the request has.
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`], [`KvError::ForeignRequest`].
    pub(crate) fn detach(
        &mut self,
        id: RequestId,
        saved_slot: SlotId,
    ) -> Result<Suspended, KvError> {
        let refused = self.refused(id);
        self.attach_saved();
        self.keep_output(id.slot());
        let (cache, first_id) = (self.requests.cache(), self.requests.first_id(id));
        let (blocks, groups) = self.requests.detach(id).ok_or(refused)?;
        let (wanted, request_prefix) = (self.wanted.take(id), self.take_request_prefix(id.slot()));
        Ok(Suspended { cache, first_id, blocks, groups, saved_slot, wanted, request_prefix })
    }

    /// Refuses a request that was suspended in another cache.
    pub(crate) fn check_suspended(&self, suspended: &Suspended) -> Result<(), KvError> {
        let is_own = suspended.cache == self.requests.cache();
        if is_own { Ok(()) } else { Err(KvError::ForeignSuspended) }
    }

    /// Turns `id`, a new request to whose slot the state was copied, into the suspended request. Frees the spare slot.
    pub(crate) fn attach(&mut self, id: RequestId, suspended: Suspended) {
        let Suspended { first_id, blocks, groups, saved_slot, wanted, request_prefix, .. } =
            suspended;
        self.requests.set_first_id(id, first_id);
        if let Some(request) = self.requests.get_mut(id) {
            request.blocks.extend(blocks);
            request.groups = groups;
        }
        self.put_request_prefix(id.slot(), request_prefix);
        for boundary in wanted {
            if boundary <= groups[LayerGroup::Trunk.index()].committed {
                self.wanted.add_due(id, boundary);
            } else {
                self.wanted.add(id.slot(), boundary);
            }
        }
        self.return_suspended_slot(saved_slot);
    }

    /// Frees what a suspended request held.
    pub(crate) fn discard_suspended(&mut self, suspended: Suspended) {
        let Suspended { blocks, saved_slot, request_prefix, .. } = suspended;
        self.release_request_prefix(request_prefix);
        let Self { shares, blocks: free, checkpoints, to_poison, .. } = self;
        let mut pools = Pools { blocks: free, checkpoints, to_poison };
        pools.give_up(blocks.into_iter().rev(), shares);
        self.return_suspended_slot(saved_slot);
    }

    /// Free spare slots for suspended requests.
    #[must_use]
    pub fn free_suspended(&self) -> u32 {
        self.free_suspended_slots.len() as u32
    }
}
