//! Prefix reuse: what a prompt continues from, and which blocks and checkpoints move to the prefix tree.

use dsv4_kv_prefix::Origin;
use kv_layout::geometry::BLOCK_TOKENS;

use super::Ledger;
use super::open_step::Accepted;
use super::prefix_tree::{Admission, Pools, Prompt, RequestPrefix, Sharing};
use crate::block::{BLOCK, Held};
use crate::checkpoints::{SavedCheckpoint, SavedPlace};
use crate::error::{KvError, TokenMismatch};
use crate::ids::{BlockId, LayerGroup, RequestId, SlotId};
use crate::ledger::requests::Requests;

impl Ledger {
    /// Admits a request with the blocks and tokens that it shares with earlier requests. For a ledger without
    /// device memory; with a cache, call [`KvCacheManager::admit_with`](crate::KvCacheManager::admit_with).
    ///
    /// # Errors
    /// [`KvError::NoFreeSlot`].
    pub fn admit_with(&mut self, prompt: &Prompt<'_>) -> Result<Admission, KvError> {
        let (admission, _) = self.adopt(prompt)?;
        self.enter_restored(admission.id, admission.reused)?;
        self.plan_checkpoints(admission.id)?;
        Ok(admission)
    }

    /// Admits a request with the blocks that it shares. Also returns the checkpoint from which its slot must be
    /// restored, if it shares any. The request has no tokens yet.
    pub(crate) fn adopt(
        &mut self,
        prompt: &Prompt<'_>,
    ) -> Result<(Admission, Option<SavedPlace>), KvError> {
        let id = self.admit()?;
        self.attach_saved();
        let shared = self.shared_prompt(prompt);
        let Self { sharing: Some(sharing), requests, .. } = self else {
            return Ok((Admission { id, reused: 0, matched: 0 }, None));
        };
        let Some((root, tokens)) = shared else { unreachable!("prompts are shared in this cache") };
        let adopted = sharing.tree.adopt(&root, tokens);
        let (reused, matched) = (adopted.reused, adopted.matched);
        let place = sharing.tree.checkpoint(&adopted.reference).ok().flatten();
        let place = place.map(SavedCheckpoint::place);
        // Offered again, so that this use counts as a use in the lower tier too.
        sharing.tree.place_at(&adopted.reference).into_iter().for_each(|at| sharing.offers.add(at));
        if let (Some(request), Ok(path)) =
            (requests.get_mut(id), sharing.tree.blocks(&adopted.reference))
        {
            request.blocks.extend(path.map(|(_, block)| Held::shared(block)));
            request.blocks.reverse();
        }
        sharing.of_slot[id.slot().0 as usize] = Some(RequestPrefix {
            reference: adopted.reference,
            tokens: sharing.token_buffer(&[]),
            prompt: (reused, tokens[reused as usize..].into()),
            checkpoints: sharing.placement.checkpoints(tokens.len() as u32, matched),
            next_output: 0,
            can_register: true,
        });
        Ok((Admission { id, reused, matched }, place))
    }

