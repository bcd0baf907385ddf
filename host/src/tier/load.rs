//! Transfers from host memory to the device: the blocks of a prompt that the device does not have, and the checkpoint at
//! their end.

use dsv4_kv_prefix::{Reference, RootKey};

use super::in_flight::{CopyStatus, InFlightCopies};
use super::mistake::{Mistake, made};
use super::state::{PendingLoad, PrefetchId, PrefetchRequest, Tier};
use super::stats::{TierEvent, TierMiss};
use crate::block::BLOCK;
use crate::device::{Backend, Stream};
use crate::error::KvError;
use crate::ledger::{Ledger, LoadTarget};
use crate::manager::core::Core;

/// Most prompts that wait for their turn. Each holds a copy of its tokens.
const PROMPTS: usize = 64;

/// When a prompt is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// After all others.
    Last,
    /// Before all others: the host waits for it.
    Next,
}

impl<B: Backend> Tier<B> {
    /// Requests a prompt, in the queue of prompts after all others or before them. A prompt that is queued or loading
    /// already keeps its id.
    ///
    /// # Errors
    /// [`KvError::TooManyPrefetches`] if the queue is full, except for [`Turn::Next`].
    pub fn want(
        &mut self,
        root: RootKey,
        tokens: &[u32],
        turn: Turn,
    ) -> Result<PrefetchId, KvError> {
        let is_it = |request: &PrefetchRequest| request.root == root && request.tokens == tokens;
        let loading = self.loading.as_mut().map(|loading| &mut loading.request);
        if let Some(request) = loading.filter(|request| request.waiters > 0 && is_it(request)) {
            request.waiters += 1;
            return Ok(request.id);
        }
        let found = self.prefetches.iter().position(is_it);
        if found.is_none() && turn == Turn::Last && self.prefetches.len() >= PROMPTS {
            return Err(KvError::TooManyPrefetches { most: PROMPTS });
        }
        let at = found.unwrap_or(self.prefetches.len());
        let new = || PrefetchRequest {
            id: PrefetchId::unique(),
            root,
            tokens: tokens.to_vec(),
            waiters: 0,
        };
        let mut request = self.prefetches.remove(at).unwrap_or_else(new);
        request.waiters += 1;
        let id = request.id;
        self.prefetches.insert(if turn == Turn::Next { 0 } else { at }, request);
        Ok(id)
    }

    /// Whether a prompt is requested and has not arrived yet.
    pub fn is_wanted(&self, id: PrefetchId) -> bool {
        let loading = self.loading.as_ref().map(|loading| &loading.request);
        let mut all = self.prefetches.iter().chain(loading);
        all.any(|request| request.id == id && request.waiters > 0)
    }

    /// Withdraws one request for a prompt; `false` if the prompt is not requested: it has arrived, or
    /// the id is unknown.
    pub fn cancel(&mut self, id: PrefetchId) -> bool {
        let waits = self.prefetches.iter().any(|request| request.id == id);
        let is_wanted = self.withdraw(id);
        if waits && !self.is_wanted(id) {
            self.miss(TierMiss::Cancelled);
        }
        is_wanted
    }

    /// As [`Self::cancel`], but counts no miss for a prompt that waits for its turn.
    pub fn withdraw(&mut self, id: PrefetchId) -> bool {
        let loading = self.loading.as_mut().map(|loading| &mut loading.request);
        let mut all = self.prefetches.iter_mut().chain(loading);
        let Some(request) = all.find(|request| request.id == id && request.waiters > 0) else {
            return false;
        };
        request.waiters -= 1;
        self.prefetches.retain(|request| request.waiters > 0 || made(Mistake::CancelForgotten));
        true
    }

