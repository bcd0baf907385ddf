//! Checkpoints of answers. A request that answers is saved at each boundary that it passes, and only the last one is kept:
//! aside while the request runs, and in the prefix tree when it ends, for the next turn of the conversation. What is aside
//! goes when room is needed and nobody else's can be evicted.

use kv_layout::geometry::BLOCK_TOKENS;

use super::Ledger;
use super::prefix_tree::Sharing;
use crate::checkpoints::SavedCheckpoint;
use crate::ids::SlotId;

impl Ledger {
    /// Checkpoints of the answers of requests that run, which the prefix tree does not have yet.
    #[must_use]
    pub fn output_checkpoints(&self) -> u32 {
        self.sharing.as_ref().map_or(0, |sharing| sharing.outputs.len() as u32)
    }

    /// The request has `tokens` tokens, the last of its prompt's boundaries at least: wants the boundary behind them, unless
    /// it does already.
    pub(super) fn want_output(&mut self, slot: SlotId, tokens: u32) {
        let Some(sharing) = self.sharing.as_mut().filter(|sharing| sharing.keeps_outputs) else {
            return;
        };
        let Some(sharer) = sharing.sharers[slot.0 as usize].as_mut() else { return };
        if !sharer.is_told || tokens < sharer.next_output {
            return;
        }
        sharer.next_output = (tokens / BLOCK_TOKENS + 1) * BLOCK_TOKENS;
        if sharer.next_output <= self.limits.context {
            self.saves.add(slot, sharer.next_output);
        }
    }

    /// The request gives its slot up: its answer's checkpoint becomes the prefix tree's.
    pub(super) fn keep_output(&mut self, slot: SlotId) {
        let Self { sharing: Some(sharing), checkpoints, .. } = self else { return };
        let Sharing { tree, sharers, offers, outputs, .. } = &mut **sharing;
        let Some(saved) = take(outputs, slot) else { return };
        let sharer = sharers[slot.0 as usize].as_ref();
        let refused = match sharer.and_then(|sharer| sharer.place_of(&saved)) {
            None => Some(saved),
            Some(place) => offers.attach(tree, place, saved),
        };
        refused.into_iter().for_each(|saved| checkpoints.give_back(saved));
    }

    /// Gives the oldest checkpoints of answers up: `count` of them, or all if there are fewer.
    pub(super) fn give_up_outputs(&mut self, count: u32) {
        let Self { sharing: Some(sharing), checkpoints, .. } = self else { return };
        let count = sharing.outputs.len().min(count as usize);
        sharing.outputs.drain(..count).for_each(|(_, saved)| checkpoints.give_back(saved));
    }
}

/// The checkpoint becomes that of the slot's request; the one before.
pub(super) fn replace(
    outputs: &mut Vec<(SlotId, SavedCheckpoint)>,
    slot: SlotId,
    saved: SavedCheckpoint,
) -> Option<SavedCheckpoint> {
    let before = take(outputs, slot);
    outputs.push((slot, saved));
    before
}

fn take(outputs: &mut Vec<(SlotId, SavedCheckpoint)>, slot: SlotId) -> Option<SavedCheckpoint> {
    let at = outputs.iter().position(|(of, _)| *of == slot)?;
    Some(outputs.remove(at).1)
}
