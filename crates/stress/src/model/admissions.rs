//! The model of admissions with a prompt, forks, suspended requests and leases.

use std::time::Duration;

use dsv4_kv::reuse::PinRefused;
use dsv4_kv::{Admission, BlockId, KvError, LayerGroup, RequestId};

use super::request::{Kept, Lease, Progress, Request, Share};
use super::sharing::Sharing;
use super::{Model, same};
use crate::answer::{Answer, Pinned, answer};
use crate::op::Name;
use crate::text::{BLOCK, Prefix, Text};

impl Model {
    /// Judges the answer to an admission with a prompt. `blocks` are the blocks of the request.
    ///
    /// # Errors
    /// The fault of the answer.
    pub fn admitted_with(
        &mut self,
        name: Name,
        text: &Text,
        got: Result<Admission, KvError>,
        blocks: &[BlockId],
    ) -> Result<(), String> {
        let (reused, matched) = got.as_ref().map_or((0, 0), |all| (all.reused, all.matched));
        let whole = self.whole_blocks(text);
        let share = self.judge_reuse(text, whole, reused, matched)?;
        let mut request = Request::new(name, text.clone());
        if let (Ok(Admission { id, .. }), true) = (&got, self.shares()) {
            let shared = (1..).zip(blocks).take((reused / BLOCK) as usize);
            let shared = shared.map(|(at, &block)| self.lent(*id, text.blocks(at), block));
            request.blocks = shared.collect::<Result<_, _>>()?;
            request.shared = (0..reused / BLOCK).map(|at| (at, Kept::Tree)).collect();
            request.share = Some(share);
        }
        let got = answer(got.map(|all| all.id));
        // A checkpoint holds the rows that its own position needs, and no earlier ones.
        let written_to = if reused > 0 { reused + self.max_decode_tokens() } else { 0 };
        let at = Progress { tokens: reused, written_to, genuine: reused, from: 0 };
        request.groups[LayerGroup::Trunk.index()] = at;
        if !self.config.group_layers(LayerGroup::Draft).is_empty() {
            request.groups[LayerGroup::Draft.index()] = Progress { from: reused, ..at };
        }
        if self.entered(&got, None, request)? && reused > 0 {
            self.sharing.saw(text.prefix(reused));
        }
        Ok(())
    }

    /// The block of the tree that a new request shares at the end of a prefix; `got` is the block that the cache gave
    /// it.
    fn lent(&mut self, id: RequestId, prefix: Prefix, got: BlockId) -> Result<BlockId, String> {
        if let Some(block) = self.sharing.block(&prefix) {
            return Ok(block);
        }
        if !self.sharing.unseen.contains(&prefix) {
            return Err(format!("{id}: {prefix:?} was evicted"));
        }
        self.take_new(id, got)?;
        self.sharing.saw_block(prefix, got);
        Ok(got)
    }

    /// Checks that the cache can have so much of a prompt of `whole` blocks. Returns the prefix that the request
    /// shares.
    fn judge_reuse(
        &self,
        text: &Text,
        whole: u32,
        reused: u32,
        matched: u32,
    ) -> Result<Share, String> {
        let is_full = self.live.len() as u32 == self.config.max_requests;
        let sharing = &self.sharing;
        let is_whole = reused.is_multiple_of(BLOCK) && matched.is_multiple_of(BLOCK);
        if !is_whole || reused > matched || matched > whole * BLOCK {
            return Err(format!("{reused} of {matched} tokens reused, of {whole} whole blocks"));
        }
        let most = Sharing::deepest(text, whole, |prefix| sharing.may_go_on_from(prefix));
        let least = Sharing::deepest(text, whole, |prefix| sharing.must_go_on_from(prefix));
        let ends_right = reused == 0 || sharing.may_go_on_from(&text.prefix(reused));
        let least = if is_full { 0 } else { least * BLOCK };
        if reused < least || reused > most * BLOCK || !ends_right {
            let most = most * BLOCK;
            return Err(format!("{reused} tokens are reused, should be {least} to {most}"));
        }
        let most = Sharing::deepest(text, whole, |prefix| sharing.may_have(prefix));
        // The host tier may begin a transfer before the admission, and evict blocks for it.
        let is_known = sharing.is_told && !self.has_tier();
        let must = |prefix: &Prefix| is_known || self.is_referred_to(prefix);
        let least = Sharing::deepest(text, most, must);
        let least = if is_full { 0 } else { least * BLOCK };
        if matched < least || matched > most * BLOCK {
            let most = most * BLOCK;
            return Err(format!("{matched} tokens are there, should be {least} to {most}"));
        }
        let every = self.config.checkpoint_interval;
        let is_wanted = |&at: &u32| {
            at == whole * BLOCK || at == matched || (every > 0 && at.is_multiple_of(every))
        };
        let boundaries = (1..=whole).map(|blocks| blocks * BLOCK).filter(is_wanted);
        let boundaries = boundaries.filter(|&at| at > reused).collect();
        Ok(Share { blocks: reused / BLOCK, told: true, boundaries, end: whole * BLOCK })
    }

