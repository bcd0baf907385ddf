//! Requests that leave for another cache, or come from one, in the ledger.

use super::Ledger;
use crate::block::{Block, Held, blocks_of};
use crate::bucket::LimitedBy;
use crate::error::KvError;
use crate::ids::{BlockId, LayerGroup, LedgerId, RequestId};
use crate::requests::Progress;
use crate::transfer::Positions;

/// A slot and blocks for a request that comes from another cache.
#[derive(Debug)]
pub(crate) struct Room {
    ledger: LedgerId,
    pub id: RequestId,
    pub blocks: Vec<Block>,
    pub at: Positions,
}

impl Room {
    /// Which blocks, in order.
    pub fn block_ids(&self) -> Vec<BlockId> {
        self.blocks.iter().map(Block::id).collect()
    }
}

impl Ledger {
    /// Which ledger it is.
    pub(crate) fn id(&self) -> LedgerId {
        self.requests.ledger()
    }

    /// How far a request is in both layer groups.
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`], [`KvError::ForeignRequest`], [`KvError::RequestInStep`]; [`KvError::Overwritten`] for
    /// one that cannot go on.
    pub fn positions(&self, id: RequestId) -> Result<Positions, KvError> {
        let request = self.request(id)?;
        self.check_in_no_step(id)?;
        for group in LayerGroup::ALL {
            let progress = request.groups[group.index()];
            if !progress.can_resume_at(progress.committed, self.rollback_tokens) {
                let committed = progress.committed;
                return Err(KvError::Overwritten { request: id, group, committed });
            }
        }
        let [trunk, draft] = request.groups.map(|group| group.committed);
        Ok(Positions { trunk, draft })
    }

    /// Takes a slot, and the blocks of so many tokens. What nobody refers to is evicted for them, if that is enough.
    ///
    /// # Errors
    /// [`KvError::ContextTooLong`], [`KvError::NoSuchGroup`] for a position in draft layers that the model does not have,
    /// [`KvError::NoFreeSlot`], [`KvError::OutOfBlocks`]. Nothing is taken then.
    pub(crate) fn take_room_for(&mut self, at: Positions) -> Result<Room, KvError> {
        if at.draft > 0 && !self.has_drafts {
            return Err(KvError::NoSuchGroup { group: LayerGroup::Draft });
        }
        let needed = if self.has_entries { blocks_of(at.trunk) } else { 0 };
        let id = self.admit()?;
        if let Err(error) = self.check_context(id, at).and_then(|()| self.room_of(needed)) {
            drop(self.requests.release(id));
            return Err(error);
        }
        let blocks = std::iter::from_fn(|| self.blocks.take()).take(needed as usize).collect();
        Ok(Room { ledger: self.requests.ledger(), id, blocks, at })
    }

    fn check_context(&self, id: RequestId, at: Positions) -> Result<(), KvError> {
        let (end, limit) = (at.trunk.max(at.draft), self.limits.context);
        if end <= limit {
            return Ok(());
        }
        let (end, by) = (end.into(), LimitedBy::Cache);
        Err(KvError::ContextTooLong { request: id, end, limit, by })
    }

    fn room_of(&mut self, needed: u32) -> Result<(), KvError> {
        if self.make_room(needed) {
            return Ok(());
        }
        let free = self.blocks.free() + self.evictable_blocks();
        Err(KvError::OutOfBlocks { needed, free })
    }

    /// Whether the room is of this ledger.
    pub(crate) fn has_room(&self, room: &Room) -> bool {
        room.ledger == self.requests.ledger()
    }

    /// A request has the room from now on, with every byte of it written.
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`] if the slot was released meanwhile; the room is given up then.
    pub(crate) fn enter_room(&mut self, room: Room) -> Result<RequestId, KvError> {
        let (rollback, has_drafts, id) = (self.rollback_tokens, self.has_drafts, room.id);
        // Rows are there for the position alone: nothing before it can be gone back to.
        let progress = |committed: u32| {
            let written_to = committed.saturating_add(rollback);
            Progress { committed, written_to, in_step: 0 }
        };
        let Some(request) = self.requests.get_mut(id) else {
            self.give_room_up(room);
            return Err(self.refused(id));
        };
        request.blocks.extend(room.blocks.into_iter().map(Held::Own));
        let draft = if has_drafts { progress(room.at.draft) } else { Progress::default() };
        request.groups = [progress(room.at.trunk), draft];
        Ok(id)
    }

    /// Gives room up. Nothing may be on its way there any more.
    pub(crate) fn give_room_up(&mut self, room: Room) {
        let Room { id, blocks, .. } = room;
        // In reverse, so that the one taken last is the one taken next.
        for block in blocks.into_iter().rev() {
            self.unowned.add(block.id());
            self.blocks.give_back(block);
        }
        drop(self.requests.release(id));
    }
}