    /// Wants the planned checkpoints that a request has not passed: those of its prompt, and the first of its answer. None
    /// of a request that registers no more blocks: the prefix tree would not take them.
    pub(crate) fn plan_checkpoints(&mut self, id: RequestId) -> Result<(), KvError> {
        let start = self.committed(id)?;
        let request_prefix = self.sharing.as_ref().and_then(|sharing| sharing.of(id.slot()));
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

    /// Removes and returns the blocks that were freed since the last call; none unless the cache is poisoned.
    pub(crate) fn take_freed(&mut self) -> impl Iterator<Item = BlockId> {
        std::iter::from_fn(|| self.freed.pop().map(BlockId))
    }

    /// Refuses token ids that differ from the request's prompt: later requests would reuse rows of other tokens.
    pub(super) fn check_prompt_tokens(
        &self,
        group: LayerGroup,
        part: &Accepted<'_>,
    ) -> Result<(), KvError> {
        let Accepted { id: request, tokens, .. } = *part;
        let request_prefix = self.sharing.as_ref().and_then(|sharing| sharing.of(request.slot()));
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
        if group != LayerGroup::Trunk || self.sharing.is_none() {
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
        let Some((sharing, requests, mut pools)) = self.sharing_parts() else { return };
        let Sharing { tree, of_slot, .. } = sharing;
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
        let request_prefix = self.sharing.as_ref().and_then(|sharing| sharing.of(slot));
        let registered = request_prefix
            .map_or(0, |request_prefix| request_prefix.reference.blocks() * BLOCK_TOKENS);
        self.saves.forget_behind(slot, registered);
    }

    /// Gives the prefix tree the saved checkpoints of its requests; those of answers are kept
    /// aside. The checkpoints of other requests stay for [`Self::take_saved`].
    pub(super) fn attach_saved(&mut self) {
        let Self { sharing: Some(sharing), requests, saves, checkpoints, .. } = self else {
            return;
        };
        let Sharing { tree, of_slot, offers, outputs, keeps_outputs, .. } = &mut **sharing;
        let of = |id: RequestId| requests.get(id).and(of_slot[id.slot().0 as usize].as_ref());
        for (id, saved) in saves.extract_saved(|id| of(id).is_some()) {
            let refused = match of(id).and_then(|request_prefix| request_prefix.place_of(&saved)) {
                None => Some(saved),
                Some((.., Origin::Output)) if *keeps_outputs => outputs.set(id.slot(), saved),
                Some(place) => offers.attach(tree, place, saved),
            };
            refused.into_iter().for_each(|saved| checkpoints.give_back(saved));
        }
    }

    /// Ends the use of the prefix tree by a request: its saved checkpoints go to the tree, its reference is released.
    pub(super) fn stop_sharing(&mut self, slot: SlotId) {
        self.attach_saved();
        self.keep_output(slot);
        let request_prefix = self.take_sharer(slot);
        self.release_sharer(request_prefix);
    }

    /// Removes and returns a request's place in the prefix tree, when it gives up its slot.
    pub(super) fn take_sharer(&mut self, slot: SlotId) -> Option<RequestPrefix> {
        self.sharing.as_mut()?.of_slot[slot.0 as usize].take()
    }

    /// Sets the place in the prefix tree of a resumed request, which is now in `slot`.
    pub(super) fn put_sharer(&mut self, slot: SlotId, request_prefix: Option<RequestPrefix>) {
        if let Some(sharing) = self.sharing.as_mut() {
            sharing.of_slot[slot.0 as usize] = request_prefix;
        }
    }

    /// Releases a request's reference to the prefix tree.
    pub(super) fn release_sharer(&mut self, request_prefix: Option<RequestPrefix>) {
        let (Some(request_prefix), Some((sharing, _, mut pools))) =
            (request_prefix, self.sharing_parts())
        else {
            return;
        };
        let released =
            sharing.tree.release(request_prefix.reference, |freed| pools.take_back(freed));
        debug_assert!(released.is_ok(), "the reference is this tree's");
    }

    /// Gives a fork its own place in the prefix tree. The fork, in slot `to`, has the `committed` tokens and the blocks
    /// of the request in `from`. All later tokens of the fork count as its answer, even if the other request is still
    /// in its prompt.
    pub(super) fn fork_sharing(&mut self, from: SlotId, to: SlotId, committed: u32) {
        let Some(sharing) = self.sharing.as_deref_mut() else { return };
        let Some(request_prefix) = sharing.of_slot[from.0 as usize].as_ref() else { return };
        let Ok(reference) = sharing.tree.refer_again(&request_prefix.reference) else {
            unreachable!("the reference is this tree's")
        };
        let tokens = sharing.token_buffer(&request_prefix.tokens);
        let checkpoints = sharing.placement.checkpoints(committed.saturating_add(1), 0);
        let (prompt, can_register) = ((0, Box::default()), request_prefix.can_register);
        sharing.of_slot[to.0 as usize] = Some(RequestPrefix {
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
    pub(super) fn sharing_parts(&mut self) -> Option<(&mut Sharing, &mut Requests, Pools<'_>)> {
        let Self { sharing, requests, blocks, checkpoints, freed, .. } = self;
        Some((sharing.as_deref_mut()?, requests, Pools { blocks, checkpoints, freed }))
    }
}
