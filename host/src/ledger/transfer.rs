//! Requests that leave for another cache, or come from one, in the ledger.

use super::Ledger;
use crate::block::Held;
use crate::error::KvError;
use crate::ids::{CacheId, LayerGroup, RequestId};
use crate::ledger::requests::Progress;
use crate::transfer::{MoveError, Positions, Room};

impl Ledger {
    /// Which ledger it is.
    pub(crate) fn id(&self) -> CacheId {
        self.requests.ledger()
    }

    /// How far a request is in both layer groups. What draft layers have behind the trunk's last token are drafts: they are
    /// not final, and do not count.
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`], [`KvError::ForeignRequest`], [`KvError::RequestInStep`]; [`KvError::Overwritten`] for
    /// one that cannot go on from there.
    pub fn positions(&self, id: RequestId) -> Result<Positions, KvError> {
        let request = self.request(id)?;
        self.check_in_no_step(id)?;
        let [trunk, draft] = request.groups.map(|group| group.committed);
        let at = Positions { trunk, draft: draft.min(trunk) };
        for (group, committed) in LayerGroup::ALL.into_iter().zip([at.trunk, at.draft]) {
            if !request.groups[group.index()].can_resume_at(committed, self.rollback_tokens) {
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

    /// Takes a slot, and the blocks of so many tokens. What nobody refers to is evicted for them, if that is enough.
    ///
    /// # Errors
    /// As [`Self::check_positions`]; [`KvError::NoFreeSlot`], [`KvError::OutOfBlocks`]. Nothing is taken then.
    pub(crate) fn take_room_for(&mut self, at: Positions) -> Result<Room, MoveError> {
        self.check_positions(at)?;
        let needed = self.blocks_of(at.trunk);
        self.check_free_slot()?;
        self.require_blocks(needed)?;
        let slots = self.limits.requests;
        let slot = self.requests.reserve().ok_or(KvError::NoFreeSlot { slots })?;
        let blocks = std::iter::from_fn(|| self.blocks.take()).take(needed as usize).collect();
        Ok(Room { ledger: self.requests.ledger(), slot, blocks, at })
    }

    /// A request that was computed elsewhere goes on here: for callers whose caches have no memory, and so no bytes to come.
    ///
    /// # Errors
    /// [`MoveError::DraftAhead`], [`MoveError::TooLong`]; [`MoveError::Cache`]: [`KvError::NoSuchGroup`],
    /// [`KvError::NoFreeSlot`], [`KvError::OutOfBlocks`]. Nothing has changed then.
    pub fn arrive(&mut self, at: Positions) -> Result<RequestId, MoveError> {
        let room = self.take_room_for(at)?;
        Ok(self.enter_room(room))
    }

    /// Whether the room is of this ledger.
    pub(crate) fn has_room(&self, room: &Room) -> bool {
        room.ledger == self.requests.ledger()
    }

    /// A request has the room from now on, with every byte of it written. The room is of this ledger.
    pub(crate) fn enter_room(&mut self, room: Room) -> RequestId {
        let Room { slot, blocks, at, .. } = room;
        let (rollback, has_drafts) = (self.rollback_tokens, self.has_drafts);
        let progress = |committed| Progress::restored(committed, rollback);
        let id = self.requests.enter(slot);
        if let Some(request) = self.requests.get_mut(id) {
            request.blocks.extend(blocks.into_iter().map(Held::Own));
            let draft = if has_drafts { progress(at.draft) } else { Progress::default() };
            request.groups = [progress(at.trunk), draft];
        }
        id
    }

    /// Gives room of this ledger up. Nothing may be on its way there any more.
    pub(crate) fn give_room_up(&mut self, room: Room) {
        let Room { slot, blocks, .. } = room;
        // In reverse, so that the one taken last is the one taken next.
        let mut pools = self.pools();
        blocks.into_iter().rev().for_each(|block| pools.free_block(block));
        self.requests.unreserve(slot);
    }
}
