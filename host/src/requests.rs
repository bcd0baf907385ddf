//! Request slots: who holds which, with how many tokens and which blocks.

use serde::Serialize;

use crate::block::Block;
use crate::ids::{RequestId, SlotId};

/// One admitted request.
#[derive(Debug, Serialize)]
pub(crate) struct Request {
    /// Its blocks, in the order of its tokens: the block table.
    pub blocks: Vec<Block>,
    /// Tokens that are final.
    pub committed: u32,
    /// Tokens written by the last step and not yet committed.
    pub written: u32,
}

/// A slot, taken or free.
#[derive(Debug, Serialize)]
struct Slot {
    generation: u32,
    request: Option<Request>,
}

/// All request slots.
#[derive(Debug, Serialize)]
pub(crate) struct Requests {
    slots: Vec<Slot>,
    free: Vec<SlotId>,
}

impl Requests {
    /// `total` free slots; the lowest is taken first. Each can hold `max_blocks` blocks without
    /// allocating.
    pub fn new(total: u32) -> Self {
        let slots = (0..total).map(|_| Slot { generation: 0, request: None }).collect();
        Self { slots, free: (0..total).rev().map(SlotId).collect() }
    }

    /// Takes a slot, or `None` when all are taken.
    pub fn admit(&mut self) -> Option<RequestId> {
        let slot = self.free.pop()?;
        let entry = &mut self.slots[slot.0 as usize];
        entry.request = Some(Request { blocks: Vec::new(), committed: 0, written: 0 });
        Some(RequestId { slot, generation: entry.generation })
    }

    /// Gives the slot up; the request's last state, or `None` if there is no such request.
    pub fn release(&mut self, id: RequestId) -> Option<Request> {
        self.get(id)?;
        let entry = &mut self.slots[id.slot.0 as usize];
        entry.generation = entry.generation.wrapping_add(1);
        self.free.push(id.slot);
        entry.request.take()
    }

    /// The request, if the handle is current.
    pub fn get(&self, id: RequestId) -> Option<&Request> {
        let entry = self.slots.get(id.slot.0 as usize)?;
        entry.request.as_ref().filter(|_| entry.generation == id.generation)
    }

    /// The request, if the handle is current.
    pub fn get_mut(&mut self, id: RequestId) -> Option<&mut Request> {
        let entry = self.slots.get_mut(id.slot.0 as usize)?;
        entry.request.as_mut().filter(|_| entry.generation == id.generation)
    }

    /// The request in a slot.
    pub fn in_slot(&self, slot: SlotId) -> Option<RequestId> {
        let entry = self.slots.get(slot.0 as usize)?;
        entry.request.as_ref().map(|_| RequestId { slot, generation: entry.generation })
    }

    /// Slots that are taken.
    pub fn live(&self) -> u32 {
        (self.slots.len() - self.free.len()) as u32
    }
}
