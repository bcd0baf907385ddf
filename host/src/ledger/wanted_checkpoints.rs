//! Positions at which checkpoints of requests are wanted, and checkpoints that were saved.

use serde::Serialize;

use super::open_step::PlannedSave;
use super::slot_queue::SlotQueue;
use crate::checkpoints::SavedCheckpoint;
use crate::config::CacheConfig;
use crate::ids::{RequestId, SlotId};

/// Positions at which checkpoints of requests are wanted, and checkpoints that were saved.
#[derive(Debug, Serialize)]
pub(super) struct WantedCheckpoints {
    /// By slot: the wanted positions, in ascending order.
    pub positions: Vec<Vec<u32>>,
    /// Requests, each with the last wanted position that it passed in a step that could not save it: its slot has no
    /// longer what an earlier one needs.
    #[serde(skip)]
    pub due: SlotQueue<(RequestId, u32)>,
    /// Checkpoints that are saved and not yet handed out.
    #[serde(skip)]
    pub saved: Vec<(RequestId, SavedCheckpoint)>,
    /// Checkpoints that the step checked last will write. Scratch.
    #[serde(skip)]
    pub planned: Vec<PlannedSave>,
    /// Checkpoints that are being saved after a step, of elements of `due`, in their order.
    #[serde(skip)]
    pub taken: Vec<(RequestId, SavedCheckpoint)>,
}

impl WantedCheckpoints {
    /// Starts empty, and stays empty in a cache without checkpoints. Reserves memory for all that steps add, so that no
    /// step allocates. `positions` grows at admission: in a step, the next position of an output takes the place of one
    /// that was passed.
    pub fn new(config: &CacheConfig) -> Self {
        let slots = if config.num_checkpoints > 0 { config.max_requests } else { 0 };
        let positions = (0..slots).map(|_| Vec::new()).collect();
        let checkpoints = config.num_checkpoints as usize;
        Self {
            positions,
            due: SlotQueue::new(slots),
            saved: Vec::with_capacity(checkpoints),
            planned: Vec::with_capacity(checkpoints),
            taken: Vec::with_capacity(checkpoints),
        }
    }

    /// Positions at which the request in a slot is to be saved.
    pub fn of(&self, slot: SlotId) -> &[u32] {
        self.positions.get(slot.0 as usize).map_or(&[], Vec::as_slice)
    }

    pub fn add(&mut self, slot: SlotId, boundary: u32) {
        let Some(positions) = self.positions.get_mut(slot.0 as usize) else { return };
        if let Err(at) = positions.binary_search(&boundary) {
            positions.insert(at, boundary);
        }
    }

    /// Marks a request, which is at `boundary`, as due to be saved there.
    pub fn add_due(&mut self, id: RequestId, boundary: u32) {
        if self.due.get(id.slot()) != Some(&(id, boundary)) {
            self.due.set(id.slot(), (id, boundary));
        }
    }

    /// Removes and returns the saved checkpoints of the requests for which `is_wanted` is true.
    pub fn extract_saved(
        &mut self,
        mut is_wanted: impl FnMut(RequestId) -> bool,
    ) -> impl Iterator<Item = (RequestId, SavedCheckpoint)> {
        self.saved.extract_if(.., move |(id, _)| is_wanted(*id))
    }

    /// Removes and returns the positions of a request that gives up its slot: one that is due, then those that it has
    /// not passed.
    pub fn take(&mut self, id: RequestId) -> Vec<u32> {
        let due = self.due.take(id.slot()).map(|(_, boundary)| boundary);
        let all = due.into_iter().chain(self.of(id.slot()).iter().copied()).collect();
        self.forget(id.slot());
        all
    }

    /// Forgets the positions of a request that lie after `boundary`.
    pub fn forget_behind(&mut self, slot: SlotId, boundary: u32) {
        let positions = self.positions.get_mut(slot.0 as usize).into_iter();
        positions.for_each(|positions| positions.retain(|&at| at <= boundary));
        if self.due.get(slot).is_some_and(|&(_, at)| at > boundary) {
            self.due.take(slot);
        }
    }

    /// Forgets all positions of a request that goes on from `boundary`, except a due save at `boundary` itself: the slot
    /// still holds what that needs.
    pub fn restart(&mut self, id: RequestId, boundary: u32) {
        let due = self.due.take(id.slot()).filter(|&due| due == (id, boundary));
        self.forget(id.slot());
        due.into_iter().for_each(|(id, boundary)| self.add_due(id, boundary));
    }

    /// Forgets all positions of a request.
    pub fn forget(&mut self, slot: SlotId) {
        self.positions.get_mut(slot.0 as usize).into_iter().for_each(Vec::clear);
        self.due.take(slot);
    }
}
