//! Visibility of stores to shared memory for products of warpgroups. Products read operands through the async proxy. A
//! store is visible there if it happens before a proxy fence, and the fence happens before the product (PTX ISA,
//! "Memory Consistency Model"; 9.7.13.4, `fence.proxy.async`). Any thread may call the fence: the one that stored, the
//! one that multiplies, or a third one.
//!
//! A vector clock here stands for the stores before its times.

use super::fault::ThreadIndex;
use super::time::{Known, Moment, NOTHING, OTHERS, Released, WARPS, join, warp_of};

/// The proxy fences of a block's threads, and the stores that they have made visible.
pub struct ProxyFences {
    /// For each thread, the times of its fences, by its warp's clock.
    times: Vec<Vec<u64>>,
    /// For each thread, the stores that it knew at its last fence, which are visible to it.
    of_thread: Vec<Known>,
    /// For each warp, the stores that its lanes knew at their fences, joined.
    of_warp: [Known; WARPS],
    /// For each warp, the stores that are visible to all of its lanes.
    visible: [Known; WARPS],
    /// Whether a thread of the present block has fenced. If not, no store of the block is visible.
    any_fence: bool,
}

/// A store to shared memory.
#[derive(Clone, Copy)]
pub struct Store {
    /// The thread, and the time of the store.
    pub at: Moment,
    /// Number of proxy fences that the thread had called before.
    pub fences: u32,
}

impl ProxyFences {
    /// No thread has fenced.
    pub const fn new() -> Self {
        Self {
            times: Vec::new(),
            of_thread: Vec::new(),
            of_warp: [NOTHING; WARPS],
            visible: [NOTHING; WARPS],
            any_fence: false,
        }
    }

    /// Starts a new block. The vector clocks can stay, because all stores of the new block have later times.
    pub fn start_block(&mut self) {
        self.times.iter_mut().for_each(Vec::clear);
        self.any_fence = false;
    }

    /// A thread fences. This makes its own stores until now visible, and the stores before `known`, its warp's vector
    /// clock.
    pub fn fence(&mut self, thread: ThreadIndex, now: u64, known: &Known) {
        let at = thread.0 as usize;
        if self.times.len() <= at {
            self.times.resize_with(at + 1, Vec::new);
            self.of_thread.resize(at + 1, NOTHING);
        }
        self.any_fence = true;
        self.times[at].push(now);
        self.of_thread[at] = *known;
        join(&mut self.of_warp[warp_of(thread)], known);
    }

    /// Number of times that a thread has fenced.
    pub fn count(&self, thread: ThreadIndex) -> u32 {
        self.times.get(thread.0 as usize).map_or(0, |times| times.len() as u32)
    }

    /// A barrier of the lanes of a warp.
    pub fn synchronize_warp(&mut self, warp: usize) {
        join(&mut self.visible[warp], &self.of_warp[warp]);
    }

    /// A barrier of the first `warps` warps.
    pub fn synchronize(&mut self, warps: usize) {
        if !self.any_fence {
            return;
        }
        let mut all = NOTHING;
        (0..warps).for_each(|warp| self.release(warp, &mut all));
        self.visible[..warps].fill(all);
    }

    /// A warp releases to `visible` the stores that its own fences, and the fences that it knows, have made visible.
    pub fn release(&self, warp: usize, visible: &mut Known) {
        join(visible, &self.visible[warp]);
        join(visible, &self.of_warp[warp]);
    }

    /// A warp acquires the visible stores that have been released.
    pub fn acquire(&mut self, warp: usize, released: &Released) {
        join(&mut self.visible[warp], &released.visible);
    }

    /// Whether a product of thread `reader` sees a store; `known` is the vector clock of the reader's warp.
    pub fn is_visible(&self, store: Store, reader: ThreadIndex, known: &Known) -> bool {
        let (thread, time, fences) = (store.at.thread(), store.at.time(), store.fences);
        let (writer, warp) = (warp_of(thread), warp_of(reader));
        let times = self.times.get(thread.0 as usize).filter(|_| writer < OTHERS);
        let own_fence = times.and_then(|times| times.get(fences as usize));
        let has_fenced = own_fence.is_some_and(|&fence| thread == reader || known[writer] > fence);
        let of_reader = self.of_thread.get(reader.0 as usize).map_or(0, |fenced| fenced[writer]);
        has_fenced || time < self.visible[warp][writer].max(of_reader)
    }
}
