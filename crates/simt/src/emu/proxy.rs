//! Which stores to shared memory the products of warpgroups see. They read operands through the async proxy: a store is
//! visible there if a proxy fence is ordered behind the store and before the product (PTX ISA, "Memory Consistency Model";
//! 9.7.13.4, `fence.proxy.async`). The thread that stored may call it, the one that multiplies, or any other.

use super::fault::ThreadIndex;
use super::time::{Known, Moment, NOTHING, OTHERS, Released, WARPS, join, warp_of};

/// The proxy fences of a block's threads, and what they have made visible.
pub struct ProxyFences {
    /// When each thread fenced, by its warp's clock.
    times: Vec<Vec<u64>>,
    /// What the last fence of each thread has made visible of stores that it knew of.
    of_thread: Vec<Known>,
    /// The same of the fences of all lanes of each warp.
    of_warp: [Known; WARPS],
    /// What all lanes of a warp know to be visible.
    visible: [Known; WARPS],
    /// Whether a thread of the present block has fenced: if not, nothing that it stored is visible.
    any_fence: bool,
}

/// A store to shared memory.
#[derive(Clone, Copy)]
pub struct Store {
    /// Whose it is, and when it was made.
    pub at: Moment,
    /// How many fences the thread had called before.
    pub fences: u32,
}

impl ProxyFences {
    /// Nobody has fenced.
    pub const fn new() -> Self {
        Self {
            times: Vec::new(),
            of_thread: Vec::new(),
            of_warp: [NOTHING; WARPS],
            visible: [NOTHING; WARPS],
            any_fence: false,
        }
    }

    /// A new block starts, whose stores are all later than what is known.
    pub fn start_block(&mut self) {
        self.times.iter_mut().for_each(Vec::clear);
        self.any_fence = false;
    }

    /// A thread fences: its own stores until now, and those before `known` of the other warps.
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

    /// How many times a thread has fenced.
    pub fn count(&self, thread: ThreadIndex) -> u32 {
        self.times.get(thread.0 as usize).map_or(0, |times| times.len() as u32)
    }

    /// The lanes of a warp come together.
    pub fn synchronize_warp(&mut self, warp: usize) {
        join(&mut self.visible[warp], &self.of_warp[warp]);
    }

    /// The first `warps` warps come together.
    pub fn synchronize(&mut self, warps: usize) {
        if !self.any_fence {
            return;
        }
        let mut all = NOTHING;
        (0..warps).for_each(|warp| self.release(warp, &mut all));
        self.visible[..warps].fill(all);
    }

    /// A warp makes known what its fences, and those that it knows of, have made visible.
    pub fn release(&self, warp: usize, visible: &mut Known) {
        join(visible, &self.visible[warp]);
        join(visible, &self.of_warp[warp]);
    }

    /// A warp learns what has been released.
    pub fn acquire(&mut self, warp: usize, released: &Released) {
        join(&mut self.visible[warp], &released.visible);
    }

    /// Whether a product of thread `reader` sees a store; `known` is what the reader's warp knows of the others.
    pub fn is_visible(&self, store: Store, reader: ThreadIndex, known: &Known) -> bool {
        let Store { at: Moment { thread, time }, fences } = store;
        let (writer, warp) = (warp_of(thread), warp_of(reader));
        let times = self.times.get(thread.0 as usize).filter(|_| writer < OTHERS);
        let own_fence = times.and_then(|times| times.get(fences as usize));
        let has_fenced = own_fence.is_some_and(|&fence| thread == reader || known[writer] > fence);
        let of_reader = self.of_thread.get(reader.0 as usize).map_or(0, |fenced| fenced[writer]);
        has_fenced || time < self.visible[warp][writer].max(of_reader)
    }
}
