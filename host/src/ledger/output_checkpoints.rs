//! Checkpoints of outputs. While a request decodes, it is saved at each block boundary, and only the latest of these
//! checkpoints is kept: outside the prefix tree while the request runs, in it once the request ends or is suspended,
//! for the next turn of the conversation. Those outside are given up when a checkpoint is needed and the tree has none
//! to evict.

use kv_layout::geometry::BLOCK_TOKENS;

use super::Ledger;
use super::prefix_tree::PrefixCache;
use crate::ids::SlotId;

impl Ledger {
    /// Checkpoints of the outputs of requests that run, which the prefix tree does not have yet.
    #[must_use]
    pub fn output_checkpoints(&self) -> u32 {
        self.prefix_cache.as_ref().map_or(0, |prefix_cache| prefix_cache.outputs.len() as u32)
    }

    /// Wants a checkpoint at the next boundary after `tokens`, the number of tokens that the request has, unless that
    /// boundary or a later one is wanted already. The first call comes with at least the last boundary of the prompt.
    pub(super) fn want_output(&mut self, slot: SlotId, tokens: u32) {
        let Some(prefix_cache) =
            self.prefix_cache.as_mut().filter(|prefix_cache| prefix_cache.keeps_outputs)
        else {
            return;
        };
        let Some(request_prefix) = prefix_cache.of_slot[slot.0 as usize].as_mut() else { return };
        if !request_prefix.can_register || tokens < request_prefix.next_output {
            return;
        }
        request_prefix.next_output = (tokens / BLOCK_TOKENS + 1) * BLOCK_TOKENS;
        if request_prefix.next_output <= self.limits.context {
            self.wanted.add(slot, request_prefix.next_output);
        }
    }

    /// Moves the checkpoint of an output to the prefix tree, when its request gives up its slot.
    pub(super) fn keep_output(&mut self, slot: SlotId) {
        let Self { prefix_cache: Some(prefix_cache), checkpoints, .. } = self else { return };
        let PrefixCache { tree, of_slot, offers, outputs, .. } = &mut **prefix_cache;
        let Some(saved) = outputs.take(slot) else { return };
        let request_prefix = of_slot[slot.0 as usize].as_ref();
        let refused =
            match request_prefix.and_then(|request_prefix| request_prefix.attach_point(&saved)) {
                None => Some(saved),
                Some(point) => offers.attach(tree, point, saved),
            };
        refused.into_iter().for_each(|saved| checkpoints.give_back(saved));
    }

    /// Gives up the `count` oldest checkpoints of outputs, or all if there are fewer.
    pub(super) fn give_up_outputs(&mut self, count: u32) {
        let Self { prefix_cache: Some(prefix_cache), checkpoints, .. } = self else { return };
        let oldest = std::iter::from_fn(|| prefix_cache.outputs.take_oldest());
        oldest.take(count as usize).for_each(|saved| checkpoints.give_back(saved));
    }
}
