//! The model of shared prefixes: the references to the tree, the blocks and checkpoints that the tree may have, and
//! those that it must have.
//!
//! The order of eviction is not modelled. A prefix without a reference may be in the tree; a prefix with a reference
//! must be. If events are logged, the model knows from them which blocks are in the tree.

use std::collections::{BTreeMap, BTreeSet};

use dsv4_kv::{BlockId, RequestId};

use super::Model;
use super::request::{Kept, Request, Share};
use crate::answer::Counts;
use crate::op::{Accept, Name};
use crate::text::{BLOCK, Prefix, Text};

impl Model {
    /// Whether requests share prefixes in this cache.
    #[must_use]
    pub fn shares(&self) -> bool {
        self.config.num_checkpoints > 0 && self.has_entries
    }

    /// Names of the suspended requests.
    pub fn suspended(&self) -> impl ExactSizeIterator<Item = Name> {
        self.sharing.suspended.keys().copied()
    }

    /// Names of the leases.
    pub fn leases(&self) -> impl ExactSizeIterator<Item = Name> {
        self.sharing.leases.keys().copied()
    }

    /// Number of blocks that a step can take.
    pub(super) fn available(&self) -> u32 {
        let counts = self.sharing.counts.filter(|_| self.shares());
        counts.map_or_else(|| self.free_blocks(), |counts| counts.free + counts.evictable)
    }

    /// All references to the tree: texts, and the number of their blocks.
    fn references(&self) -> impl Iterator<Item = (&Text, u32)> {
        let requests = self.live.values().chain(self.sharing.suspended.values());
        let share = |request: &'_ Request| request.share.as_ref().map(|share| share.blocks);
        let shares = requests.filter_map(move |request| Some((&request.says, share(request)?)));
        shares.chain(self.sharing.leases.values().map(|lease| (&lease.text, lease.blocks)))
    }

    /// All prefixes with a reference.
    fn referred(&self) -> BTreeSet<Prefix> {
        self.references()
            .flat_map(|(text, blocks)| (1..=blocks).map(|blocks| text.blocks(blocks)))
            .collect()
    }

    /// Whether this prefix has a reference.
    pub(super) fn is_referred_to(&self, prefix: &Prefix) -> bool {
        let blocks = prefix.tokens() / BLOCK;
        self.references().any(|(text, held)| held >= blocks && text.blocks(blocks) == *prefix)
    }

    /// Records that a request took a block, which must have been free or evicted.
    pub(super) fn take_new(&mut self, id: RequestId, block: BlockId) -> Result<(), String> {
        let mut requests = self.live.values().chain(self.sharing.suspended.values());
        let owned = requests.any(|request| request.blocks.contains(&block));
        let prefix = self.sharing.tree.get(&block);
        let referred = prefix.is_some_and(|prefix| self.is_referred_to(prefix));
        if owned || referred || block.0 >= self.config.num_blocks {
            return Err(format!("{id}: {block:?} was not free"));
        }
        if let Some(prefix) = self.sharing.tree.remove(&block) {
            self.sharing.blocks.remove(&prefix);
            self.sharing.checkpoints.remove(&prefix);
        }
        Ok(())
    }

    /// Records a commit of the trunk. [`Self::settle`] then finds out which of its blocks moved to the tree. `saves` is
    /// whether the step could save checkpoints.
    pub(super) fn tell(&mut self, commit: &[Accept], saves: bool) {
        for accept in commit {
            let id = self.handle(accept.request);
            let Some(request) = self.live.get_mut(&id) else { continue };
            let before = request.groups[0].tokens - accept.accepted;
            let Some(share) = request.share.as_mut() else { continue };
            share.told &= accept.told == accept.accepted;
            if share.told {
                self.sharing.pending.push((id, before, saves));
            }
        }
    }

    /// After an operation: records which of the committed blocks moved to the tree. `own` returns, for each block of a
    /// request, whether the request is its only owner.
    ///
    /// # Errors
    /// The fault.
    pub fn settle(&mut self, own: &dyn Fn(RequestId) -> Option<Vec<bool>>) -> Result<(), String> {
        for (id, before, saves) in std::mem::take(&mut self.sharing.pending) {
            let flags = own(id).ok_or_else(|| format!("{id} has no blocks"))?;
            let Some(request) = self.live.get(&id) else { continue };
            let closed = request.groups[0].tokens / BLOCK;
            let first = request.share.as_ref().map_or(closed, |share| share.blocks);
            for at in first..closed {
                if !self.extend(id, at, flags.get(at as usize) == Some(&true))? {
                    break;
                }
            }
            self.save(id, before, saves);
        }
        let before = std::mem::take(&mut self.sharing.seen);
        let kept = before.into_iter().filter(|prefix| self.is_referred_to(prefix)).collect();
        self.sharing.seen = kept;
        Ok(())
    }

