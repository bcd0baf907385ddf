//! What the host tier has, and what is on its way.

use std::collections::VecDeque;
use std::sync::Arc;

use dsv4_kv_prefix::{Limits, Lookup, Origin, Place, PrefixTree, Reference, RootKey, ScoredLru};
use kv_layout::geometry::BLOCK_TOKENS;

use super::lane::Lane;
use super::layout::TierLayout;
use super::stats::{TierEvent, TierMiss, TierStats};
use crate::config::CacheConfig;
use crate::device::{Backend, Device, HostCopies, HostPool, HostUnit};
use crate::error::KvError;
use crate::ledger::{Arrival, Departure};
use crate::schema::Schema;

/// Tokens of a block.
pub(super) const BLOCK: usize = BLOCK_TOKENS as usize;
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

/// Which prompt is wanted on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefetchId(pub(super) u64);

/// What is on its way to the host. The device's tree keeps what is read, the host's what is above it; what is written is
/// held by the copies.
pub(super) struct Leaving<B: Backend> {
    pub departure: Departure,
    /// At the end of what the host has.
    pub above: Reference,
    /// Of the blocks that it has not, then of the checkpoint, until their copies are queued.
    pub units: Vec<HostUnit<B>>,
    /// How many there are.
    pub count: usize,
    pub copies: Option<HostCopies<B>>,
    /// Whether the device failed: nothing of it is entered.
    pub is_lost: bool,
}

impl<B: Backend> Leaving<B> {
    /// Units that are written.
    pub fn units(&self) -> usize {
        self.count
    }
}

/// A prompt that is to arrive.
pub(super) struct Wanted {
    pub id: PrefetchId,
    pub root: RootKey,
    pub tokens: Vec<u32>,
}

/// What is on its way to the device. The host's tree keeps what is read; what is written is its own.
pub(super) struct Arriving<B: Backend> {
    pub wanted: Wanted,
    /// Tokens of its blocks, down to its checkpoint.
    pub tokens: Vec<[u32; BLOCK]>,
    pub arrival: Arrival,
    /// What is read, until its copies are queued: of blocks, and of the checkpoint.
    pub units: (Vec<Unit<B>>, Vec<Unit<B>>),
    pub origin: Origin,
    pub has_draft: bool,
    pub copies: Option<HostCopies<B>>,
    /// Whether the device failed: nothing of it is entered.
    pub is_lost: bool,
    pub is_cancelled: bool,
    /// In the host's tree.
    pub source: Reference,
}

/// The host tier of a cache.
pub(crate) struct Tier<B: Backend> {
    pub(super) layout: TierLayout,
    pub(super) pool: HostPool<B>,
    pub(super) tree: HostTree<B>,
    pub(super) out: Lane<B>,
    pub(super) back: Lane<B>,
    pub(super) leaving: Option<Leaving<B>>,
    pub(super) arriving: Option<Arriving<B>>,
    /// Prompts that are to arrive, in order.
    pub(super) wanted: VecDeque<Wanted>,
    /// Units that a tier below fills.
    pub(super) reserved: usize,
    pub(super) next: u64,
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
        };
        let capacity = layout.unit_bytes * u64::from(layout.units);
        Ok(Some(Box::new(Self {
            layout,
            pool: HostPool::new(device, layout.units, layout.unit_bytes as usize)?,
            tree: PrefixTree::new(limits, ScoredLru { capacity }),
            out: Lane::new(device, layout)?,
            back: Lane::new(device, layout)?,
            leaving: None,
            arriving: None,
            wanted: VecDeque::new(),
            reserved: 0,
            next: 0,
            offers: None,
            stats: TierStats::default(),
            events: VecDeque::new(),
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

    /// Whether something is on its way to the host.
    pub fn is_leaving(&self) -> bool {
        self.leaving.is_some()
    }

    /// Whether nothing is under way, or waits for its turn.
    pub fn is_idle(&self) -> bool {
        self.leaving.is_none() && self.arriving.is_none() && self.wanted.is_empty()
    }

    /// Counts everything in its tree again, and units, for tests.
    pub fn audit(&self) -> Result<(), String> {
        self.tree.audit()?;
        let counts = self.tree.counts();
        let moving = self.leaving.as_ref().map_or(0, Leaving::units);
        let held = u64::from(counts.blocks)
            + u64::from(counts.checkpoints) * u64::from(self.layout.checkpoint_units)
            + (moving + self.reserved) as u64;
        let (free, all) = self.units();
        match held + u64::from(free) == u64::from(all) {
            true => Ok(()),
            false => Err(format!("{held} units are held and {free} are free, of {all}")),
        }
    }

    pub(super) fn event(&mut self, event: TierEvent) {
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

    /// So many units, for which what nobody uses is evicted.
    pub(super) fn take_units(&mut self, units: usize) -> Option<Vec<HostUnit<B>>> {
        if units > self.layout.units as usize {
            return None;
        }
        while (self.pool.free() as usize) < units && self.tree.evict_first(drop) {}
        self.pool.take(units)
    }
}
