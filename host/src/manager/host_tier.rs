//! The host tier of a cache: prefixes that the device evicts stay in pinned host memory, and come back from there.
//!
//! [`CacheConfig::host_bytes`](crate::CacheConfig::host_bytes) sets the size of that memory. A scheduler calls
//! [`KvCacheManager::advance_tier`] between steps, and [`KvCacheManager::prefetch`] for prompts that wait for their
//! turn; [`KvCacheManager::admit_with`] continues from the prefixes that have arrived,
//! [`KvCacheManager::admit_waiting`] waits for them.
//!
//! Blocks are packed by kernels in streams of the lowest priority. They slow steps down least if the steps run in a
//! stream of higher priority, which [`Device::stream`](crate::device::Device::stream) makes, or in graphs captured in
//! such a stream. A stream that is created without a priority has the lowest priority too.

use dsv4_kv_prefix::RootKey;

use crate::block::BLOCK;
use crate::device::{Backend, Stream};
use crate::error::KvError;
use crate::ledger::{Admission, Prompt};
use crate::manager::KvCacheManager;
use crate::tier::Turn;
use crate::tier::mistake::{Mistake, made};
pub use crate::tier::{
    CheckpointInfo, HostImage, HostReservation, PrefetchId, TierEvent, TierMiss, TierStats,
};
use crate::trace;

/// The part of a prompt that device and host memory have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPrompt<'p> {
    /// The root of its prefix tree: salt, adapter and model.
    pub root: RootKey,
    /// Its tokens, up to the longest context of a request.
    pub tokens: &'p [u32],
    /// Number of its tokens down to the deepest checkpoint on the device or in host memory.
    pub reusable: u32,
    /// Number of its tokens whose blocks are in host memory, with or without a checkpoint.
    pub in_host: u32,
}

impl<B: Backend> KvCacheManager<B> {
    /// Requests the part of a prompt that is in host memory and not on the device: the missing blocks, and the
    /// checkpoint at their end. They are reserved on the device when the copies are queued, by eviction if needed.
    /// [`Self::advance_tier`] enters the blocks in the prefix tree once they have arrived. Prefetches run one at a
    /// time, in order. A second request for the same prompt returns the same id; cancel it once for each request.
    /// `None` if host memory has no more of the prompt than the device.
    ///
    /// Queued in streams of the cache, after the work in `stream`: copies, each of units that are adjacent in
    /// memory, and launches that unpack them.
    ///
    /// # Errors
    /// [`KvError::OutOfBlocks`], [`KvError::OutOfCheckpoints`], [`KvError::TooManyPrefetches`], [`KvError::Device`];
    /// then nothing is requested.
    pub fn prefetch(
        &mut self,
        stream: &Stream<B>,
        prompt: &Prompt<'_>,
    ) -> Result<Option<PrefetchId>, KvError> {
        let _tier = trace::tier("prefetch").entered();
        self.core().check_stream(stream)?;
        self.reject_leaked_steps();
        self.finish_tier_transfers(false)?;
        let Some(id) = self.want(prompt, Turn::Last)? else { return Ok(None) };
        match self.start_load(stream, None) {
            // Another prompt was first in the queue and found no room; this one still waits.
            Err(error) if is_full(&error) && self.is_prefetching(id) => Ok(Some(id)),
            Err(error) => {
                self.withdraw(id);
                Err(error)
            }
            Ok(()) => Ok(Some(id)),
        }
    }

    /// Queues a prompt to be loaded, if host memory has more of it than the device.
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

    /// Removes a request whose load failed; counts no miss.
    fn withdraw(&mut self, id: PrefetchId) {
        if let Some((_, tier)) = self.tier_parts() {
            tier.withdraw(id);
        }
    }

    /// Withdraws one request for a prompt. If it was the last one and the transfer is under way, its blocks are free
    /// again when the copies are done. `false` if the prompt is not requested: it has arrived, was cancelled, or the id
    /// is another cache's.
    pub fn cancel_prefetch(&mut self, id: PrefetchId) -> bool {
        self.tier_parts().is_some_and(|(_, tier)| tier.cancel(id))
    }

    /// Whether a prompt is requested and has not arrived yet.
    #[must_use]
    pub fn is_prefetching(&self, id: PrefetchId) -> bool {
        self.tier().is_some_and(|tier| tier.is_wanted(id))
    }

