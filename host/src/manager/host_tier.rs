//! The host tier of a cache: prefixes that the device evicts stay in pinned host memory, and come back from there.
//!
//! [`CacheConfig::host_bytes`](crate::CacheConfig::host_bytes) says how much of it there is. A scheduler calls
//! [`KvCacheManager::advance_tier`] between steps, and [`KvCacheManager::prefetch`] for prompts that wait for their turn;
//! [`KvCacheManager::admit_with`] goes on from what has arrived, [`KvCacheManager::admit_waiting`] waits for it.
//!
//! Blocks are packed by kernels in streams of the lowest priority. Steps in a stream of a higher one, which
//! [`Device::stream`](crate::device::Device::stream) makes, or in graphs captured in it, lose the least beside them; a
//! stream that is made without a priority has the lowest too.

use dsv4_kv_prefix::RootKey;

use crate::block::BLOCK;
use crate::device::{Backend, Stream};
use crate::error::KvError;
use crate::ledger::{Admission, Prompt};
use crate::manager::KvCacheManager;
use crate::tier::Turn;
use crate::tier::mistake::{Mistake, made};
pub use crate::tier::{HostImage, HostRoom, PrefetchId, TierEvent, TierMiss, TierStats};
use crate::trace;

/// What device and host memory have of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPrompt<'p> {
    /// With whom the prompt may share.
    pub root: RootKey,
    /// Its tokens as far as a request can have them.
    pub tokens: &'p [u32],
    /// How many of them the device or host memory has down to a checkpoint.
    pub reusable: u32,
    /// How many of them host memory has blocks of, with or without a checkpoint.
    pub in_host: u32,
}

impl<B: Backend> KvCacheManager<B> {
    /// Requests the part of a prompt that is in host memory and not on the device: the missing blocks, and the checkpoint
    /// at their end. Device room is taken when the copies are queued, by eviction if needed. [`Self::advance_tier`]
    /// enters the blocks in the prefix tree once they have arrived. Prefetches run one at a time, in order. A second
    /// request for the same prompt returns the same id; cancel it once for each request. `None` if host memory has no
    /// more of the prompt than the device.
    ///
    /// Queued in a stream of the cache's, behind `stream`: copies of units that lie side by side, and launches that
    /// unpack them.
    ///
    /// # Errors
    /// [`KvError::OutOfBlocks`], [`KvError::OutOfCheckpoints`], [`KvError::TooManyPrefetches`], [`KvError::Device`];
    /// nothing is requested then.
    pub fn prefetch(
        &mut self,
        stream: &Stream<B>,
        prompt: &Prompt<'_>,
    ) -> Result<Option<PrefetchId>, KvError> {
        let _tier = trace::tier("prefetch").entered();
        self.core().check_stream(stream)?;
        self.reject_leaked_steps();
        self.enter_arrived(false)?;
        let Some(id) = self.want(prompt, Turn::Last)? else { return Ok(None) };
        match self.start_load(stream, None) {
            // It was another prompt's turn.
            Err(error) if is_full(&error) && self.is_prefetching(id) => Ok(Some(id)),
            Err(error) => {
                self.withdraw(id);
                Err(error)
            }
            Ok(()) => Ok(Some(id)),
        }
    }

    /// Notes that a prompt is wanted, if host memory has more of it than the device.
    fn want(&mut self, prompt: &Prompt<'_>, turn: Turn) -> Result<Option<PrefetchId>, KvError> {
        let Some((core, tier)) = self.tier_parts() else { return Ok(None) };
        let ledger = core.read_ledger();
        let Some((root, tokens)) = ledger.shared_prompt(prompt) else { return Ok(None) };
        let there = tier.lookup(&root, tokens).reusable;
        if there <= ledger.reusable(&root, tokens) {
            return Ok(None);
        }
        tier.want(root, tokens, turn).map(Some)
    }

    /// What was asked for failed, and so was not.
    fn withdraw(&mut self, id: PrefetchId) {
        if let Some((_, tier)) = self.tier_parts() {
            tier.withdraw(id);
        }
    }

    /// Whoever asked for a prompt does not want it any more. If nobody else does, and it is on its way already, its room is
    /// free once the copies are done. `false` if it is not wanted: it is here, was cancelled, or is another cache's.
    pub fn cancel_prefetch(&mut self, id: PrefetchId) -> bool {
        self.tier_parts().is_some_and(|(_, tier)| tier.cancel(id))
    }

    /// Whether a prompt is still to arrive, and somebody wants it.
    #[must_use]
    pub fn is_prefetching(&self, id: PrefetchId) -> bool {
        self.tier().is_some_and(|tier| tier.is_wanted(id))
    }

