//! The contents of the host tier, and the transfers under way.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dsv4_kv_prefix::{
    Limits, Lookup, Origin, PrefixTree, Reference, RootKey, ScoredLru, WeakCheckpoint,
};

use super::copy_streams::CopyStreams;
use super::in_flight::InFlightCopies;
use super::layout::TierLayout;
use super::loans::Loans;
use super::mistake::{Mistake, made};
use super::stats::{TierEvent, TierMiss, TierStats};
use crate::block::BLOCK;
use crate::config::CacheConfig;
use crate::device::{Backend, Device, HostPool, HostUnit};
use crate::error::KvError;
use crate::ledger::{LoadTarget, StoreSource};
use crate::schema::Schema;
use crate::trace;

/// Most events that are kept for [`Tier::take_events`].
const EVENTS: usize = 1024;
/// Most checkpoints that are offered to a lower tier at a time.
const OFFERS: usize = 1024;

/// A unit that is no longer written, shared by the tree and those who read it.
pub(super) type Unit<B> = Arc<HostUnit<B>>;
pub(super) type HostTree<B> = PrefixTree<Unit<B>, HostCheckpoint<B>, ScoredLru, BLOCK>;

/// A checkpoint in host memory.
pub(super) struct HostCheckpoint<B: Backend> {
    /// In the order of its bytes.
    pub units: Vec<Unit<B>>,
    pub has_draft: bool,
    pub origin: Origin,
}

/// Identifies a prompt that is requested on the device; unique in the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefetchId(u64);

impl PrefetchId {
    pub(super) fn unique() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// A transfer to host memory. A reference of the device's tree protects what is read, and one of the host's tree
/// protects the blocks above the new ones. The transfer owns the units that it writes.
pub(super) struct PendingStore<B: Backend> {
    pub source: StoreSource,
    /// To the end of the part that host memory has.
    pub above: Reference,
    /// Units for the missing blocks, then for the checkpoint. Empty once their copies are queued.
    pub units: Vec<HostUnit<B>>,
    /// Number of these units.
    pub count: usize,
    pub in_flight: InFlightCopies<B>,
}

/// A prompt that is requested on the device.
pub(super) struct PrefetchRequest {
    pub id: PrefetchId,
    pub root: RootKey,
    pub tokens: Vec<u32>,
    /// Number of requests for it that were not cancelled.
    pub waiters: u32,
}

/// A transfer to the device. A reference of the host's tree protects what is read. The transfer owns what it writes.
pub(super) struct PendingLoad<B: Backend> {
    pub request: PrefetchRequest,
    /// Tokens of its blocks, down to its checkpoint.
    pub tokens: Vec<[u32; BLOCK]>,
    pub target: LoadTarget,
    /// Units to read, those of blocks and those of the checkpoint. Empty once their copies are queued.
    pub units: (Vec<Unit<B>>, Vec<Unit<B>>),
    pub origin: Origin,
    pub has_draft: bool,
    pub in_flight: InFlightCopies<B>,
    /// Reference of the host's tree.
    pub source: Reference,
}

/// The host tier of a cache.
pub(crate) struct Tier<B: Backend> {
    pub(super) layout: TierLayout,
    pub(super) pool: HostPool<B>,
    pub(super) tree: HostTree<B>,
    pub(super) to_host: CopyStreams<B>,
    pub(super) to_device: CopyStreams<B>,
    pub(super) storing: Option<PendingStore<B>>,
    pub(super) loading: Option<PendingLoad<B>>,
    /// Prompts that wait to be loaded, in order.
    pub(super) prefetches: VecDeque<PrefetchRequest>,
    /// Images and reservations that are lent to a lower tier.
    pub(super) loans: Loans,
    /// The latest checkpoints that a lower tier has not taken yet; `None` without such a tier.
    pub(super) offers: Option<VecDeque<WeakCheckpoint>>,
    pub(super) stats: TierStats,
    pub(super) events: VecDeque<TierEvent>,
}

impl<B: Backend> Tier<B> {
    /// The host tier of a cache; `None` without [`CacheConfig::host_bytes`].
    pub fn new(
        device: &Device<B>,
        config: &CacheConfig,
        schema: &Schema,
    ) -> Result<Option<Box<Self>>, KvError> {
        let Some(layout) = TierLayout::new(config, schema)? else { return Ok(None) };
        let limits = Limits {
            block_bytes: layout.unit_bytes,
            checkpoint_bytes: layout.unit_bytes * u64::from(layout.checkpoint_units),
            lease_bytes: 0,
            remembered: 0,
            reserved_blocks: layout.units,
        };
        let capacity = layout.unit_bytes * u64::from(layout.units);
        Ok(Some(Box::new(Self {
            layout,
            pool: HostPool::new(device, layout.units, layout.unit_bytes as usize)?,
            tree: PrefixTree::new(limits, ScoredLru { capacity }),
            to_host: CopyStreams::new(device, layout)?,
            to_device: CopyStreams::new(device, layout)?,
            storing: None,
            loading: None,
            prefetches: VecDeque::new(),
            loans: Loans::default(),
            offers: None,
            stats: TierStats::default(),
            events: VecDeque::with_capacity(EVENTS),
        })))
    }

