//! What the warps of a block know of each other.
//!
//! Two accesses are ordered when one thread makes both, or when barriers lead from one to the other: those of the block,
//! of the warp, of the cluster, and named ones. Each warp has a vector clock: how far it knows the other warps to have
//! come.

use super::fault::{Access, AccessKind, Site, ThreadIndex};
use super::proxy::{ProxyFences, Store};
use super::time::{Known, Moment, NOTHING, OTHERS, Released, WARPS, join, warp_of};
use crate::limits::MAX_BLOCK_THREADS;

/// The time of each warp, and what it knows of the others': what is known is ordered before all that it does from now on.
pub struct Clocks {
    /// When what a warp does now takes place.
    now: Known,
    /// Of itself a warp knows until when its lanes were together.
    known: [Known; WARPS],
    /// What the warps that have arrived at the cluster's barrier, and go on, have made known.
    left: Option<Released>,
    fences: ProxyFences,
}

impl Clocks {
    /// Nobody knows of anybody.
    pub const fn new() -> Self {
        Self { now: NOTHING, known: [NOTHING; WARPS], left: None, fences: ProxyFences::new() }
    }

    /// A new block starts: what was is ordered before all that it does.
    pub fn start_block(&mut self) {
        self.left = None;
        self.fences.start_block();
        self.synchronize_accesses(WARPS);
    }

    /// All warps of the block come together.
    pub fn synchronize_block(&mut self) {
        self.synchronize(OTHERS);
    }

    /// All warps of the cluster come together, or those that have left learn that all have.
    pub fn synchronize_cluster(&mut self) {
        let Some(mut released) = self.left.take() else { return self.synchronize(WARPS) };
        self.release(OTHERS as u32, &mut released);
        (0..WARPS as u32).for_each(|warp| self.acquire(warp, &released));
    }

    fn synchronize(&mut self, warps: usize) {
        self.synchronize_accesses(warps);
        self.fences.synchronize(warps);
    }

    /// The first `warps` warps come together: each knows what they have done, and what any of them knew of the others.
    fn synchronize_accesses(&mut self, warps: usize) {
        let mut all = NOTHING;
        for (warp, all) in all.iter_mut().enumerate() {
            if warp < warps {
                self.now[warp] += 1;
                *all = self.now[warp];
            } else {
                let known = self.known[..warps].iter().map(|known| known[warp]);
                *all = known.max().unwrap_or_default();
            }
        }
        self.known[..warps].fill(all);
    }

    /// The lanes of a warp come together.
    pub fn synchronize_warp(&mut self, warp: u32) {
        let warp = warp as usize;
        self.now[warp] += 1;
        self.known[warp][warp] = self.now[warp];
        self.fences.synchronize_warp(warp);
    }

    /// A warp makes what it did known to whoever has `barrier`; its own lanes learn nothing of each other.
    pub fn release(&mut self, warp: u32, barrier: &mut Released) {
        let warp = warp as usize;
        self.now[warp] += 1;
        join(&mut barrier.known, &self.known[warp]);
        barrier.known[warp] = self.now[warp];
        self.fences.release(warp, &mut barrier.visible);
    }

    /// A warp learns what has been released to `barrier`.
    pub fn acquire(&mut self, warp: u32, barrier: &Released) {
        join(&mut self.known[warp as usize], &barrier.known);
        self.fences.acquire(warp as usize, barrier);
    }

    /// A warp arrives at the cluster's barrier, and goes on; `releases` if it makes known what it did.
    pub fn leave(&mut self, warp: u32, releases: bool) {
        let mut left = self.left.unwrap_or(Released::NOTHING);
        if releases {
            self.release(warp, &mut left);
        }
        self.left = Some(left);
    }

    /// The present time of a warp.
    pub fn now(&self, warp: u32) -> u64 {
        self.now[warp as usize]
    }

    /// Whether a warp knows all other warps to have come as far as `times`.
    pub fn knows(&self, warp: u32, times: &Known) -> bool {
        let known = self.known[warp as usize].iter().zip(times).enumerate();
        known.into_iter().all(|(other, (known, time))| other == warp as usize || known >= time)
    }

    /// The present, for a thread.
    pub fn moment(&self, thread: ThreadIndex) -> Moment {
        Moment { thread, time: self.now[warp_of(thread)] }
    }

    /// An access that a thread makes now.
    pub fn event(&self, thread: ThreadIndex, location: Site) -> Event {
        Event { at: self.moment(thread), location }
    }

    /// A thread makes what it did known: of each warp until when, and of itself. Its clock goes on.
    pub fn release_thread(&mut self, thread: ThreadIndex) -> (Known, u64) {
        let warp = warp_of(thread);
        self.now[warp] += 1;
        (self.known[warp], self.now[warp])
    }

    /// A thread calls a proxy fence.
    pub fn fence_proxy(&mut self, thread: ThreadIndex) {
        let warp = warp_of(thread);
        self.fences.fence(thread, self.now[warp], &self.known[warp]);
    }

    /// How many proxy fences a thread has called.
    pub fn proxy_fences(&self, thread: ThreadIndex) -> u32 {
        self.fences.count(thread)
    }

    /// Whether a product of thread `reader` sees a store.
    pub fn is_visible(&self, store: Store, reader: ThreadIndex) -> bool {
        self.fences.is_visible(store, reader, &self.known[warp_of(reader)])
    }

    /// A point that the next barrier of the cluster makes known to all warps.
    pub fn before_cluster(&self) -> Moment {
        self.moment(ThreadIndex(MAX_BLOCK_THREADS))
    }

    /// Whether the warps arrived at the cluster's barrier and went on.
    pub fn has_left(&self) -> bool {
        self.left.is_some()
    }

    /// Whether what was done earlier is ordered before all that a thread does from now on.
    pub fn orders(&self, earlier: Moment, thread: ThreadIndex) -> bool {
        earlier.thread == thread
            || self.known[warp_of(thread)][warp_of(earlier.thread)] > earlier.time
    }
}

/// An access, and when it was made.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// Who, and when.
    pub at: Moment,
    /// The source line.
    location: Site,
}

impl Event {
    /// What a fault says of it.
    pub fn access(&self, kind: AccessKind) -> Access {
        Access { thread: self.at.thread, kind, location: self.location }
    }
}