    /// Enters finished transfers of both directions. Then starts the next transfer in each direction that is idle. To
    /// the device: the next requested prompt. To host memory: the next checkpoint that entered the prefix tree, or from
    /// which a prompt continued, with the blocks above it that host memory does not have. Call it between steps; the
    /// host waits for nothing. The request for a prompt that finds no room on the device is dropped.
    ///
    /// # Errors
    /// [`KvError::Device`]; the next call starts the transfer again.
    pub fn advance_tier(&mut self, stream: &Stream<B>) -> Result<(), KvError> {
        let _tier = trace::tier("advance_tier").entered();
        self.core().check_stream(stream)?;
        self.reject_leaked_steps();
        self.finish_tier_transfers(false)?;
        match self.start_load(stream, None) {
            Err(error) if !is_full(&error) => return Err(error),
            _ => {}
        }
        self.start_store(stream)
    }

    /// Repeats [`Self::advance_tier`] until no transfer is left. The host waits for all of them.
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
            self.finish_tier_transfers(true)?;
        }
    }

    /// Whether a transfer is under way in either direction, or a prompt waits for its turn. The memory that a transfer
    /// reads or writes cannot be evicted until the transfer is done; [`Self::settle_tier`] completes all transfers.
    #[must_use]
    pub fn has_tier_transfers(&self) -> bool {
        self.tier().is_some_and(|tier| !tier.is_idle())
    }

    /// As [`Self::admit_with`], after the host has waited for the part of the prompt that is in host memory to arrive
    /// on the device. If the device has no room for that part, the request continues from what the device has.
    ///
    /// # Errors
    /// As [`Self::admit_with`].
    pub fn admit_waiting(
        &mut self,
        stream: &Stream<B>,
        prompt: &Prompt<'_>,
    ) -> Result<Admission, KvError> {
        self.core().check_stream(stream)?;
        self.core().read_ledger().check_free_slot()?;
        let is_here = self.bring(stream, prompt)?;
        if !is_here && self.tier().is_some_and(|tier| tier.is_storing()) {
            // A transfer to host memory protects its blocks from eviction until it is done.
            self.end_store(true)?;
            self.bring(stream, prompt)?;
        }
        self.admit_with(stream, prompt)
    }

    /// Loads the part of a prompt that is in host memory, before all other prompts, and waits for it alone; `false` if
    /// the device has no room for it.
    fn bring(&mut self, stream: &Stream<B>, prompt: &Prompt<'_>) -> Result<bool, KvError> {
        let _tier = trace::tier("admit_waiting").entered();
        self.finish_tier_transfers(false)?;
        let Some(id) = self.want(prompt, Turn::Next)? else { return Ok(true) };
        let arrived = self.await_load(stream, id);
        if arrived.is_err() {
            self.withdraw(id);
        }
        arrived
    }

    /// Waits for the load under way, then starts this one and waits for it; `false` if the device has no room for
    /// it. Starts no other load, which could evict this prompt.
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

    /// Counters of the host tier.
    #[must_use]
    pub fn tier_stats(&self) -> TierStats {
        self.tier().map_or(TierStats::default(), |tier| tier.stats())
    }

    /// Events of the host tier since the last call; only the latest 1,024 are kept.
    pub fn take_tier_events(&mut self) -> Vec<TierEvent> {
        self.tier_parts().map_or(Vec::new(), |(_, tier)| tier.take_events())
    }

    /// Units of host memory: the number of free ones, and of all. A block takes one, a checkpoint several.
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
    /// Describes the first inconsistency.
    pub fn audit_tier(&self) -> Result<(), String> {
        self.tier().map_or(Ok(()), |tier| tier.audit())
    }

    /// Starts to offer checkpoints that arrive in host memory to a lower tier, which takes them by
    /// [`Self::next_host_image`].
    pub fn offer_host_images(&mut self) {
        if let Some((_, tier)) = self.tier_parts() {
            tier.keep_offers();
        }
    }

    /// The oldest offered checkpoint that is still in host memory, with all blocks above it. The image can be read on
    /// any thread; its memory is not evicted until it is dropped. `None` also while images that were returned keep more
    /// than half of host memory: the others stay offered.
    pub fn next_host_image(&mut self) -> Option<HostImage<B>> {
        self.tier_parts()?.1.next_image()
    }

    /// The part of a prompt that device and host memory have; `None` without a host tier.
    pub fn host_prompt<'p>(&self, prompt: &Prompt<'p>) -> Option<HostPrompt<'p>> {
        let tier = self.tier()?;
        let ledger = self.core().read_ledger();
        let (root, tokens) = ledger.shared_prompt(prompt)?;
        let found = tier.lookup(&root, tokens);
        let reusable = found.reusable.max(ledger.reusable(&root, tokens));
        Some(HostPrompt { root, tokens, reusable, in_host: found.matched })
    }

    /// Reserves host memory for a prefix of whole blocks of 128 tokens with a checkpoint at its end, which a lower tier
    /// will fill: for the checkpoint, and for the blocks that host memory does not have. Evicts unreferenced prefixes
    /// if needed. `None` if there is not enough memory, or if host memory has the whole prefix.
    pub fn reserve_host(
        &mut self,
        root: &RootKey,
        tokens: &[[u32; BLOCK]],
    ) -> Option<HostReservation<B>> {
        self.tier_parts()?.1.reserve(root, tokens)
    }

    /// Enters a prefix that a lower tier brought to host memory. `false`, with nothing entered, if the reservation was
    /// not filled, or if host memory has the whole prefix by now.
    ///
    /// # Errors
    /// The reservation, if it belongs to another cache.
    pub fn enter_host(
        &mut self,
        reservation: HostReservation<B>,
    ) -> Result<bool, HostReservation<B>> {
        match self.tier_parts() {
            Some((_, tier)) => tier.enter(reservation),
            None => Err(reservation),
        }
    }

    /// Ends an unused reservation at once. If one is dropped instead, the blocks above it are released with a later
    /// call.
    ///
    /// # Errors
    /// The reservation, if it belongs to another cache.
    pub fn give_host_back(
        &mut self,
        reservation: HostReservation<B>,
    ) -> Result<(), HostReservation<B>> {
        match self.tier_parts() {
            Some((_, tier)) => tier.give_back(reservation),
            None => Err(reservation),
        }
    }

    /// Bytes of the image of a block, and of a checkpoint, in host memory; `None` without a host tier.
    #[must_use]
    pub fn host_image_bytes(&self) -> Option<(u64, u64)> {
        self.tier().map(|tier| tier.image_bytes())
    }

    /// Enters finished transfers of both directions; with `waited`, waits for those under way. Releases the references
    /// of images and reservations that a lower tier has dropped.
    pub(crate) fn finish_tier_transfers(&mut self, waited: bool) -> Result<(), KvError> {
        if let Some((_, tier)) = self.tier_parts() {
            tier.end_loans();
        }
        self.end_load(waited)?;
        self.end_store(waited)
    }

    /// Enters a finished transfer to the device.
    fn end_load(&mut self, waited: bool) -> Result<(), KvError> {
        let Some((core, tier)) = self.tier_parts() else { return Ok(()) };
        tier.end_load(core.ledger_mut(), waited)
    }

    /// Enters a finished transfer to host memory.
    fn end_store(&mut self, waited: bool) -> Result<(), KvError> {
        let Some((core, tier)) = self.tier_parts() else { return Ok(()) };
        tier.end_store(core.ledger_mut(), waited)
    }

    /// Starts the next load; with `only`, starts that one or nothing.
    fn start_load(&mut self, stream: &Stream<B>, only: Option<PrefetchId>) -> Result<(), KvError> {
        let Some((core, tier)) = self.tier_parts() else { return Ok(()) };
        if !tier.begin_load(core.ledger_mut(), only)? {
            return Ok(());
        }
        // Freed blocks must be poisoned before the load writes them, not after.
        let queued = match made(Mistake::PoisonedAfter) {
            true => Ok(()),
            false => self.follow_steps(stream),
        };
        let Some((core, tier)) = self.tier_parts() else { return Ok(()) };
        let queued = queued.and_then(|()| tier.queue_load(core, stream));
        if queued.is_err() {
            // If waiting fails now, the next call waits.
            let _ = tier.end_load(core.ledger_mut(), false);
        }
        queued
    }

    /// Starts the next store to host memory.
    fn start_store(&mut self, stream: &Stream<B>) -> Result<(), KvError> {
        let Some((core, tier)) = self.tier_parts() else { return Ok(()) };
        if !tier.begin_store(core.ledger_mut()) {
            return Ok(());
        }
        let queued = self.follow_steps(stream);
        let Some((core, tier)) = self.tier_parts() else { return Ok(()) };
        let queued = queued.and_then(|()| tier.queue_store(core, stream));
        if queued.is_err() {
            let _ = tier.end_store(core.ledger_mut(), false);
        }
        queued
    }
}

/// Whether the device has no room, which is not treated as a failure.
fn is_full(error: &KvError) -> bool {
    matches!(error, KvError::OutOfBlocks { .. } | KvError::OutOfCheckpoints { .. })
}