    /// The request refers to one more block of the tree: either its own block was registered, or the tree had an equal
    /// one. Returns false if the request cannot refer to more blocks.
    fn extend(&mut self, id: RequestId, at: u32, is_own: bool) -> Result<bool, String> {
        let Some(request) = self.live.get(&id) else { return Ok(false) };
        if request.share.is_none() {
            return Ok(false);
        }
        let is_lent = request.shared.contains_key(&at);
        let (prefix, block) = (request.says.blocks(at + 1), request.blocks[at as usize]);
        let (may, must) = (self.sharing.may_have(&prefix), self.is_referred_to(&prefix));
        if is_lent {
            self.with_share(id, |_, share| share.told = false);
            return Ok(false);
        }
        if is_own && !may {
            return Err(format!("{id}: block {at} was not registered"));
        }
        if !is_own && must {
            return Err(format!("{id}: block {at} was registered, and there was one already"));
        }
        if !is_own {
            self.sharing.register(prefix, block);
            self.with_share(id, |shared, _| {
                shared.insert(at, Kept::Tree);
            });
        }
        self.with_share(id, |_, share| share.blocks = at + 1);
        Ok(true)
    }

    fn with_share(
        &mut self,
        id: RequestId,
        with: impl FnOnce(&mut BTreeMap<u32, Kept>, &mut Share),
    ) {
        if let Some(Request { shared, share: Some(share), .. }) = self.live.get_mut(&id) {
            with(shared, share);
        }
    }

    /// Records the positions at which the committed step may have saved the request.
    fn save(&mut self, id: RequestId, before: u32, saves: bool) {
        let Some(request) = self.live.get(&id).filter(|_| saves) else { return };
        let Some(share) = &request.share else { return };
        let most = request.groups[0].tokens.min(share.blocks * BLOCK);
        let all = (BLOCK..=most).step_by(BLOCK as usize);
        let passed = all.filter(|&at| before < at && share.may_be_saved_at(at));
        let passed: Vec<_> = passed.map(|at| request.says.prefix(at)).collect();
        if self.has_tier() {
            self.sharing.tier.saved(&passed);
        }
        self.sharing.checkpoints.extend(passed);
    }

    /// Most checkpoints that a step begins by copying rows from the rings, if its launches are for `most` tokens per
    /// request.
    pub(super) fn most_copies(&self, parts: &[dsv4_kv::StepRequest], most: u32) -> u32 {
        let copied = |part: &dsv4_kv::StepRequest| {
            let share = self.live.get(&part.id).and_then(|request| request.share.as_ref());
            let inside = |&at: &u32| part.start < at && at <= part.start + part.tokens;
            let older = |&at: &u32| at - BLOCK < part.start;
            let all = share.into_iter().flat_map(|share| share.boundaries_behind(part.start));
            all.filter(inside).filter(older).count() as u32
        };
        let parts = parts.iter().filter(|_| most > self.max_decode_tokens());
        parts.map(copied).sum()
    }

    /// Checks that every block is free, or belongs to one request, several forks, or the tree, and that the tree has
    /// all prefixes with a reference. `refused`: the last operation was refused, and must have changed nothing.
    /// `is_moving`: a transfer between the device and host memory is under way, and may hold references.
    ///
    /// # Errors
    /// The fault.
    pub fn conserved(
        &mut self,
        counts: Counts,
        refused: bool,
        is_moving: bool,
    ) -> Result<(), String> {
        let before = self.sharing.counts.filter(|_| refused);
        if before.is_some_and(|before| before != counts) {
            return Err(format!("a refusal left {counts:?} of {before:?}"));
        }
        let mut held: BTreeMap<BlockId, Option<Kept>> = BTreeMap::new();
        for request in self.live.values().chain(self.sharing.suspended.values()) {
            for (at, &block) in (0..).zip(&request.blocks) {
                let kept = request.shared.get(&at).copied();
                let before = held.insert(block, kept);
                if before.is_some_and(|before| before != kept || kept.is_none()) {
                    return Err(format!("{block:?} is of {before:?} and of {kept:?}"));
                }
            }
        }
        let own = held.values().filter(|&&kept| kept != Some(Kept::Tree)).count() as u32;
        self.check_arriving(counts, own)?;
        let referred = self.referred();
        if let Some(lost) = referred.iter().find(|prefix| !self.sharing.may_have(prefix)) {
            return Err(format!("{lost:?} is referred to and nowhere"));
        }
        let most = (self.sharing.tree.len() + self.sharing.unseen.len()) as u32;
        let (least, kept) = (referred.len() as u32, counts.tree - counts.evictable);
        let nobody = least == 0 && !is_moving;
        if counts.tree > most || kept < least || (nobody && kept > 0) {
            return Err(format!("{counts:?}: {least} blocks are referred to, {most} can be there"));
        }
        let seen = self.sharing.seen.len() as u32;
        if counts.tree_checkpoints < seen || counts.outputs > self.live.len() as u32 {
            return Err(format!("{counts:?}: {seen} checkpoints must be there"));
        }
        self.sharing.counts = Some(counts);
        Ok(())
    }

    /// Judges the blocks that exist according to the events: as many as are counted, all with a reference, and none
    /// that is impossible.
    ///
    /// # Errors
    /// The fault.
    pub fn judge_events(&mut self, there: &BTreeSet<&Prefix>) -> Result<(), String> {
        let blocks = self.sharing.counts.map_or(0, |counts| counts.tree);
        if there.len() as u32 != blocks {
            return Err(format!("{blocks} blocks are there; events say {there:?}"));
        }
        if let Some(lost) = self.referred().iter().find(|prefix| !there.contains(prefix)) {
            return Err(format!("{lost:?} is referred to; events say {there:?}"));
        }
        if let Some(other) = there.iter().find(|prefix| !self.sharing.may_have(prefix)) {
            return Err(format!("events say that {other:?} is there, which nobody told"));
        }
        self.sharing.only(there);
        Ok(())
    }
}
