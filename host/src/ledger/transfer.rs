//! Requests that move between caches, in the ledger.

use super::Ledger;
use crate::block::RequestBlock;
use crate::error::KvError;
use crate::ids::{CacheId, LayerGroup, RequestId};
use crate::ledger::requests::Progress;
use crate::transfer::{MoveError, Positions, RequestReservation};

impl Ledger {
    /// Identity of this ledger.
    pub(crate) fn id(&self) -> CacheId {
        self.requests.cache()
    }

    /// Final tokens of a request in both layer groups. Tokens of the draft layers after the trunk's last token are
    /// drafts: they are not final and do not count.
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`], [`KvError::ForeignRequest`], [`KvError::RequestInStep`]; [`KvError::Overwritten`]
    /// for a request that cannot continue from there.
    pub fn positions(&self, id: RequestId) -> Result<Positions, KvError> {
        let request = self.request(id)?;
        self.check_in_no_step(id)?;
        let [trunk, draft] = request.groups.map(|group| group.committed);
        let at = Positions { trunk, draft: draft.min(trunk) };
        for (group, committed) in LayerGroup::ALL.into_iter().zip([at.trunk, at.draft]) {
            if !request.groups[group.index()].can_resume_at(committed, self.max_decode_tokens) {
                return Err(KvError::Overwritten { request: id, group, committed });
            }
        }
        Ok(at)
    }

    /// Refuses positions that no request of this ledger can have.
    ///
    /// # Errors
    /// [`MoveError::DraftAhead`], [`MoveError::TooLong`]; [`KvError::NoSuchGroup`] for a position in draft layers that the
    /// model does not have.
    pub(crate) fn check_positions(&self, at: Positions) -> Result<(), MoveError> {
        if at.draft > 0 && !self.has_drafts {
            return Err(KvError::NoSuchGroup { group: LayerGroup::Draft }.into());
        }
        if at.draft > at.trunk {
            return Err(MoveError::DraftAhead { at });
        }
        let limit = self.limits.context;
        if at.trunk > limit { Err(MoveError::TooLong { at, limit }) } else { Ok(()) }
    }

    /// Takes a slot, and blocks for `at.trunk` tokens. Evicts unreferenced blocks if needed, provided that these are
    /// enough.
    ///
    /// # Errors
    /// As [`Self::check_positions`]; [`KvError::NoFreeSlot`], [`KvError::OutOfBlocks`]. Nothing is taken then.
    pub(crate) fn reserve_request(
        &mut self,
        at: Positions,
    ) -> Result<RequestReservation, MoveError> {
        self.check_positions(at)?;
        let needed = self.blocks_of(at.trunk);
        self.check_free_slot()?;
        self.require_blocks(needed)?;
        let slots = self.limits.requests;
        let slot = self.requests.reserve().ok_or(KvError::NoFreeSlot { slots })?;
        let blocks = std::iter::from_fn(|| self.blocks.take()).take(needed as usize).collect();
        Ok(RequestReservation { cache: self.requests.cache(), slot, blocks, at })
    }

    /// Admits a request that was computed in another cache. For ledgers without device memory, where no bytes are
    /// transferred.
    ///
    /// # Errors
    /// [`MoveError::DraftAhead`], [`MoveError::TooLong`]; [`MoveError::Cache`]: [`KvError::NoSuchGroup`],
    /// [`KvError::NoFreeSlot`], [`KvError::OutOfBlocks`]. Nothing has changed then.
    pub fn admit_imported(&mut self, at: Positions) -> Result<RequestId, MoveError> {
        let reservation = self.reserve_request(at)?;
        Ok(self.enter_reserved(reservation))
    }

    /// Whether the reservation is of this ledger.
    pub(crate) fn owns_reservation(&self, reservation: &RequestReservation) -> bool {
        reservation.cache == self.requests.cache()
    }

    /// Admits a request in a reservation of this ledger, of which every byte is written.
    pub(crate) fn enter_reserved(&mut self, reservation: RequestReservation) -> RequestId {
        let RequestReservation { slot, blocks, at, .. } = reservation;
        let (max_decode_tokens, has_drafts) = (self.max_decode_tokens, self.has_drafts);
        let progress = |committed| Progress::restored(committed, max_decode_tokens);
        let id = self.requests.enter(slot);
        if let Some(request) = self.requests.get_mut(id) {
            request.blocks.extend(blocks.into_iter().map(RequestBlock::Own));
            let draft = if has_drafts { progress(at.draft) } else { Progress::default() };
            request.groups = [progress(at.trunk), draft];
        }
        id
    }

    /// Returns the slot and blocks of a reservation of this ledger to its pools. No copy to it may still be under way.
    pub(crate) fn cancel_reservation(&mut self, reservation: RequestReservation) {
        let RequestReservation { slot, blocks, .. } = reservation;
        // In reverse, so that the pool hands them out again in the same order.
        let mut pools = self.pools();
        blocks.into_iter().rev().for_each(|block| pools.free_block(block));
        self.requests.unreserve(slot);
    }
}
