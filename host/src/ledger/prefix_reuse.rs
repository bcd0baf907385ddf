//! Prefix reuse: what a prompt continues from, and which blocks and checkpoints move to the prefix tree.

use dsv4_kv_prefix::Origin;
use kv_layout::geometry::BLOCK_TOKENS;

use super::Ledger;
use super::open_step::Accepted;
use super::prefix_tree::{Admission, Pools, PrefixCache, Prompt, RequestPrefix};
use crate::block::{BLOCK, RequestBlock};
use crate::checkpoints::{SavedCheckpoint, SavedPlace};
use crate::error::{KvError, TokenMismatch};
use crate::ids::{LayerGroup, RequestId, SlotId};
use crate::ledger::requests::Requests;

impl Ledger {
    /// Admits a request with the blocks and tokens that it shares with earlier requests. For a ledger without
    /// device memory; with a cache, call [`KvCacheManager::admit_with`](crate::KvCacheManager::admit_with).
    ///
    /// # Errors
    /// [`KvError::NoFreeSlot`].
    pub fn admit_with(&mut self, prompt: &Prompt<'_>) -> Result<Admission, KvError> {
        let (admission, _) = self.admit_matched(prompt)?;
        self.enter_restored(admission.id, admission.reused)?;
        self.plan_checkpoints(admission.id)?;
        Ok(admission)
    }

    /// Admits a request with the blocks that it shares. Also returns the checkpoint from which its slot must be
    /// restored, if it shares any. The request has no tokens yet.
    pub(crate) fn admit_matched(
        &mut self,
        prompt: &Prompt<'_>,
    ) -> Result<(Admission, Option<SavedPlace>), KvError> {
        let id = self.admit()?;
        self.attach_saved();
        let shared = self.shared_prompt(prompt);
        let Self { prefix_cache: Some(prefix_cache), requests, .. } = self else {
            return Ok((Admission { id, reused: 0, matched: 0 }, None));
        };
        let Some((root, tokens)) = shared else { unreachable!("prompts are shared in this cache") };
        let found = prefix_cache.tree.match_and_lock(&root, tokens);
        let (reused, matched) = (found.reused, found.matched);
        let place = prefix_cache.tree.checkpoint(&found.reference).ok().flatten();
        let place = place.map(SavedCheckpoint::place);
        // Offered again, so that this use counts as a use in the lower tier too.
        let used = prefix_cache.tree.weak_checkpoint(&found.reference);
        used.into_iter().for_each(|checkpoint| prefix_cache.offers.add(checkpoint));
        if let (Some(request), Ok(path)) =
            (requests.get_mut(id), prefix_cache.tree.blocks(&found.reference))
        {
            request.blocks.extend(path.map(|(_, block)| RequestBlock::shared(block)));
            request.blocks.reverse();
        }
        prefix_cache.of_slot[id.slot().0 as usize] = Some(RequestPrefix {
            reference: found.reference,
            tokens: prefix_cache.token_buffer(&[]),
            prompt: (reused, tokens[reused as usize..].into()),
            checkpoints: prefix_cache.placement.checkpoints(tokens.len() as u32, matched),
            next_output: 0,
            can_register: true,
        });
        Ok((Admission { id, reused, matched }, place))
    }

    /// Wants the planned checkpoints that a request has not passed: those of its prompt, and the first of its output.
    /// None of a request that registers no more blocks: the prefix tree would not take them.
    pub(crate) fn plan_checkpoints(&mut self, id: RequestId) -> Result<(), KvError> {
        let start = self.committed(id)?;
        let request_prefix =
            self.prefix_cache.as_ref().and_then(|prefix_cache| prefix_cache.of(id.slot()));
        let request_prefix = request_prefix.filter(|request_prefix| request_prefix.can_register);
        let Some(checkpoints) = request_prefix.map(|request_prefix| request_prefix.checkpoints)
        else {
            return Ok(());
        };
        let next = |&(at, _): &(u32, Origin)| checkpoints.after(at);
        let mut all = std::iter::successors(checkpoints.after(start), next);
        all.try_for_each(|(boundary, _)| self.want_checkpoint(id, boundary))?;
        self.want_output(id.slot(), start.max(checkpoints.end()));
        Ok(())
    }

