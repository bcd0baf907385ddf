//! What is ordered before a point of a launch: accesses of the threads of all blocks.

use std::collections::BTreeMap;

use super::clock::{Clocks, Event};
use super::fault::{Site, ThreadIndex};
use super::time::{Known, Moment, Released, warp_of};

/// The accesses that are ordered before a point, by block.
#[derive(Clone, Debug, Default)]
pub struct Past(BTreeMap<u64, OfBlock>);

/// Accesses of a block: of each warp until a time, and of some threads until later ones.
#[derive(Clone, Debug)]
struct OfBlock {
    warps: Known,
    threads: BTreeMap<ThreadIndex, u64>,
}

impl Past {
    /// Nothing.
    pub const fn new() -> Self {
        Self(BTreeMap::new())
    }

    /// Whether that is nothing.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A thread of block `block` makes known what it did, and what it knows of its block.
    pub fn release_thread(block: u64, thread: ThreadIndex, clocks: &mut Clocks) -> Self {
        let (warps, time) = clocks.release_thread(thread);
        let threads = BTreeMap::from([(thread, time)]);
        Self(BTreeMap::from([(block, OfBlock { warps, threads })]))
    }

    /// The same of a warp whose lanes are together.
    pub fn release_warp(block: u64, warp: u32, clocks: &mut Clocks) -> Self {
        let mut released = Released::NOTHING;
        clocks.release(warp, &mut released);
        let warps = released.known;
        Self(BTreeMap::from([(block, OfBlock { warps, threads: BTreeMap::new() })]))
    }

    /// Adds what is ordered before another point.
    pub fn join(&mut self, other: &Self) {
        for (&block, other) in &other.0 {
            let Some(own) = self.0.get_mut(&block) else {
                self.0.insert(block, other.clone());
                continue;
            };
            own.warps
                .iter_mut()
                .zip(other.warps)
                .for_each(|(time, other)| *time = (*time).max(other));
            for (&thread, &other) in &other.threads {
                let time = own.threads.entry(thread).or_default();
                *time = (*time).max(other);
            }
            let warps = own.warps;
            own.threads.retain(|&thread, time| *time > warps[warp_of(thread)]);
        }
    }

    /// Whether an access of block `block` is ordered before the point.
    pub fn has(&self, block: u64, event: &Event) -> bool {
        self.0.get(&block).is_some_and(|of| {
            let of_thread = of.threads.get(&event.at.thread).copied().unwrap_or_default();
            of.warps[warp_of(event.at.thread)].max(of_thread) > event.at.time
        })
    }
}

/// A point of a block from which on a past is known: what is ordered after the point is ordered after the past.
#[derive(Clone, Debug)]
pub struct Learned {
    /// The point.
    pub at: Moment,
    /// What is known from there on.
    pub past: Past,
}

/// A thread, and what it knows.
#[derive(Clone, Copy)]
pub struct Observer<'a> {
    /// The number of its block in the launch.
    pub block: u64,
    /// The thread.
    pub thread: ThreadIndex,
    /// What the warps of its block know of each other.
    pub clocks: &'a Clocks,
    /// What its block knows of others.
    pub learned: &'a [Learned],
}

impl Observer<'_> {
    /// An access that it makes now.
    pub fn event(self, location: Site) -> Event {
        self.clocks.event(self.thread, location)
    }

    /// Whether an access of block `block` is ordered before what it does from now on.
    pub fn knows(self, block: u64, event: &Event) -> bool {
        let is_own = block == self.block && self.clocks.orders(event.at, self.thread);
        let knows = |learned: &Learned| {
            learned.past.has(block, event) && self.clocks.orders(learned.at, self.thread)
        };
        is_own || self.learned.iter().any(knows)
    }
}
