//! The host tier of a cache: prefixes that the device evicts stay in pinned host memory, and come back from there.
//!
//! [`CacheConfig::host_bytes`](crate::CacheConfig::host_bytes) says how much of it there is. A scheduler calls
//! [`KvCacheManager::advance_tier`] between steps, and [`KvCacheManager::prefetch`] for prompts that wait for their turn;
//! [`KvCacheManager::admit_with`] goes on from what has arrived, [`KvCacheManager::admit_waiting`] waits for it.

use dsv4_kv_prefix::RootKey;

use crate::device::{Backend, Stream};
use crate::error::KvError;
use crate::ledger::{Admission, Prompt};
use crate::manager::KvCacheManager;
pub use crate::tier::{HostImage, HostRoom, PrefetchId, TierEvent, TierMiss, TierStats};

/// The device has no room for a prompt.
struct NoRoom;

impl<B: Backend> KvCacheManager<B> {
    /// Asks for what host memory has of a prompt and the device has not: the blocks that are not there, and the checkpoint
    /// behind them. They have room on the device from the moment in which their copies are queued, for which what nobody
    /// refers to is evicted, and are entered in the prefix tree by [`Self::advance_tier`] once they have arrived. If
    /// others are on their way, this one waits for its turn. `None` if host memory has no more of the prompt than the
    /// device.
    ///
    /// Queued in a stream of the cache's, behind `stream`: copies of units that lie side by side, and launches that
    /// unpack them.
    ///
    /// # Errors
    /// [`KvError::OutOfBlocks`], [`KvError::OutOfCheckpoints`], [`KvError::Device`]; nothing is to arrive then.
    pub fn prefetch(
        &mut self,
        stream: &Stream<B>,
        prompt: &Prompt<'_>,
    ) -> Result<Option<PrefetchId>, KvError> {
        self.enter_arrived(false)?;
        let Some(id) = self.want(prompt) else { return Ok(None) };
        match self.start_arriving(stream) {
            // It was another prompt's turn.
            Err(KvError::OutOfBlocks { .. } | KvError::OutOfCheckpoints { .. })
                if self.is_prefetching(id) => {}
            Err(error) => {
                self.cancel_prefetch(id);
                return Err(error);
            }
            Ok(()) => {}
        }
        Ok(Some(id))
    }

    /// Notes that a prompt is wanted, if host memory has more of it than the device.
    fn want(&mut self, prompt: &Prompt<'_>) -> Option<PrefetchId> {
        let (core, tier) = self.tier_parts()?;
        let ledger = core.ledger();
        let (root, tokens) = ledger.shared_prompt(prompt)?;
        let there = tier.lookup(&root, tokens).reusable;
        if there <= ledger.reusable(&root, tokens) {
            return None;
        }
        Some(tier.want(root, tokens))
    }

    /// A prompt is not wanted any more. If it is on its way already, its room is free once the copies are done. `false` if
    /// it was not on its way.
    pub fn cancel_prefetch(&mut self, id: PrefetchId) -> bool {
        self.tier_parts().is_some_and(|(_, tier)| tier.cancel(id))
    }

    /// Whether a prompt is still to arrive.
    #[must_use]
    pub fn is_prefetching(&self, id: PrefetchId) -> bool {
        self.tier().is_some_and(|tier| tier.is_wanted(id))
    }

    /// Enters what has arrived, in either direction, and begins what comes next: the checkpoints that entered the prefix
    /// tree since, which are copied to host memory with the blocks above them, and prompts that were asked for. To be
    /// called between steps; the host waits for nothing. A prompt for which the device has no room is passed over.
    ///
    /// # Errors
    /// [`KvError::Device`]; what was to be begun is begun by the next call.
    pub fn advance_tier(&mut self, stream: &Stream<B>) -> Result<(), KvError> {
        self.enter_arrived(false)?;
        match self.start_arriving(stream) {
            Ok(()) | Err(KvError::OutOfBlocks { .. } | KvError::OutOfCheckpoints { .. }) => {}
            Err(error) => return Err(error),
        }
        self.start_leaving(stream)
    }

    /// As [`Self::advance_tier`], until nothing is left to do. The host waits for all of it.
    ///
    /// # Errors
    /// As [`Self::advance_tier`].
    pub fn settle_tier(&mut self, stream: &Stream<B>) -> Result<(), KvError> {
        loop {
            self.advance_tier(stream)?;
            if self.tier().is_none_or(|tier| tier.is_idle()) {
                return Ok(());
            }
            self.enter_arrived(true)?;
        }
    }