    /// Enters what has arrived, in either direction. Then begins what comes next, in a direction in which nothing is under
    /// way: one prompt that was asked for is brought to the device, and one checkpoint that has entered the prefix tree, or
    /// was gone on from, is copied to host memory with the blocks above it, if they are not there. To be called between
    /// steps; the host waits for nothing. A prompt for which the device has no room is passed over.
    ///
    /// # Errors
    /// [`KvError::Device`]; what was to be begun is begun by the next call.
    pub fn advance_tier(&mut self, stream: &Stream<B>) -> Result<(), KvError> {
        let _tier = trace::tier("advance_tier").entered();
        self.core().check_stream(stream)?;
        self.reject_leaked_steps();
        self.enter_arrived(false)?;
        match self.start_load(stream, None) {
            Err(error) if !is_full(&error) => return Err(error),
            _ => {}
        }
        self.start_store(stream)
    }

    /// As [`Self::advance_tier`], until nothing is left to do. The host waits for all of it.
    ///
    /// # Errors
    /// As [`Self::advance_tier`].
    pub fn settle_tier(&mut self, stream: &Stream<B>) -> Result<(), KvError> {
        let _tier = trace::tier("settle_tier").entered();
        loop {
            self.advance_tier(stream)?;
            if self.tier().is_none_or(|tier| tier.is_idle()) {
                return Ok(());
            }
            self.enter_arrived(true)?;
        }
    }

    /// Whether something is on its way, in either direction, or a prompt waits for its turn. What is on its way is read and
    /// written, and not evicted; [`Self::settle_tier`] ends that.
    #[must_use]
    pub fn is_moving(&self) -> bool {
        self.tier().is_some_and(|tier| !tier.is_idle())
    }

    /// As [`Self::admit_with`], once what host memory has of the prompt has arrived, for which the host waits. If the device
    /// has no room for it, the request goes on from what is there.
    ///
    /// # Errors
    /// As [`Self::admit_with`].
    pub fn admit_waiting(
        &mut self,
        stream: &Stream<B>,
        prompt: &Prompt<'_>,
    ) -> Result<Admission, KvError> {
        self.core().check_stream(stream)?;
        self.core().ledger().check_free_slot()?;
        let is_here = self.bring(stream, prompt)?;
        if !is_here && self.tier().is_some_and(|tier| tier.is_storing()) {
            // What is on its way to the host is not evicted before it is there.
            self.end_store(true)?;
            self.bring(stream, prompt)?;
        }
        self.admit_with(stream, prompt)
    }

    /// Brings what host memory has of a prompt, before all others, and waits for that alone; `false` if the device has no
    /// room for it.
    fn bring(&mut self, stream: &Stream<B>, prompt: &Prompt<'_>) -> Result<bool, KvError> {
        let _tier = trace::tier("admit_waiting").entered();
        self.enter_arrived(false)?;
        let Some(id) = self.want(prompt, Turn::Next)? else { return Ok(true) };
        let arrived = self.await_load(stream, id);
        if arrived.is_err() {
            self.withdraw(id);
        }
        arrived
    }

    /// Begins arrivals, and waits for each, until this one is here, and nothing else has begun that could evict it.
    fn await_load(&mut self, stream: &Stream<B>, id: PrefetchId) -> Result<bool, KvError> {
        while self.is_prefetching(id) {
            match self.start_load(stream, Some(id)) {
                Err(error) if !is_full(&error) => return Err(error),
                Err(_) if !self.is_prefetching(id) => return Ok(false),
                _ => self.end_load(true)?,
            }
        }
        Ok(true)
    }

    /// What the host tier has done.
    #[must_use]
    pub fn tier_stats(&self) -> TierStats {
        self.tier().map_or(TierStats::default(), |tier| tier.stats())
    }

    /// What the host tier did since the last call: the latest thousand of it.
    pub fn take_tier_events(&mut self) -> Vec<TierEvent> {
        self.tier_parts().map_or(Vec::new(), |(_, tier)| tier.take_events())
    }

    /// Units of host memory that are free, and all there are. A block takes one, a checkpoint several.
    #[must_use]
    pub fn host_units(&self) -> (u32, u32) {
        self.tier().map_or((0, 0), |tier| tier.units())
    }

    /// Blocks of the longest prefix that fits into host memory, with its checkpoint; 0 without a host tier.
    #[must_use]
    pub fn host_prefix_blocks(&self) -> u32 {
        self.tier().map_or(0, |tier| tier.prefix_blocks())
    }

    /// Counts everything that host memory holds again, for tests.
    ///
    /// # Errors
    /// What is not as it must be.
    pub fn audit_tier(&self) -> Result<(), String> {
        self.tier().map_or(Ok(()), |tier| tier.audit())
    }

    /// From now on checkpoints that arrive in host memory are offered to a tier below: [`Self::next_host_image`].
    pub fn offer_host_images(&mut self) {
        if let Some((_, tier)) = self.tier_parts() {
            tier.keep_offers();
        }
    }

