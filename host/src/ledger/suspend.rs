//! Requests without a slot, in the ledger.

use super::{Ledger, give_up};
use crate::error::KvError;
use crate::ids::{LayerGroup, RequestId, SlotId};
use crate::manager::suspended::{ResumeRefused, Suspended};

impl Ledger {
    /// Takes a request out of its slot; it keeps its blocks, and its id ends. Of a ledger without device memory, as are
    /// [`Self::resume`] and [`Self::discard`]; a cache's is [`KvCacheManager::suspend`](crate::KvCacheManager::suspend).
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`], [`KvError::ForeignRequest`], [`KvError::RequestInStep`],
    /// [`KvError::NoRoomToSuspend`]. Nothing has changed then.
    pub fn suspend(&mut self, id: RequestId) -> Result<Suspended, KvError> {
        let image = self.take_image(id)?;
        self.detach(id, image)
    }

    /// Lets a suspended request go on, in a slot that is free, under a new id.
    ///
    /// # Errors
    /// [`ResumeRefused`], which holds the request, unchanged: [`KvError::ForeignSuspended`], [`KvError::NoFreeSlot`].
    pub fn resume(&mut self, suspended: Suspended) -> Result<RequestId, ResumeRefused> {
        match self.check_suspended(&suspended).and_then(|()| self.admit()) {
            Ok(id) => {
                self.attach(id, suspended);
                Ok(id)
            }
            Err(error) => Err(ResumeRefused::new(suspended, error)),
        }
    }

    /// Ends a suspended request and frees what it held.
    ///
    /// # Errors
    /// [`ResumeRefused`] with [`KvError::ForeignSuspended`].
    pub fn discard(&mut self, suspended: Suspended) -> Result<(), ResumeRefused> {
        if let Err(error) = self.check_suspended(&suspended) {
            return Err(ResumeRefused::new(suspended, error));
        }
        self.discard_suspended(suspended);
        Ok(())
    }

    /// A slot for the copy of a request's state.
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`], [`KvError::ForeignRequest`], [`KvError::RequestInStep`],
    /// [`KvError::NoRoomToSuspend`].
    pub(crate) fn take_image(&mut self, id: RequestId) -> Result<SlotId, KvError> {
        self.request(id)?;
        self.check_in_no_step(id)?;
        let suspended = self.suspended;
        self.images.pop().ok_or(KvError::NoRoomToSuspend { suspended })
    }

    /// Returns the slot of a suspended request.
    pub(crate) fn give_image_back(&mut self, image: SlotId) {
        self.images.push(image);
    }

    /// Gives up the slot of a request whose state is copied to `image`; all else that it has.
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`], [`KvError::ForeignRequest`].
    pub(crate) fn detach(&mut self, id: RequestId, image: SlotId) -> Result<Suspended, KvError> {
        let refused = self.refused(id);
        self.attach_saved();
        self.keep_output(id.slot());
        let (blocks, groups) = self.requests.detach(id).ok_or(refused)?;
        let (wanted, sharer) = (self.saves.take(id), self.take_sharer(id.slot()));
        Ok(Suspended { ledger: self.requests.ledger(), blocks, groups, image, wanted, sharer })
    }

    /// Refuses a request that was suspended in another cache.
    pub(crate) fn check_suspended(&self, suspended: &Suspended) -> Result<(), KvError> {
        let is_own = suspended.ledger == self.requests.ledger();
        if is_own { Ok(()) } else { Err(KvError::ForeignSuspended) }
    }

    /// A new request, to which the state was copied, becomes the suspended one; the slot that had the copy is free.
    pub(crate) fn attach(&mut self, id: RequestId, suspended: Suspended) {
        let Suspended { blocks, groups, image, wanted, sharer, .. } = suspended;
        if let Some(request) = self.requests.get_mut(id) {
            request.blocks.extend(blocks);
            request.groups = groups;
        }
        self.put_sharer(id.slot(), sharer);
        for boundary in wanted {
            if boundary <= groups[LayerGroup::Trunk.index()].committed {
                self.saves.add_due(id, boundary);
            } else {
                self.saves.add(id.slot(), boundary);
            }
        }
        self.give_image_back(image);
    }

    /// Frees what a suspended request held.
    pub(crate) fn discard_suspended(&mut self, suspended: Suspended) {
        let Suspended { blocks, image, sharer, .. } = suspended;
        self.release_sharer(sharer);
        let Self { shares, blocks: free, unowned, .. } = self;
        give_up(blocks.into_iter().rev(), shares, free, unowned);
        self.give_image_back(image);
    }

    /// Slots for suspended requests that are free.
    #[must_use]
    pub fn free_suspended(&self) -> u32 {
        self.images.len() as u32
    }
}
