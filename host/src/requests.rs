//! Request slots: who holds which, with how many tokens and which blocks.

use serde::Serialize;

use crate::block::Block;
use crate::ids::{LedgerId, RequestId, SlotId};

/// How far a request is in one layer group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Progress {
    /// Tokens that are final.
    pub committed: u32,
    /// One past the highest position that kernels may have written to the rings, ever.
    pub written_to: u32,
    /// Tokens that it has in the open step; 0 if it takes no part.
    pub in_step: u32,
}

impl Progress {
    /// Whether the rings still hold every row that a query at position `committed` needs: they keep
    /// `rollback` rows more than a window, so at most as many positions can be taken back.
    pub fn can_resume_at(self, committed: u32, rollback: u32) -> bool {
        self.written_to.saturating_sub(committed) <= rollback
    }

    /// The progress when the open step has run, and `accepted` of its tokens became final.
    pub fn after_step(self, accepted: u32) -> Self {
        Self {
            committed: self.committed + accepted,
            written_to: self.written_to.max(self.committed + self.in_step),
            in_step: 0,
        }
    }
}

/// One admitted request.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Request {
    /// Its blocks, in the order of its tokens: the block table.
    pub blocks: Vec<Block>,
    /// By [`crate::LayerGroup::index`].
    pub groups: [Progress; 2],
}

/// A slot, taken or free.
#[derive(Debug, Serialize)]
struct Slot {
    generation: u64,
    request: Option<Request>,
}

/// All request slots.
#[derive(Debug, Serialize)]
pub(crate) struct Requests {
    #[serde(skip)]
    ledger: LedgerId,
    slots: Vec<Slot>,
    free: Vec<SlotId>,
}

impl Requests {
    /// `total` free slots; the lowest is taken first.
    pub fn new(total: u32) -> Self {
        let slots = (0..total).map(|_| Slot { generation: 0, request: None }).collect();
        let free = (0..total).rev().map(SlotId).collect();
        Self { ledger: LedgerId::unique(), slots, free }
    }

    /// Takes a slot, or `None` when all are taken.
    pub fn admit(&mut self) -> Option<RequestId> {
        let slot = self.free.pop()?;
        let entry = &mut self.slots[slot.0 as usize];
        entry.request = Some(Request::default());
        Some(RequestId::new(self.ledger, slot, entry.generation))
    }

    /// Gives the slot up; the request's last state, or `None` if there is no such request.
    pub fn release(&mut self, id: RequestId) -> Option<Request> {
        self.get(id)?;
        let entry = &mut self.slots[id.slot().0 as usize];
        entry.generation += 1;
        self.free.push(id.slot());
        entry.request.take()
    }

    /// The request, if the id is of this ledger and current.
    pub fn get(&self, id: RequestId) -> Option<&Request> {
        let entry = self.slots.get(id.slot().0 as usize)?;
        let current = entry.generation == id.generation() && id.ledger() == self.ledger;
        entry.request.as_ref().filter(|_| current)
    }

    /// As [`Self::get`], to change it.
    pub fn get_mut(&mut self, id: RequestId) -> Option<&mut Request> {
        let entry = self.slots.get_mut(id.slot().0 as usize)?;
        let current = entry.generation == id.generation() && id.ledger() == self.ledger;
        entry.request.as_mut().filter(|_| current)
    }

    /// Whether the id was given out by another ledger.
    pub fn is_foreign(&self, id: RequestId) -> bool {
        id.ledger() != self.ledger
    }

    /// The request in a slot.
    pub fn in_slot(&self, slot: SlotId) -> Option<RequestId> {
        let entry = self.slots.get(slot.0 as usize)?;
        entry.request.as_ref().map(|_| RequestId::new(self.ledger, slot, entry.generation))
    }

    /// Slots that are taken.
    pub fn live(&self) -> u32 {
        (self.slots.len() - self.free.len()) as u32
    }
}