    /// The oldest checkpoint, with all blocks above it, that has arrived in host memory since, and is still there. It can be
    /// read on any thread, and is not evicted until it is dropped.
    pub fn next_host_image(&mut self) -> Option<HostImage<B>> {
        self.tier_parts()?.1.next_image()
    }

    /// What device and host memory have of a prompt; `None` without a host tier.
    pub fn host_prompt<'p>(&self, prompt: &Prompt<'p>) -> Option<HostPrompt<'p>> {
        let tier = self.tier()?;
        let ledger = self.core().read_ledger();
        let (root, tokens) = ledger.shared_prompt(prompt)?;
        let found = tier.lookup(&root, tokens);
        let reusable = found.reusable.max(ledger.reusable(&root, tokens));
        Some(HostPrompt { root, tokens, reusable, in_host: found.matched })
    }

    /// Room in host memory for a prefix of whole blocks of 128 tokens with a checkpoint at its end, which a tier below
    /// brings: for the blocks that are not there. What nobody uses is evicted for it. `None` if there is not enough, or if
    /// the prefix is there.
    pub fn reserve_host(&mut self, root: &RootKey, tokens: &[[u32; BLOCK]]) -> Option<HostRoom<B>> {
        self.tier_parts()?.1.reserve(root, tokens)
    }

    /// Enters a prefix that was brought to host memory; `false` if not all of it was filled, or if host memory has all of it
    /// by now: then nothing is entered.
    ///
    /// # Errors
    /// The room, if it is another cache's.
    pub fn enter_host(&mut self, room: HostRoom<B>) -> Result<bool, HostRoom<B>> {
        match self.tier_parts() {
            Some((_, tier)) => tier.enter(room),
            None => Err(room),
        }
    }

    /// Gives room back that nothing was brought to, now; room that is dropped comes back with a later call.
    ///
    /// # Errors
    /// The room, if it is another cache's.
    pub fn give_host_back(&mut self, room: HostRoom<B>) -> Result<(), HostRoom<B>> {
        match self.tier_parts() {
            Some((_, tier)) => tier.give_back(room),
            None => Err(room),
        }
    }

    /// Bytes of the image of a block, and of a checkpoint, in host memory; `None` without a host tier.
    #[must_use]
    pub fn host_image_bytes(&self) -> Option<(u64, u64)> {
        self.tier().map(|tier| tier.image_bytes())
    }

    /// Enters what has arrived, in both directions; waits for it if that is asked for. What a tier below has dropped is not
    /// kept any more.
    pub(crate) fn enter_arrived(&mut self, waited: bool) -> Result<(), KvError> {
        if let Some((_, tier)) = self.tier_parts() {
            tier.end_loans();
        }
        self.end_load(waited)?;
        self.end_store(waited)
    }

    /// Enters what has arrived on the device.
    fn end_load(&mut self, waited: bool) -> Result<(), KvError> {
        let Some((core, tier)) = self.tier_parts() else { return Ok(()) };
        tier.end_load(&mut core.ledger(), waited)
    }

    /// Enters what has arrived in host memory.
    fn end_store(&mut self, waited: bool) -> Result<(), KvError> {
        let Some((core, tier)) = self.tier_parts() else { return Ok(()) };
        tier.end_store(&mut core.ledger(), waited)
    }

    /// Starts the next load; with `only`, starts that one or nothing.
    fn start_load(&mut self, stream: &Stream<B>, only: Option<PrefetchId>) -> Result<(), KvError> {
        let Some((core, tier)) = self.tier_parts() else { return Ok(()) };
        if !tier.begin_load(&mut core.ledger(), only)? {
            return Ok(());
        }
        // Blocks that others had are poisoned before they are written, and not after.
        let queued = match made(Mistake::PoisonedAfter) {
            true => Ok(()),
            false => self.follow_steps(stream),
        };
        let Some((core, tier)) = self.tier_parts() else { return Ok(()) };
        let queued = queued.and_then(|()| tier.queue_load(core, stream));
        if queued.is_err() {
            // If it cannot be waited for now, the next call does.
            let _ = tier.end_load(&mut core.ledger(), false);
        }
        queued
    }

    /// Begins what is to leave next.
    fn start_store(&mut self, stream: &Stream<B>) -> Result<(), KvError> {
        let Some((core, tier)) = self.tier_parts() else { return Ok(()) };
        if !tier.begin_store(&mut core.ledger()) {
            return Ok(());
        }
        let queued = self.follow_steps(stream);
        let Some((core, tier)) = self.tier_parts() else { return Ok(()) };
        let queued = queued.and_then(|()| tier.queue_store(core, stream));
        if queued.is_err() {
            let _ = tier.end_store(&mut core.ledger(), false);
        }
        queued
    }
}

/// Whether there is no room on the device, which is no failure.
fn is_full(error: &KvError) -> bool {
    matches!(error, KvError::OutOfBlocks { .. } | KvError::OutOfCheckpoints { .. })
}
