//! Happens-before between blocks: the accesses of all blocks that happen before a point of a launch.

use std::collections::BTreeMap;

use super::clock::{Clocks, Event};
use super::fault::{Site, ThreadIndex};
use super::time::{Known, Moment, Released, warp_of};

/// The accesses that happen before a point, by block.
#[derive(Clone, Debug, Default)]
pub struct Past(BTreeMap<u64, OfBlock>);

/// Accesses of one block: those of each warp before a time, and those of some threads before a later time.
#[derive(Clone, Debug)]
struct OfBlock {
    warps: Known,
    threads: BTreeMap<ThreadIndex, u64>,
}

impl Past {
    /// A past without accesses.
    pub const fn new() -> Self {
        Self(BTreeMap::new())
    }

    /// Whether it has no accesses.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The past that a thread of block `block` releases: its own accesses, and those of its block that it knows.
    pub fn release_thread(block: u64, thread: ThreadIndex, clocks: &mut Clocks) -> Self {
        let (warps, time) = clocks.release_thread(thread);
        let threads = BTreeMap::from([(thread, time)]);
        Self(BTreeMap::from([(block, OfBlock { warps, threads })]))
    }

    /// As [`Self::release_thread`], for all lanes of a warp.
    pub fn release_warp(block: u64, warp: u32, clocks: &mut Clocks) -> Self {
        let mut released = Released::NOTHING;
        clocks.release(warp, &mut released);
        let warps = released.known;
        Self(BTreeMap::from([(block, OfBlock { warps, threads: BTreeMap::new() })]))
    }

    /// Adds the accesses of another past.
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

    /// Whether it contains an access of block `block`.
    pub fn has(&self, block: u64, event: &Event) -> bool {
        self.0.get(&block).is_some_and(|of| {
            let thread = event.at.thread();
            let of_thread = of.threads.get(&thread).copied().unwrap_or_default();
            of.warps[warp_of(thread)].max(of_thread) > event.at.time()
        })
    }
}

/// A past that a block acquired at a point: everything that is ordered after the point is ordered after the past.
#[derive(Clone, Debug)]
pub struct Learned {
    /// The point.
    pub at: Moment,
    /// The past.
    pub past: Past,
}

/// A thread, with the data that tell which accesses happen before its next one.
#[derive(Clone, Copy)]
pub struct Observer<'a> {
    /// The number of its block in the launch.
    pub block: u64,
    /// The thread.
    pub thread: ThreadIndex,
    /// The vector clocks of its block.
    pub clocks: &'a Clocks,
    /// The pasts that its block has acquired.
    pub learned: &'a [Learned],
}

impl Observer<'_> {
    /// An access that the thread makes now.
    pub fn event(self, location: Site) -> Event {
        self.clocks.event(self.thread, location)
    }

    /// Whether an access of block `block` happens before everything that the thread does from now on.
    pub fn knows(self, block: u64, event: &Event) -> bool {
        let is_own = block == self.block && self.clocks.orders(event.at, self.thread);
        let knows = |learned: &Learned| {
            learned.past.has(block, event) && self.clocks.orders(learned.at, self.thread)
        };
        is_own || self.learned.iter().any(knows)
    }
}
