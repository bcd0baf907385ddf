//! Request slots: the request in each slot, its tokens and its blocks.

use serde::Serialize;

use crate::block::RequestBlock;
use crate::ids::{CacheId, RequestId, SlotId};

/// Progress of a request in one layer group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Progress {
    /// Tokens that are final.
    pub committed: u32,
    /// One past the highest position that kernels may have written to the rings. After a restore from a checkpoint or
    /// another cache it is `committed` + `max_draft` + 1: the rings hold only the rows that position `committed` needs.
    pub written_to: u32,
    /// Tokens that it has in the open step; 0 if it takes no part.
    pub in_step: u32,
}

impl Progress {
    /// The progress of a request whose rows came from a checkpoint or another cache. It has only the rows that position
    /// `committed` needs, so it cannot go back to an earlier position.
    pub fn restored(committed: u32, max_decode_tokens: u32) -> Self {
        Self { committed, written_to: committed.saturating_add(max_decode_tokens), in_step: 0 }
    }

    /// Whether the rings still hold every row that a query at position `committed` needs: they keep
    /// `max_decode_tokens` rows more than a window, so at most as many positions can be taken back.
    pub fn can_resume_at(self, committed: u32, max_decode_tokens: u32) -> bool {
        self.written_to.saturating_sub(committed) <= max_decode_tokens
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
    pub blocks: Vec<RequestBlock>,
    /// By [`crate::LayerGroup::index`].
    pub groups: [Progress; 2],
}

/// A slot, taken or free: a cache line, since the checks of a step read it whole.
#[derive(Debug, Default, Serialize)]
#[repr(align(64))]
struct Slot {
    /// Admissions and releases so far: odd while it is taken.
    turns: u64,
    /// Number of the last check that named its request; see [`Check::visit`].
    #[serde(skip)]
    visited_in: u64,
    /// The request in the slot; empty if the slot is free.
    request: Request,
}

const _: () = assert!(size_of::<Slot>() == 64);

impl Slot {
    fn is_taken(&self) -> bool {
        self.turns % 2 == 1
    }

    /// Whether the request of that generation is in the slot.
    fn is_of(&self, generation: u64) -> bool {
        self.turns == 2 * generation + 1
    }
}

/// All request slots.
#[derive(Debug, Serialize)]
pub(crate) struct Requests {
    #[serde(skip)]
    cache: CacheId,
    slots: Vec<Slot>,
    /// By slot: the id under which a request was first admitted, if it was suspended since.
    #[serde(skip)]
    first_ids: Vec<Option<RequestId>>,
    free: Vec<SlotId>,
    /// Most blocks of a request.
    max_blocks: u32,
    /// Checks so far.
    #[serde(skip)]
    checks: u64,
}

/// A check of several requests, which notices one that is named twice.
pub(crate) struct Check<'r> {
    slots: &'r mut [Slot],
    cache: CacheId,
    number: u64,
}

impl Check<'_> {
    /// The request, if the id is of this ledger and current, and whether an earlier call of this check named it.
    #[inline]
    pub fn visit(&mut self, id: RequestId) -> Option<(&Request, bool)> {
        let entry = self.slots.get_mut(id.slot().0 as usize)?;
        if !entry.is_of(id.generation()) | (id.cache() != self.cache) {
            return None;
        }
        let met = entry.visited_in == self.number;
        entry.visited_in = self.number;
        Some((&entry.request, met))
    }
}

impl Requests {
    /// `total` free slots for requests of up to `max_blocks` blocks; the lowest is taken first.
    pub fn new(total: u32, max_blocks: u32) -> Self {
        let slots = (0..total).map(|_| Slot::default()).collect();
        let free = (0..total).rev().map(SlotId).collect();
        let first_ids = vec![None; total as usize];
        Self { cache: CacheId::unique(), slots, first_ids, free, max_blocks, checks: 0 }
    }