    /// Begins the load of the next requested prompt, unless a load is in flight, and reserves its blocks. Returns
    /// whether there are copies to queue. Requests for prompts that the device already has, or of which host memory has
    /// no more, are dropped. With `only`, begins the load of that prompt or none: another load could evict the blocks
    /// that this prompt matches.
    ///
    /// # Errors
    /// [`KvError::OutOfBlocks`], [`KvError::OutOfCheckpoints`] if the device has no room for the next prompt, whose
    /// request is dropped.
    pub fn begin_load(
        &mut self,
        ledger: &mut Ledger,
        only: Option<PrefetchId>,
    ) -> Result<bool, KvError> {
        if self.loading.is_some() {
            return Ok(false);
        }
        while self.loading.is_none() {
            // A lost transfer was requeued at the front, ahead of `only`.
            let at = only.map_or(Some(0), |id| self.prefetches.iter().position(|of| of.id == id));
            let next = at.and_then(|at| self.prefetches.remove(at));
            let Some(request) = next else { return Ok(false) };
            let here = ledger.reusable(&request.root, &request.tokens);
            if self.lookup(&request.root, &request.tokens).reusable <= here {
                self.miss(TierMiss::NotThere);
                continue;
            }
            let found = self.tree.match_and_lock(&request.root, &request.tokens);
            let tokens =
                request.tokens.as_chunks::<BLOCK>().0[..found.reused as usize / BLOCK].to_vec();
            match ledger.begin_load(&request.root, &tokens) {
                Ok(Some(target)) => {
                    self.loading =
                        Some(self.pending_load(request, tokens, target, found.reference));
                }
                Ok(None) => {
                    self.miss(TierMiss::NotThere);
                    self.release(found.reference);
                }
                Err(error) => {
                    self.miss(TierMiss::NoRoomOnDevice);
                    self.release(found.reference);
                    return Err(error);
                }
            }
        }
        Ok(true)
    }

    /// Collects the units that a load reads.
    fn pending_load(
        &self,
        request: PrefetchRequest,
        tokens: Vec<[u32; BLOCK]>,
        target: LoadTarget,
        source: Reference,
    ) -> PendingLoad<B> {
        let (Ok(blocks), Ok(Some(checkpoint))) =
            (self.tree.blocks(&source), self.tree.checkpoint(&source))
        else {
            unreachable!("a prompt is matched down to a checkpoint of this tree")
        };
        let missing = blocks.take_while(|&(number, _)| number >= target.above());
        let mut units: Vec<_> = missing.map(|(_, unit)| unit.clone()).collect();
        if !made(Mistake::BlocksSwapped) {
            units.reverse();
        }
        let (origin, has_draft) = (checkpoint.origin, checkpoint.has_draft);
        let units = (units, checkpoint.units.clone());
        let in_flight = InFlightCopies::new();
        PendingLoad { request, tokens, target, units, origin, has_draft, in_flight, source }
    }

    /// Queues the copies of the load that was begun, after the work in `stream`. On an error the load is lost, and
    /// [`Self::end_load`] returns its blocks.
    pub fn queue_load(&mut self, core: &Core<B>, stream: &Stream<B>) -> Result<(), KvError> {
        let Self { loading: Some(loading), to_device: streams, layout, .. } = self else {
            return Ok(());
        };
        let (units, checkpoint) = std::mem::take(&mut loading.units);
        debug_assert_eq!(checkpoint.len(), layout.checkpoint_units as usize, "of this tier");
        let target = &loading.target;
        loading.in_flight.queue(streams, |streams, copies| {
            if !made(Mistake::ArrivesUnordered) {
                streams.follow(stream)?;
            }
            streams.load(core, &units, &target.blocks(), copies)?;
            let target = core.memory.state.checkpoint(target.checkpoint());
            Ok(copies.load(checkpoint, &target)?)
        })?;
        if made(Mistake::SourceNotHeld) {
            let nothing = self.tree.lock_blocks(&loading.request.root, &[]);
            let source = std::mem::replace(&mut loading.source, nothing);
            self.release(source);
        }
        Ok(())
    }

    /// Ends the load under way if it is done: enters it, or returns its blocks if it was lost or cancelled. A lost load
    /// is queued again, before all others. Waits for it with `waited`, or if it was lost.
    pub fn end_load(&mut self, ledger: &mut Ledger, waited: bool) -> Result<(), KvError> {
        let Some(loading) = self.loading.as_mut() else { return Ok(()) };
        let mut status = loading.in_flight.finish(waited)?;
        if matches!(status, CopyStatus::Running) {
            if !loading.is_taken_for_done() {
                return Ok(());
            }
            status = CopyStatus::Done(Vec::new(), 0);
        }
        let Some(loading) = self.loading.take() else { return Ok(()) };
        let is_cancelled = loading.request.waiters == 0 && !made(Mistake::CancelIgnored);
        match status {
            CopyStatus::Done(_, bytes) if !is_cancelled => {
                self.enter_loaded(ledger, loading, bytes)
            }
            status => {
                let is_done = matches!(status, CopyStatus::Done(..));
                let PendingLoad { request, target, source, .. } = loading;
                if made(Mistake::CancelLeaks) {
                    std::mem::forget(target);
                } else {
                    ledger.drop_load(target);
                }
                self.miss(if is_done { TierMiss::Cancelled } else { TierMiss::Device });
                if !is_cancelled {
                    self.prefetches.push_front(request);
                }
                self.release(source);
            }
        }
        Ok(())
    }