    /// Whether something is on its way, in either direction: what is read or written by it is not evicted.
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
        let mut wanted = self.prefetch_if_room(stream, prompt)?;
        if wanted.is_err() && self.tier().is_some_and(|tier| tier.is_leaving()) {
            // What is on its way to the host is not evicted before it is there.
            self.enter_arrived(true)?;
            wanted = self.prefetch_if_room(stream, prompt)?;
        }
        if let Ok(Some(id)) = wanted {
            while self.is_prefetching(id) {
                self.enter_arrived(true)?;
                self.advance_tier(stream)?;
            }
        }
        self.admit_with(stream, prompt)
    }

    /// As [`Self::prefetch`]; [`NoRoom`] is no error.
    fn prefetch_if_room(
        &mut self,
        stream: &Stream<B>,
        prompt: &Prompt<'_>,
    ) -> Result<Result<Option<PrefetchId>, NoRoom>, KvError> {
        match self.prefetch(stream, prompt) {
            Err(KvError::OutOfBlocks { .. } | KvError::OutOfCheckpoints { .. }) => Ok(Err(NoRoom)),
            wanted => wanted.map(Ok),
        }
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
    /// read on any thread, and stays in memory until it is dropped.
    pub fn next_host_image(&mut self) -> Option<HostImage<B>> {
        self.tier_parts()?.1.next_image()
    }

    /// With whom a prompt may share, its tokens as far as a request can have them, and how many of them the device or host
    /// memory has down to a checkpoint; `None` without a host tier.
    pub fn host_prompt<'p>(&self, prompt: &Prompt<'p>) -> Option<(RootKey, &'p [u32], u32)> {
        let tier = self.tier()?;
        let ledger = self.core().ledger();
        let (root, tokens) = ledger.shared_prompt(prompt)?;
        let there = tier.lookup(&root, tokens).reusable.max(ledger.reusable(&root, tokens));
        Some((root, tokens, there))
    }

    /// Room in host memory for a prefix of whole blocks of 128 tokens with a checkpoint at its end, which a tier below
    /// brings: for the blocks that are not there. What nobody uses is evicted for it. `None` if there is not enough, or if
    /// the prefix is there.
    pub fn reserve_host(&mut self, root: &RootKey, tokens: &[[u32; 128]]) -> Option<HostRoom<B>> {
        self.tier_parts()?.1.reserve(root, tokens)
    }

    /// Enters a prefix that was brought to host memory; `false` if the room is another cache's, or not all of it was
    /// filled, and then nothing is entered.
    pub fn enter_host(&mut self, room: HostRoom<B>) -> bool {
        self.tier_parts().is_some_and(|(_, tier)| tier.enter(room))
    }

    /// Gives room back that nothing was brought to.
    pub fn give_host_back(&mut self, room: HostRoom<B>) {
        if let Some((_, tier)) = self.tier_parts() {
            tier.give_back(room);
        }
    }

    /// Bytes of the image of a block, and of a checkpoint, in host memory; `None` without a host tier.
    #[must_use]
    pub fn host_image_bytes(&self) -> Option<(u64, u64)> {
        let checkpoint = self.core().memory.state.arena().checkpoint_bytes;
        Some((self.tier()?.unit_bytes(), checkpoint))
    }

    /// Enters what has arrived, in both directions; waits for it if that is asked for.
    pub(crate) fn enter_arrived(&mut self, waited: bool) -> Result<(), KvError> {
        let Some((core, tier)) = self.tier_parts() else { return Ok(()) };
        let mut ledger = core.ledger();
        tier.end_arriving(&mut ledger, waited)?;
        tier.end_leaving(&mut ledger, waited)
    }

    /// Begins what is to arrive next.
    fn start_arriving(&mut self, stream: &Stream<B>) -> Result<(), KvError> {
        let Some((core, tier)) = self.tier_parts() else { return Ok(()) };
        if !tier.begin_arriving(&mut core.ledger())? {
            return Ok(());
        }
        // Blocks that others had are poisoned before they are written, and not after.
        let queued = self.transfer(stream, &[], None).map_err(KvError::from);
        let Some((core, tier)) = self.tier_parts() else { return Ok(()) };
        let queued = queued.and_then(|()| tier.queue_arriving(core, stream));
        if queued.is_err() {
            // If it cannot be waited for now, the next call does.
            let _ = tier.end_arriving(&mut core.ledger(), false);
        }
        queued
    }

    /// Begins what is to leave next.
    fn start_leaving(&mut self, stream: &Stream<B>) -> Result<(), KvError> {
        let Some((core, tier)) = self.tier_parts() else { return Ok(()) };
        if !tier.begin_leaving(&mut core.ledger()) {
            return Ok(());
        }
        let queued = self.transfer(stream, &[], None).map_err(KvError::from);
        let Some((core, tier)) = self.tier_parts() else { return Ok(()) };
        let queued = queued.and_then(|()| tier.queue_leaving(core, stream));
        if queued.is_err() {
            let _ = tier.end_leaving(&mut core.ledger(), false);
        }
        queued
    }
}
