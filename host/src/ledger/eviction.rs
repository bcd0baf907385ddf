//! Eviction of unreferenced blocks and checkpoints; leases.

use std::time::Duration;

use dsv4_kv_prefix::{Lease, Need, PinRefused, RootKey};

use super::Ledger;
use super::open_step::StepRequest;
use super::prefix_tree::Prompt;
use crate::error::KvError;

impl Ledger {
    /// Evicts until `needed` blocks are free.
    ///
    /// # Errors
    /// [`KvError::OutOfBlocks`] if too few can be evicted; then nothing is evicted.
    pub(super) fn require_blocks(&mut self, needed: u32) -> Result<(), KvError> {
        let short = needed.saturating_sub(self.blocks.free());
        let is_free = match self.prefix_cache_parts() {
            None => short == 0,
            Some((prefix_cache, _, mut pools)) => {
                let need = Need { blocks: short, checkpoints: 0 };
                prefix_cache.tree.evict(need, |freed| pools.take_back(freed)).is_ok()
            }
        };
        if is_free {
            return Ok(());
        }
        let free = self.blocks.free() + self.evictable_blocks();
        Err(KvError::OutOfBlocks { needed, free })
    }

    /// Evicts until `saves` checkpoints are free, or as many as possible. If the prefix tree has too few to evict,
    /// gives up the checkpoints of outputs.
    pub(super) fn make_room_for_saves(&mut self, saves: u32) {
        let short = saves.saturating_sub(self.checkpoints.free());
        let Some((prefix_cache, _, mut pools)) = self.prefix_cache_parts() else { return };
        let checkpoints = short.min(prefix_cache.tree.counts().evictable_checkpoints);
        let evicted = prefix_cache
            .tree
            .evict(Need { blocks: 0, checkpoints }, |freed| pools.take_back(freed));
        debug_assert!(evicted.is_ok(), "so many can be evicted: {evicted:?}");
        self.give_up_outputs(saves.saturating_sub(self.checkpoints.free()));
    }

    /// Checkpoints that are free, can be evicted, or are kept aside for outputs.
    pub(super) fn obtainable_checkpoints(&self) -> u32 {
        let evictable = self.tree_counts().evictable_checkpoints;
        self.checkpoints.free() + evictable + self.output_checkpoints()
    }

    /// Number of checkpoints that a step would write if enough were free.
    pub(super) fn wanted_in(&self, step: &[StepRequest]) -> u32 {
        let wanted = |part: &StepRequest| {
            let wanted = self.wanted.of(part.id.slot()).iter();
            wanted.filter(|&&at| (part.start + 1..=part.start + part.tokens).contains(&at)).count()
        };
        step.iter().map(|part| wanted(part) as u32).sum()
    }

    /// Blocks of the prefix tree that no reference protects. A step evicts them when it needs more
    /// than the free blocks.
    #[must_use]
    pub fn evictable_blocks(&self) -> u32 {
        self.tree_counts().evictable_blocks
    }

    /// Number of this prompt's cached blocks that other requests hold already: admitting it does not lower
    /// [`Self::evictable_blocks`] by these. A lookup: it changes nothing, and does not count as a use.
    #[must_use]
    pub fn referenced_blocks(&self, prompt: &Prompt<'_>) -> u32 {
        let Some(prefix_cache) = self.prefix_cache.as_ref() else { return 0 };
        let shared = self.shared_prompt(prompt);
        shared.map_or(0, |(root, tokens)| prefix_cache.tree.referenced(&root, tokens))
    }

    /// Keeps the blocks and checkpoints of the whole blocks of a prefix, down to its deepest checkpoint, until
    /// [`Self::expire`] is called with a later time. The caller chooses the origin of these times. All leases together
    /// keep at most [`CacheConfig::lease_bytes`](crate::CacheConfig::lease_bytes), by default 0, which refuses every
    /// lease.
    ///
    /// # Errors
    /// [`PinRefused`], also if nothing can be shared in this cache.
    pub fn pin(&mut self, prefix: &Prompt<'_>, until: Duration) -> Result<Lease, PinRefused> {
        self.attach_saved();
        let prefix_cache = self.prefix_cache.as_mut().ok_or(PinRefused::NothingThere)?;
        let root = RootKey::new(prefix.salt, prefix.adapter, &prefix_cache.model);
        prefix_cache.tree.pin(&root, prefix.tokens, until)
    }

    /// Ends a lease; `false` if it has expired, or belongs to another cache.
    pub fn unpin(&mut self, lease: Lease) -> bool {
        let Some((prefix_cache, _, mut pools)) = self.prefix_cache_parts() else { return false };
        prefix_cache.tree.unpin(lease, |freed| pools.take_back(freed)).unwrap_or(false)
    }

    /// Ends the leases whose time is before `now`; returns their number.
    pub fn expire(&mut self, now: Duration) -> usize {
        let Some((prefix_cache, _, mut pools)) = self.prefix_cache_parts() else { return 0 };
        prefix_cache.tree.expire(now, |freed| pools.take_back(freed))
    }
}