    /// Enters a finished load in the device's tree.
    fn enter_loaded(&mut self, ledger: &mut Ledger, loading: PendingLoad<B>, bytes: u64) {
        let PendingLoad { request, tokens, target, origin, has_draft, source, .. } = loading;
        let before = ledger.reusable(&request.root, &request.tokens);
        let (blocks, checkpoint) = ledger.enter_loaded(target, &tokens, origin, has_draft);
        let reusable = (tokens.len() * BLOCK) as u32;
        self.stats.restored_blocks += u64::from(blocks);
        self.stats.restored_checkpoints += u64::from(checkpoint.is_some());
        self.stats.bytes_from_host += bytes;
        self.stats.restored_tokens += u64::from(reusable.saturating_sub(before));
        self.event(TierEvent::Restored { tokens: reusable, blocks, bytes });
        self.release(source);
    }
}

impl<B: Backend> PendingLoad<B> {
    /// A deliberate mistake for tests: whether the load is treated as done while its copies still run.
    fn is_taken_for_done(&mut self) -> bool {
        let is_early = made(Mistake::EnteredEarly)
            || (made(Mistake::FreedInFlight) && self.request.waiters == 0);
        if is_early {
            // Leaked, so that the copies are never waited for.
            std::mem::forget(std::mem::replace(&mut self.in_flight, InFlightCopies::new()));
        }
        is_early
    }
}

#[cfg(test)]
mod tests {
    use dsv4_kv_prefix::Origin;
    use kv_layout::config::ModelConfig;

    use super::*;
    use crate::config::CacheConfig;
    use crate::device::NullDevice;
    use crate::ledger::Prompt;
    use crate::manager::KvCacheManager;
    use crate::tier::CheckpointInfo;

    /// The load under way is lost while the host waits for another prompt. The lost one is queued before all others,
    /// and still the load of the other prompt is what begins next.
    #[test]
    fn a_lost_transfer_keeps_nobody_waiting() {
        let config = CacheConfig {
            num_blocks: 8,
            max_context: 1024,
            num_checkpoints: 4,
            host_bytes: 64 << 20,
            ..CacheConfig::new(ModelConfig::preset("tiny").unwrap())
        };
        let mut cache = KvCacheManager::new(NullDevice::null(1 << 34), config).unwrap();
        let tokens: Vec<u32> = (0..=BLOCK as u32).collect();
        let roots = [b"a", b"b"].map(|salt| {
            let prompt = Prompt { tokens: &tokens, salt, adapter: b"" };
            let root = cache.host_prompt(&prompt).unwrap().root;
            let mut reservation = cache.reserve_host(&root, tokens.as_chunks().0).unwrap();
            let (block, checkpoint) = cache.host_image_bytes().unwrap();
            let [block, checkpoint] = [block, checkpoint].map(|bytes| vec![0; bytes as usize]);
            let info = CheckpointInfo { origin: Origin::Prompt, has_draft: false };
            assert!(reservation.fill([&block[..]], &checkpoint, info));
            assert!(cache.enter_host(reservation).is_ok_and(|entered| entered));
            root
        });
        let [lost, waited] = roots;
        let (core, tier) = cache.tier_parts().unwrap();
        let ledger = core.ledger_mut();
        let lost = tier.want(lost, &tokens, Turn::Last).unwrap();
        assert!(tier.begin_load(ledger, None).unwrap());
        let waited = tier.want(waited, &tokens, Turn::Next).unwrap();
        // None of its copies was queued, as if the device had failed.
        tier.end_load(ledger, true).unwrap();
        assert!(tier.loading.is_none() && tier.is_wanted(lost), "it is to be repeated");
        assert!(tier.begin_load(ledger, Some(waited)).unwrap(), "nothing began");
        assert_eq!(tier.loading.as_ref().map(|loading| loading.request.id), Some(waited));
        tier.end_load(ledger, true).unwrap();
        assert!(tier.audit().is_ok() && ledger.audit().is_ok());
    }
}
