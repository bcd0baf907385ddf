//! What the host tier has, and what is on its way.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dsv4_kv_prefix::{Limits, Lookup, Origin, Place, PrefixTree, Reference, RootKey, ScoredLru};

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

/// Events that are kept until they are asked for.
const EVENTS: usize = 1024;
/// Checkpoints that are offered to a tier below at once.
const OFFERS: usize = 1024;

/// A unit that nobody writes any more.
pub(super) type Unit<B> = Arc<HostUnit<B>>;
pub(super) type HostTree<B> = PrefixTree<Unit<B>, HostCheckpoint<B>, ScoredLru, BLOCK>;

/// A checkpoint in host memory.
pub(super) struct HostCheckpoint<B: Backend> {
    /// In order.
    pub units: Vec<Unit<B>>,
    pub has_draft: bool,
    pub origin: Origin,
}

/// Which prompt is wanted on the device: a number that is unique in the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefetchId(u64);

impl PrefetchId {
    pub(super) fn unique() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// A transfer to host memory. The device's tree holds a reference to what is read, the host's tree to what is above it;
/// the copies own what is written.
pub(super) struct PendingStore<B: Backend> {
    pub source: StoreSource,
    /// At the end of what the host has.
    pub above: Reference,
    /// Of the blocks that it has not, then of the checkpoint, until their copies are queued.
    pub units: Vec<HostUnit<B>>,
    /// How many there are.
    pub count: usize,
    pub in_flight: InFlightCopies<B>,
}

/// A prompt that is to arrive.
pub(super) struct Wanted {
    pub id: PrefetchId,
    pub root: RootKey,
    pub tokens: Vec<u32>,
    /// How often it was asked for, and not cancelled since.
    pub asked: u32,
}

/// A transfer to the device. The host's tree holds a reference to what is read; the transfer owns what is written.
pub(super) struct PendingLoad<B: Backend> {
    pub wanted: Wanted,
    /// Tokens of its blocks, down to its checkpoint.
    pub tokens: Vec<[u32; BLOCK]>,
    pub target: LoadTarget,
    /// What is read, until its copies are queued: of blocks, and of the checkpoint.
    pub units: (Vec<Unit<B>>, Vec<Unit<B>>),
    pub origin: Origin,
    pub has_draft: bool,
    pub in_flight: InFlightCopies<B>,
    /// In the host's tree.
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
    /// Prompts that are to arrive, in order.
    pub(super) wanted: VecDeque<Wanted>,
    /// What a tier below reads and fills.
    pub(super) loans: Loans,
    /// Checkpoints that a tier below has not looked at, the latest of them; `None` without such a tier.
    pub(super) offers: Option<VecDeque<Place>>,
    pub(super) stats: TierStats,
    pub(super) events: VecDeque<TierEvent>,
}

impl<B: Backend> Tier<B> {
    /// Of a cache; `None` without [`CacheConfig::host_bytes`].
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
            room: layout.units,
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
            wanted: VecDeque::new(),
            loans: Loans::default(),
            offers: None,
            stats: TierStats::default(),
            events: VecDeque::with_capacity(EVENTS),
        })))
    }

    /// What it has of a prompt.
    pub fn lookup(&self, root: &RootKey, tokens: &[u32]) -> Lookup {
        self.tree.lookup(root, tokens)
    }

    /// What it has done.
    pub fn stats(&self) -> TierStats {
        let evicted = self.tree.stats();
        TierStats {
            evicted_blocks: evicted.evicted_blocks,
            evicted_checkpoints: evicted.evicted_checkpoints,
            ..self.stats
        }
    }

    /// What it did since the last call, the latest of it.
    pub fn take_events(&mut self) -> Vec<TierEvent> {
        self.events.drain(..).collect()
    }

    /// Units that nobody has, and all there are.
    pub fn units(&self) -> (u32, u32) {
        (self.pool.free(), self.pool.units())
    }

    /// Blocks of the longest prefix that fits, with its checkpoint.
    pub fn prefix_blocks(&self) -> u32 {
        self.pool.units().saturating_sub(self.layout.checkpoint_units)
    }

    /// Whether something is on its way to the host.
    pub fn is_storing(&self) -> bool {
        self.storing.is_some()
    }

    /// Whether nothing is under way, or waits for its turn.
    pub fn is_idle(&self) -> bool {
        self.storing.is_none() && self.loading.is_none() && self.wanted.is_empty()
    }

    /// Counts everything in its tree again, and units, for tests: not while another thread drops an image, or room.
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
    pub(super) fn offer(&mut self, place: Place) {
        let Some(offers) = self.offers.as_mut() else { return };
        if offers.len() == OFFERS {
            offers.pop_front();
            self.stats.lost_offers += 1;
        }
        offers.push_back(place);
    }

    /// Refers to a place of its tree no more.
    pub(super) fn release(&mut self, reference: Reference) {
        let released = self.tree.release(reference, drop);
        debug_assert!(released.is_ok(), "the reference is this tree's");
    }

    pub(super) fn miss(&mut self, miss: TierMiss) {
        self.stats.misses[miss.index()] += 1;
        self.event(TierEvent::Missed { miss });
    }

    /// Keeps nothing any more for what a tier below has dropped.
    pub fn end_loans(&mut self) {
        self.loans.take_dropped().into_iter().for_each(|reference| self.release(reference));
    }

    /// So many units, for which what nobody uses is evicted; if that is not enough, nothing is.
    pub(super) fn take_units(&mut self, units: usize) -> Option<Vec<HostUnit<B>>> {
        self.end_loans();
        let counts = self.tree.counts();
        let of_checkpoint = self.layout.checkpoint_units as usize;
        let evictable = counts.evictable_blocks as usize
            + counts.evictable_checkpoints as usize * of_checkpoint;
        if units > self.pool.free() as usize + evictable {
            return None;
        }
        let freed = if made(Mistake::EvictedUnitsLost) { std::mem::forget } else { drop };
        while (self.pool.free() as usize) < units && self.tree.evict_first(freed) {}
        self.pool.take(units)
    }

    /// The tree takes what it has not of a prefix behind `above`: how many blocks that are, and where the checkpoint is, if
    /// it took that. What it got from elsewhere meanwhile stays as it is.
    pub(super) fn take_prefix(
        &mut self,
        above: &mut Reference,
        tokens: &[[u32; BLOCK]],
        blocks: Vec<HostUnit<B>>,
        checkpoint: HostCheckpoint<B>,
    ) -> (usize, Option<Place>) {
        let new = &tokens[above.blocks() as usize..];
        let mut blocks: Vec<_> = blocks.into_iter().map(Some).collect();
        let take = |index: usize| match blocks[index].take() {
            Some(block) => Arc::new(block),
            None => unreachable!("there is a block for each, and it is asked for once"),
        };
        let taken = self.tree.extend(above, new, take, drop);
        debug_assert!(taken.is_ok(), "the reference is this tree's");
        let origin = checkpoint.origin;
        let place = self.tree.attach(above, tokens.len() as u32, origin, checkpoint);
        (taken.unwrap_or(0), place.ok())
    }
}
