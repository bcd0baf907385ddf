//! Happens-before between the threads of a block, by vector clocks of its warps.
//!
//! Two accesses are ordered if one thread makes both, or if barriers lead from one to the other: those of the block,
//! of the warp, of the cluster, and named ones. A warp *knows* an access if the access happens before everything that
//! the warp does next. Its vector clock has a time for each warp: it knows the accesses of that warp before that time.

use super::fault::{Access, AccessKind, Site, ThreadIndex};
use super::proxy::{ProxyFences, Store};
use super::time::{Known, Moment, NOTHING, OTHERS, Released, WARPS, join, warp_of};
use crate::limits::MAX_BLOCK_THREADS;

/// The time and the vector clock of each warp.
pub struct Clocks {
    /// The present time of each warp: accesses that it makes now have this time.
    now: Known,
    /// The vector clock of each warp. The element for the warp itself is the time of the last barrier of its lanes:
    /// each lane knows the accesses of the other lanes before that time.
    known: [Known; WARPS],
    /// Released by the warps that have arrived at the cluster barrier without waiting; `None` if no warp has.
    left: Option<Released>,
    fences: ProxyFences,
}

impl Clocks {
    /// Clocks under which no warp knows any access.
    pub const fn new() -> Self {
        Self { now: NOTHING, known: [NOTHING; WARPS], left: None, fences: ProxyFences::new() }
    }

    /// Starts a new block: all accesses of earlier blocks happen before its own.
    pub fn start_block(&mut self) {
        self.left = None;
        self.fences.start_block();
        self.synchronize_accesses(WARPS);
    }

    /// A barrier of all warps of the block.
    pub fn synchronize_block(&mut self) {
        self.synchronize(OTHERS);
    }

    /// A cluster barrier is complete. If warps arrived at it without waiting, each warp acquires what the arrivals
    /// released, and all accesses of other blocks; otherwise it is a barrier of all warps.
    pub fn synchronize_cluster(&mut self) {
        let Some(mut released) = self.left.take() else { return self.synchronize(WARPS) };
        self.release(OTHERS as u32, &mut released);
        (0..WARPS as u32).for_each(|warp| self.acquire(warp, &released));
    }

    fn synchronize(&mut self, warps: usize) {
        self.synchronize_accesses(warps);
        self.fences.synchronize(warps);
    }

    /// A barrier of the first `warps` warps, for accesses: afterwards each of them knows all accesses of these warps,
    /// and the accesses of the remaining warps that any of them knew.
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

    /// A barrier of the lanes of a warp.
    pub fn synchronize_warp(&mut self, warp: u32) {
        let warp = warp as usize;
        self.now[warp] += 1;
        self.known[warp][warp] = self.now[warp];
        self.fences.synchronize_warp(warp);
    }

    /// A warp releases its own accesses, and those that it knows, to `barrier`. This orders nothing between its own
    /// lanes.
    pub fn release(&mut self, warp: u32, barrier: &mut Released) {
        let warp = warp as usize;
        self.now[warp] += 1;
        join(&mut barrier.known, &self.known[warp]);
        barrier.known[warp] = self.now[warp];
        self.fences.release(warp, &mut barrier.visible);
    }

    /// A warp acquires what has been released to `barrier`.
    pub fn acquire(&mut self, warp: u32, barrier: &Released) {
        join(&mut self.known[warp as usize], &barrier.known);
        self.fences.acquire(warp as usize, barrier);
    }

    /// A warp arrives at the cluster barrier without waiting; `releases` if the arrival has release semantics.
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

    /// Whether a warp knows all accesses of the other warps before `times`.
    pub fn knows(&self, warp: u32, times: &Known) -> bool {
        let known = self.known[warp as usize].iter().zip(times).enumerate();
        known.into_iter().all(|(other, (known, time))| other == warp as usize || known >= time)
    }

    /// The present time of a thread.
    pub fn moment(&self, thread: ThreadIndex) -> Moment {
        Moment::new(thread, self.now[warp_of(thread)])
    }

    /// An access that a thread makes now.
    pub fn event(&self, thread: ThreadIndex, location: Site) -> Event {
        Event { at: self.moment(thread), location }
    }

    /// A thread releases: returns its warp's vector clock, and the time before which its own accesses are released.
    /// Advances the clock of its warp.
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

    /// Number of proxy fences that a thread has called.
    pub fn proxy_fences(&self, thread: ThreadIndex) -> u32 {
        self.fences.count(thread)
    }

    /// Whether a product of thread `reader` sees a store.
    pub fn is_visible(&self, store: Store, reader: ThreadIndex) -> bool {
        self.fences.is_visible(store, reader, &self.known[warp_of(reader)])
    }

    /// A point that all warps of the block know after the next cluster barrier.
    pub fn before_cluster(&self) -> Moment {
        self.moment(ThreadIndex(MAX_BLOCK_THREADS))
    }

    /// Whether warps have arrived at the cluster barrier without waiting.
    pub fn has_left(&self) -> bool {
        self.left.is_some()
    }

    /// Whether `earlier` happens before everything that a thread does from now on.
    pub fn orders(&self, earlier: Moment, thread: ThreadIndex) -> bool {
        earlier.thread() == thread
            || self.known[warp_of(thread)][warp_of(earlier.thread())] > earlier.time()
    }
}

/// An access, with its time.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// The thread, and the time of the access.
    pub at: Moment,
    /// The source line.
    location: Site,
}

impl Event {
    /// Its description in a fault.
    pub fn access(&self, kind: AccessKind) -> Access {
        Access { thread: self.at.thread(), kind, location: self.location }
    }
}