    /// The part of a prompt that is in host memory.
    pub fn lookup(&self, root: &RootKey, tokens: &[u32]) -> Lookup {
        self.tree.lookup(root, tokens)
    }

    /// Counters since the cache was created.
    pub fn stats(&self) -> TierStats {
        let evicted = self.tree.stats();
        TierStats {
            evicted_blocks: evicted.evicted_blocks,
            evicted_checkpoints: evicted.evicted_checkpoints,
            ..self.stats
        }
    }

    /// Removes and returns the latest events.
    pub fn take_events(&mut self) -> Vec<TierEvent> {
        self.events.drain(..).collect()
    }

    /// Number of free units, and of all units.
    pub fn units(&self) -> (u32, u32) {
        (self.pool.free(), self.pool.units())
    }

    /// Blocks of the longest prefix that fits, with its checkpoint.
    pub fn prefix_blocks(&self) -> u32 {
        self.pool.units().saturating_sub(self.layout.checkpoint_units)
    }

    /// Whether a transfer to host memory is under way.
    pub fn is_storing(&self) -> bool {
        self.storing.is_some()
    }

    /// Whether no transfer is under way and no prompt waits.
    pub fn is_idle(&self) -> bool {
        self.storing.is_none() && self.loading.is_none() && self.prefetches.is_empty()
    }

    /// Counts everything in its tree and all units again, for tests. Not to be called while another thread drops an
    /// image or reservation.
    pub fn audit(&self) -> Result<(), String> {
        self.tree.audit()?;
        let counts = self.tree.counts();
        let moving = self.storing.as_ref().map_or(0, |storing| storing.count);
        let held = u64::from(counts.blocks)
            + u64::from(counts.checkpoints) * u64::from(self.layout.checkpoint_units)
            + (moving + self.loans.units()) as u64;
        let (free, all) = self.units();
        match held + u64::from(free) == u64::from(all) {
            true => Ok(()),
            false => Err(format!("{held} units are held and {free} are free, of {all}")),
        }
    }

    pub(super) fn event(&mut self, event: TierEvent) {
        trace::moved(&event);
        if self.events.len() == EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }

    /// Offers a checkpoint to the tier below, if there is one.
    pub(super) fn offer(&mut self, checkpoint: WeakCheckpoint) {
        let Some(offers) = self.offers.as_mut() else { return };
        if offers.len() == OFFERS {
            offers.pop_front();
            self.stats.lost_offers += 1;
        }
        offers.push_back(checkpoint);
    }

    /// Releases a reference of its tree.
    pub(super) fn release(&mut self, reference: Reference) {
        let released = self.tree.release(reference, drop);
        debug_assert!(released.is_ok(), "the reference is this tree's");
    }

    pub(super) fn miss(&mut self, miss: TierMiss) {
        self.stats.misses[miss.index()] += 1;
        self.event(TierEvent::Missed { miss });
    }

    /// Releases the references of images and reservations that a lower tier has dropped.
    pub fn end_loans(&mut self) {
        self.loans.take_dropped().into_iter().for_each(|reference| self.release(reference));
    }

    /// Number of units that are free, or that eviction would free.
    pub(super) fn obtainable_units(&self) -> usize {
        let counts = self.tree.counts();
        let of_checkpoint = self.layout.checkpoint_units as usize;
        self.pool.free() as usize
            + counts.evictable_blocks as usize
            + counts.evictable_checkpoints as usize * of_checkpoint
    }

    /// Takes `units` units. Evicts unreferenced prefixes if needed; if these are not enough, evicts
    /// nothing and returns `None`.
    pub(super) fn take_units(&mut self, units: usize) -> Option<Vec<HostUnit<B>>> {
        self.end_loans();
        if units > self.obtainable_units() {
            return None;
        }
        let freed = if made(Mistake::EvictedUnitsLost) { std::mem::forget } else { drop };
        while (self.pool.free() as usize) < units && self.tree.evict_first(freed) {}
        self.pool.take(units)
    }

    /// Gives the tree the blocks of a prefix after `above`, and the checkpoint at its end. Blocks and checkpoints that
    /// the tree got from elsewhere meanwhile stay as they are. Returns the number of blocks that the tree took, and the
    /// checkpoint's name in the tree if it took that.
    pub(super) fn take_prefix(
        &mut self,
        above: &mut Reference,
        tokens: &[[u32; BLOCK]],
        blocks: Vec<HostUnit<B>>,
        checkpoint: HostCheckpoint<B>,
    ) -> (usize, Option<WeakCheckpoint>) {
        let new = &tokens[above.blocks() as usize..];
        let mut blocks: Vec<_> = blocks.into_iter().map(Some).collect();
        let take = |index: usize| match blocks[index].take() {
            Some(block) => Arc::new(block),
            None => unreachable!("there is a block for each, and it is asked for once"),
        };
        let taken = self.tree.extend(above, new, take, drop);
        debug_assert!(taken.is_ok(), "the reference is this tree's");
        let origin = checkpoint.origin;
        let attached = self.tree.attach(above, tokens.len() as u32, origin, checkpoint);
        (taken.unwrap_or(0), attached.ok())
    }
}