    /// Refuses token ids that differ from the request's prompt: later requests would reuse rows of other tokens.
    pub(super) fn check_prompt_tokens(
        &self,
        group: LayerGroup,
        part: &Accepted<'_>,
    ) -> Result<(), KvError> {
        let Accepted { id: request, tokens, .. } = *part;
        let request_prefix =
            self.prefix_cache.as_ref().and_then(|prefix_cache| prefix_cache.of(request.slot()));
        let Some(request_prefix) = request_prefix.filter(|_| group == LayerGroup::Trunk) else {
            return Ok(());
        };
        let committed = self.committed(request)?;
        match request_prefix.first_mismatch(committed, tokens) {
            None => Ok(()),
            Some((at, expected)) => {
                let (position, token) = (committed + at as u32, tokens[at]);
                Err(KvError::PromptMismatch(TokenMismatch { request, position, token, expected }))
            }
        }
    }

    /// Moves the blocks that a committed step completed to the prefix tree.
    pub(super) fn register(&mut self, group: LayerGroup, accepted: &[Accepted<'_>]) {
        if group != LayerGroup::Trunk || self.prefix_cache.is_none() {
            return;
        }
        for part in accepted {
            self.register_part(part);
            if let Ok(committed) = self.committed(part.id) {
                self.want_output(part.id.slot(), committed);
            }
        }
        self.attach_saved();
    }

    fn register_part(&mut self, part: &Accepted<'_>) {
        let slot = part.id.slot();
        let Some((prefix_cache, requests, mut pools)) = self.prefix_cache_parts() else { return };
        let PrefixCache { tree, of_slot, .. } = prefix_cache;
        let Some(request_prefix) = of_slot[slot.0 as usize].as_mut() else { return };
        // After tokens without ids, the prefix of all later blocks is unknown.
        request_prefix.can_register &= part.tokens.len() == part.accepted as usize;
        if !request_prefix.can_register {
            return self.save_no_further(slot);
        }
        request_prefix.tokens.extend_from_slice(part.tokens);
        let Some(request) = requests.of_slot_mut(slot) else { return };
        let (closed, _) = request_prefix.tokens.as_chunks::<BLOCK>();
        let held = request
            .blocks
            .get_mut(request_prefix.reference.blocks() as usize..)
            .unwrap_or_default();
        // A block that a fork shares cannot move to the tree, and neither can the blocks after it.
        let own = held.iter().zip(closed).take_while(|(held, _)| held.is_own()).count();
        request_prefix.can_register = own == closed.len();
        let take = |index: usize| match held[index].share() {
            Some(block) => block,
            None => unreachable!("own blocks were counted, and each is asked for once"),
        };
        let freed = |freed| pools.take_back(freed);
        let registered = tree.extend(&mut request_prefix.reference, &closed[..own], take, freed);
        debug_assert!(registered.is_ok(), "the reference is this tree's");
        request_prefix.tokens.drain(..own * BLOCK);
        if !request_prefix.can_register {
            self.save_no_further(slot);
        }
    }

    /// Forgets the wanted checkpoints after the registered blocks, for a request that registers no more: the prefix
    /// tree would not take them.
    fn save_no_further(&mut self, slot: SlotId) {
        let request_prefix =
            self.prefix_cache.as_ref().and_then(|prefix_cache| prefix_cache.of(slot));
        let registered = request_prefix
            .map_or(0, |request_prefix| request_prefix.reference.blocks() * BLOCK_TOKENS);
        self.wanted.forget_behind(slot, registered);
    }

    /// Gives the prefix tree the saved checkpoints of its requests; those of outputs are kept
    /// aside. The checkpoints of other requests stay for [`Self::take_saved`].
    pub(super) fn attach_saved(&mut self) {
        let Self { prefix_cache: Some(prefix_cache), requests, wanted, checkpoints, .. } = self
        else {
            return;
        };
        let PrefixCache { tree, of_slot, offers, outputs, keeps_outputs, .. } = &mut **prefix_cache;
        let of = |id: RequestId| requests.get(id).and(of_slot[id.slot().0 as usize].as_ref());
        for (id, saved) in wanted.extract_saved(|id| of(id).is_some()) {
            let refused =
                match of(id).and_then(|request_prefix| request_prefix.attach_point(&saved)) {
                    None => Some(saved),
                    Some((.., Origin::Output)) if *keeps_outputs => outputs.set(id.slot(), saved),
                    Some(point) => offers.attach(tree, point, saved),
                };
            refused.into_iter().for_each(|saved| checkpoints.give_back(saved));
        }
    }

    /// Ends the use of the prefix tree by a request: its saved checkpoints go to the tree, its reference is released.
    pub(super) fn leave_prefix_cache(&mut self, slot: SlotId) {
        self.attach_saved();
        self.keep_output(slot);
        let request_prefix = self.take_request_prefix(slot);
        self.release_request_prefix(request_prefix);
    }

    /// Removes and returns a request's reference to the prefix tree, with its other data there, when it gives up its
    /// slot.
    pub(super) fn take_request_prefix(&mut self, slot: SlotId) -> Option<RequestPrefix> {
        self.prefix_cache.as_mut()?.of_slot[slot.0 as usize].take()
    }

    /// Puts back the data of a resumed request, which is now in `slot`.
    pub(super) fn put_request_prefix(
        &mut self,
        slot: SlotId,
        request_prefix: Option<RequestPrefix>,
    ) {
        if let Some(prefix_cache) = self.prefix_cache.as_mut() {
            prefix_cache.of_slot[slot.0 as usize] = request_prefix;
        }
    }

    /// Releases a request's reference to the prefix tree.
    pub(super) fn release_request_prefix(&mut self, request_prefix: Option<RequestPrefix>) {
        let (Some(request_prefix), Some((prefix_cache, _, mut pools))) =
            (request_prefix, self.prefix_cache_parts())
        else {
            return;
        };
        let released =
            prefix_cache.tree.release(request_prefix.reference, |freed| pools.take_back(freed));
        debug_assert!(released.is_ok(), "the reference is this tree's");
    }

    /// Gives a fork its own reference to the prefix tree. The fork, in slot `to`, has the `committed` tokens and the
    /// blocks of the request in `from`. All later tokens of the fork count as its output, even if the other request is
    /// still in its prompt.
    pub(super) fn fork_prefix(&mut self, from: SlotId, to: SlotId, committed: u32) {
        let Some(prefix_cache) = self.prefix_cache.as_deref_mut() else { return };
        let Some(request_prefix) = prefix_cache.of_slot[from.0 as usize].as_ref() else { return };
        let Ok(reference) = prefix_cache.tree.lock_again(&request_prefix.reference) else {
            unreachable!("the reference is this tree's")
        };
        let tokens = prefix_cache.token_buffer(&request_prefix.tokens);
        let checkpoints = prefix_cache.placement.checkpoints(committed.saturating_add(1), 0);
        let (prompt, can_register) = ((0, Box::default()), request_prefix.can_register);
        prefix_cache.of_slot[to.0 as usize] = Some(RequestPrefix {
            reference,
            tokens,
            prompt,
            checkpoints,
            next_output: 0,
            can_register,
        });
        self.want_output(to, committed);
    }

    /// The prefix tree with its users, the requests, and the pools that take back what the tree gives up.
    pub(super) fn prefix_cache_parts(
        &mut self,
    ) -> Option<(&mut PrefixCache, &mut Requests, Pools<'_>)> {
        let Self { prefix_cache, requests, blocks, checkpoints, to_poison, .. } = self;
        Some((prefix_cache.as_deref_mut()?, requests, Pools { blocks, checkpoints, to_poison }))
    }
}