    /// Judges the answer to a fork. `blocks` are the blocks of the new request.
    ///
    /// # Errors
    /// The fault of the answer.
    pub fn forked(
        &mut self,
        (of, name): (Name, Name),
        token: u32,
        got: Result<RequestId, KvError>,
        blocks: Option<Vec<BlockId>>,
    ) -> Result<(), String> {
        let of = self.handle(of);
        let mut refusal = self.check_known(of).err();
        let mut request = Request::new(name, Text::unshared(name));
        let mut own = 0;
        if let Some(parent) = self.live.get(&of) {
            let tokens = parent.group(LayerGroup::Trunk).tokens;
            let needed = self.blocks_of(LayerGroup::Trunk, tokens);
            let shared = needed.min(tokens / BLOCK);
            own = needed - shared;
            request.groups = parent.groups;
            request.blocks.extend(&parent.blocks[..shared as usize]);
            let kept = |at| (at, parent.shared.get(&at).copied().unwrap_or(Kept::Forks));
            request.shared = (0..shared).map(kept).collect();
            request.says = parent.says.continued(tokens, token);
            // If the draft layers are ahead of the trunk, the copy has the draft rows of the other request's tokens.
            let draft = &mut request.groups[LayerGroup::Draft.index()];
            draft.genuine = draft.genuine.min(tokens);
            let share = parent.share.clone();
            let end = tokens / BLOCK * BLOCK;
            request.share = share.map(|share| Share { boundaries: Vec::new(), end, ..share });
            let is_full = self.live.len() as u32 == self.config.max_requests;
            if own > 0 && !is_full && self.available() == 0 {
                refusal = Some(KvError::OutOfBlocks { needed: 1, free: 0 });
            }
        }
        if let (Ok(id), Some(blocks)) = (&got, blocks) {
            let split = request.blocks.len();
            if blocks.len() != split + own as usize || blocks[..split] != request.blocks {
                return Err(format!("{id} has {blocks:?}, should begin with {:?}", request.blocks));
            }
            blocks[split..].iter().try_for_each(|&block| self.take_new(*id, block))?;
            request.blocks = blocks;
        }
        let shared = request.shared.clone();
        if self.entered(&answer(got), refusal, request)?
            && let Some(parent) = self.live.get_mut(&of)
        {
            parent.shared.extend(shared);
        }
        Ok(())
    }

    /// Judges the answer to a suspension.
    ///
    /// # Errors
    /// The fault of the answer.
    pub fn was_suspended(&mut self, name: Name, got: Result<(), KvError>) -> Result<(), String> {
        let (id, suspended) = (self.handle(name), self.config.max_suspended);
        let is_full = self.sharing.suspended.len() as u32 == suspended;
        let refusal = is_full.then_some(KvError::NoRoomToSuspend { suspended });
        let want = self.check_known(id).and(refusal.map_or(Ok(()), Err));
        if same(&answer(got), &answer(want))?
            && let Some(request) = self.live.remove(&id)
        {
            self.sharing.suspended.insert(name, request);
        }
        Ok(())
    }

    /// Judges the answer to a resumption.
    ///
    /// # Errors
    /// The fault of the answer.
    pub fn resumed(&mut self, name: Name, got: Option<Answer<RequestId>>) -> Result<(), String> {
        let request = self.sharing.suspended.get(&name).cloned();
        match (request, got) {
            (None, None) => Ok(()),
            (Some(request), Some(got)) => {
                if self.entered(&got, None, request)? {
                    self.sharing.suspended.remove(&name);
                }
                Ok(())
            }
            (request, _) => Err(format!("suspended should be {request:?}")),
        }
    }

    /// Judges the end of a suspended request.
    ///
    /// # Errors
    /// The fault of the answer.
    pub fn discarded(&mut self, name: Name, got: bool) -> Result<(), String> {
        same(&Ok(got), &Ok(self.sharing.suspended.remove(&name).is_some())).map(drop)
    }

    /// Judges the answer to a pin.
    ///
    /// # Errors
    /// The fault of the answer.
    pub fn pinned(
        &mut self,
        name: Name,
        (text, until): (&Text, Duration),
        got: Result<Pinned, PinRefused>,
    ) -> Result<(), String> {
        let (sharing, whole) = (&self.sharing, text.prompt_tokens() / BLOCK);
        let most = Sharing::deepest(text, whole, |prefix| sharing.may_go_on_from(prefix));
        let least = Sharing::deepest(text, whole, |prefix| sharing.must_go_on_from(prefix));
        let leased = sharing.leases.values().map(|lease| lease.bytes).sum::<u64>();
        let most_bytes = self.config.lease_bytes;
        match got {
            Err(PinRefused::NothingThere) if least == 0 => Ok(()),
            Err(PinRefused::OverBudget { needed, held, budget })
                if most > 0 && (held, budget) == (leased, most_bytes) && needed > budget - held =>
            {
                Ok(())
            }
            Ok((tokens, bytes))
                if (least.max(1) * BLOCK..=most * BLOCK).contains(&tokens)
                    && self.sharing.may_go_on_from(&text.prefix(tokens))
                    && leased + bytes <= most_bytes =>
            {
                let lease = Lease { text: text.clone(), blocks: tokens / BLOCK, bytes, until };
                self.sharing.leases.insert(name, lease);
                self.sharing.saw(text.prefix(tokens));
                Ok(())
            }
            got => Err(format!("pinned: {got:?}, should be {least} to {most} blocks")),
        }
    }

    /// Judges the end of a lease.
    ///
    /// # Errors
    /// The fault of the answer.
    pub fn unpinned(&mut self, name: Name, got: bool) -> Result<(), String> {
        same(&Ok(got), &Ok(self.sharing.leases.remove(&name).is_some())).map(drop)
    }

    /// Judges the number of leases that expired.
    ///
    /// # Errors
    /// The fault of the answer.
    pub fn expired(&mut self, now: Duration, got: usize) -> Result<(), String> {
        let before = self.sharing.leases.len();
        self.sharing.leases.retain(|_, lease| lease.until >= now);
        same(&Ok(got), &Ok(before - self.sharing.leases.len())).map(drop)
    }
}