    /// Takes a slot, or `None` when all are taken. It has room for all blocks that the request can ever hold, so
    /// that no step allocates; a slot that is used again has it already.
    pub fn admit(&mut self) -> Option<RequestId> {
        self.reserve().map(|slot| self.enter(slot))
    }

    /// Takes a slot for a request that is being imported. Until [`Self::enter`] the slot has no request and
    /// no id names it.
    pub fn reserve(&mut self) -> Option<SlotId> {
        self.free.pop()
    }

    /// Gives up a slot that was reserved and not entered.
    pub fn unreserve(&mut self, slot: SlotId) {
        self.free.push(slot);
    }

    /// Puts a new request in a reserved slot.
    pub fn enter(&mut self, slot: SlotId) -> RequestId {
        let entry = &mut self.slots[slot.0 as usize];
        let generation = entry.turns / 2;
        entry.turns += 1;
        self.first_ids[slot.0 as usize] = None;
        entry.request.blocks.reserve_exact(self.max_blocks as usize);
        RequestId::new(self.cache, slot, generation)
    }

    /// Frees the slot. Returns the request's blocks, the last one first; `None` if there is no such request.
    pub fn release(&mut self, id: RequestId) -> Option<impl Iterator<Item = RequestBlock>> {
        self.get(id)?;
        self.free.push(id.slot());
        let Slot { turns, request, .. } = &mut self.slots[id.slot().0 as usize];
        *turns += 1;
        request.groups = Default::default();
        Some(request.blocks.drain(..).rev())
    }

    /// Frees the slot. Returns the request's blocks, in order, and its progress; `None` if there is no such request.
    pub fn detach(&mut self, id: RequestId) -> Option<(Vec<RequestBlock>, [Progress; 2])> {
        let groups = self.get(id)?.groups;
        let mut blocks: Vec<_> = self.release(id)?.collect();
        blocks.reverse();
        Some((blocks, groups))
    }

    /// The id under which a request was admitted: its own, unless it was suspended since.
    pub fn first_id(&self, id: RequestId) -> RequestId {
        self.first_ids.get(id.slot().0 as usize).copied().flatten().unwrap_or(id)
    }

    /// Records the id under which a resumed request was first admitted.
    pub fn set_first_id(&mut self, id: RequestId, first: RequestId) {
        self.first_ids[id.slot().0 as usize] = Some(first);
    }

    /// The request, if the id is of this ledger and current.
    pub fn get(&self, id: RequestId) -> Option<&Request> {
        let entry = self.slots.get(id.slot().0 as usize)?;
        let current = entry.is_of(id.generation()) & (id.cache() == self.cache);
        current.then_some(&entry.request)
    }

    /// As [`Self::get`], to change it.
    pub fn get_mut(&mut self, id: RequestId) -> Option<&mut Request> {
        self.get(id)?;
        self.of_slot_mut(id.slot())
    }

    /// The request data of a slot, mutable; the id is not checked.
    pub fn of_slot_mut(&mut self, slot: SlotId) -> Option<&mut Request> {
        self.slots.get_mut(slot.0 as usize).map(|entry| &mut entry.request)
    }

    /// Begins a check in which no request has been named yet.
    pub fn check(&mut self) -> Check<'_> {
        self.checks += 1;
        Check { slots: &mut self.slots, cache: self.cache, number: self.checks }
    }

    /// The ledger whose requests these are.
    pub fn cache(&self) -> CacheId {
        self.cache
    }

    /// Whether the id was given out by another ledger.
    pub fn is_foreign(&self, id: RequestId) -> bool {
        id.cache() != self.cache
    }

    /// The request in a slot.
    pub fn in_slot(&self, slot: SlotId) -> Option<RequestId> {
        let entry = self.slots.get(slot.0 as usize)?;
        entry.is_taken().then(|| RequestId::new(self.cache, slot, entry.turns / 2))
    }

    /// Slots that are taken or reserved.
    pub fn live(&self) -> u32 {
        (self.slots.len() - self.free.len()) as u32
    }
}
