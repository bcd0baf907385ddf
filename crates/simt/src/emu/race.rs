//! Detects races on a word of shared memory.
//!
//! Two accesses are ordered when one thread makes both, or when barriers lead from one to the other: those of the block,
//! of the warp, of the cluster, and named ones. Each warp has a vector clock: how far it knows the other warps to have
//! come. A [`History`] remembers what is needed of a word's past to find a racing pair whenever there is one.

use super::fault::{Access, AccessKind, Site, ThreadIndex};
use crate::limits::{MAX_BLOCK_THREADS, WARP_SIZE};

/// The most warps of a block; the threads of the other blocks of its cluster are one more.
const OTHERS: usize = WARP_SIZE as usize;
const WARPS: usize = OTHERS + 1;

/// What a warp knows of each: accesses at smaller times are ordered before all that it does from now on.
pub type Known = [u64; WARPS];
/// Nothing of anybody.
pub const NOTHING: Known = [0; WARPS];

/// The time of each warp, and what it knows of the others'.
pub struct Clocks {
    /// When what a warp does now takes place.
    now: Known,
    /// Of itself a warp knows until when its lanes were together.
    known: [Known; WARPS],
    /// What the warps that have arrived at the cluster's barrier, and go on, have made known.
    left: Option<Known>,
}

impl Clocks {
    /// Nobody knows of anybody.
    pub const fn new() -> Self {
        Self { now: NOTHING, known: [NOTHING; WARPS], left: None }
    }

    /// A new block starts: what was is ordered before all that it does.
    pub fn start_block(&mut self) {
        self.left = None;
        self.synchronize(WARPS);
    }

    /// All warps of the block come together.
    pub fn synchronize_block(&mut self) {
        self.synchronize(OTHERS);
    }

    /// All warps of the cluster come together, or those that have left learn that all have.
    pub fn synchronize_cluster(&mut self) {
        let Some(mut released) = self.left.take() else { return self.synchronize(WARPS) };
        self.release(OTHERS as u32, &mut released);
        for known in &mut self.known {
            join(known, &released);
        }
    }

    fn synchronize(&mut self, warps: usize) {
        let mut all = NOTHING;
        for warp in 0..warps {
            self.release(warp as u32, &mut all);
        }
        self.known[..warps].fill(all);
    }

    /// The lanes of a warp come together.
    pub fn synchronize_warp(&mut self, warp: u32) {
        let warp = warp as usize;
        self.now[warp] += 1;
        self.known[warp][warp] = self.now[warp];
    }

    /// A warp makes what it did known to whoever has `barrier`; its own lanes learn nothing of each other.
    pub fn release(&mut self, warp: u32, barrier: &mut Known) {
        let warp = warp as usize;
        self.now[warp] += 1;
        join(barrier, &self.known[warp]);
        barrier[warp] = self.now[warp];
    }

    /// A warp learns what has been released to `barrier`.
    pub fn acquire(&mut self, warp: u32, barrier: &Known) {
        join(&mut self.known[warp as usize], barrier);
    }

    /// A warp arrives at the cluster's barrier, and goes on; `releases` if it makes known what it did.
    pub fn leave(&mut self, warp: u32, releases: bool) {
        let mut left = self.left.unwrap_or(NOTHING);
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

    /// An access that a thread makes now.
    pub fn event(&self, thread: ThreadIndex, location: Site) -> Event {
        Event { thread, location, time: self.now[warp_of(thread)] }
    }

    /// A thread makes what it did known: of each warp until when, and of itself. Its clock goes on.
    pub fn release_thread(&mut self, thread: ThreadIndex) -> (Known, u64) {
        let warp = warp_of(thread);
        self.now[warp] += 1;
        (self.known[warp], self.now[warp])
    }

    /// A point that the next barrier of the cluster makes known to all warps.
    pub fn before_cluster(&self, location: Site) -> Event {
        self.event(ThreadIndex(MAX_BLOCK_THREADS), location)
    }

    /// Whether the warps arrived at the cluster's barrier and went on.
    pub fn has_left(&self) -> bool {
        self.left.is_some()
    }

    /// Whether an earlier access is ordered before all that a thread does from now on.
    pub fn orders(&self, earlier: &Event, thread: ThreadIndex) -> bool {
        earlier.thread == thread
            || self.known[warp_of(thread)][warp_of(earlier.thread)] > earlier.time
    }
}

/// Makes `known` the larger of both in each element.
fn join(known: &mut Known, other: &Known) {
    for (known, other) in known.iter_mut().zip(other) {
        *known = (*known).max(*other);
    }
}

/// The warp of a thread; threads of other blocks are of one warp.
pub fn warp_of(thread: ThreadIndex) -> usize {
    ((thread.0 / WARP_SIZE) as usize).min(OTHERS)
}

/// An access and its time, of its warp.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    thread: ThreadIndex,
    /// The source line.
    location: Site,
    time: u64,
}

impl Event {
    /// Whose access it is.
    pub fn thread(&self) -> ThreadIndex {
        self.thread
    }

    /// The number of its warp among those of [`Known`].
    pub fn warp(&self) -> usize {
        warp_of(self.thread)
    }

    /// When it took place.
    pub fn time(&self) -> u64 {
        self.time
    }

    /// What a fault says of it.
    pub fn access(&self, kind: AccessKind) -> Access {
        Access { thread: self.thread, kind, location: self.location }
    }
}

/// The accesses of one kind since the last write that none of the others is ordered after, in their order. Of a warp the
/// last one races with another warp if any does, and it or the last one of another lane with a lane of its own.
#[derive(Clone, Debug, Default)]
struct Concurrent(Vec<Event>);

impl Concurrent {
    fn add(&mut self, event: Event, clocks: &Clocks) {
        self.0.retain(|earlier| !clocks.orders(earlier, event.thread));
        let warp = warp_of(event.thread);
        let mut of_warp = (0..self.0.len()).filter(|&i| warp_of(self.0[i].thread) == warp);
        if let (Some(first), Some(_)) = (of_warp.next(), of_warp.next()) {
            self.0.remove(first);
        }
        self.0.push(event);
    }

    /// An access that races with what a thread does now.
    fn racing(&self, thread: ThreadIndex, clocks: &Clocks) -> Option<&Event> {
        self.0.iter().find(|earlier| !clocks.orders(earlier, thread))
    }
}

/// The accesses to a word that matter for later ones.
#[derive(Clone, Debug, Default)]
pub struct History {
    write: Option<Event>,
    reads: Concurrent,
    atomics: Concurrent,
}

impl History {
    /// Adds an access that is made now.
    ///
    /// # Errors
    /// It races: the earlier access of the two, and the later.
    pub fn add(
        &mut self,
        kind: AccessKind,
        event: Event,
        clocks: &Clocks,
    ) -> Result<(), (Access, Access)> {
        let Event { thread, .. } = event;
        let write = self.write.as_ref().filter(|write| !clocks.orders(write, thread));
        let read = || self.reads.racing(thread, clocks).map(|e| e.access(AccessKind::Read));
        let atomic = || self.atomics.racing(thread, clocks).map(|e| e.access(AccessKind::Atomic));
        let racing = write.map(|write| write.access(AccessKind::Write)).or_else(|| match kind {
            AccessKind::Read | AccessKind::ReadConstant => atomic(),
            AccessKind::Atomic => read(),
            AccessKind::Write => read().or_else(atomic),
        });
        if let Some(first) = racing {
            return Err((first, event.access(kind)));
        }
        match kind {
            AccessKind::Read | AccessKind::ReadConstant => self.reads.add(event, clocks),
            AccessKind::Atomic => self.atomics.add(event, clocks),
            AccessKind::Write => {
                // All earlier accesses are ordered before this one, and what races with them later
                // races with this one too.
                self.write = Some(event);
                self.reads.0.clear();
                self.atomics.0.clear();
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::panic::Location;

    use super::*;
    use crate::emu::order::Order;

    /// Three warps, and the threads of other blocks.
    const PARTIES: usize = 4;

    /// The rule itself, by sets: which earlier accesses, by number, each party knows.
    #[derive(Default)]
    struct Past {
        accesses: Vec<(AccessKind, ThreadIndex)>,
        known: [HashSet<usize>; PARTIES],
        barrier: HashSet<usize>,
        left: Option<HashSet<usize>>,
    }

    fn party(thread: ThreadIndex) -> usize {
        warp_of(thread).min(PARTIES - 1)
    }

    impl Past {
        /// What a party did itself and what it knows.
        fn all_of(&self, of: usize) -> HashSet<usize> {
            let is_own = |&i: &usize| party(self.accesses[i].1) == of;
            let own = (0..self.accesses.len()).filter(is_own);
            own.chain(self.known[of].iter().copied()).collect()
        }

        fn meet(&mut self, parties: usize) {
            let all: HashSet<usize> = (0..parties).flat_map(|of| self.all_of(of)).collect();
            self.known[..parties].fill(all);
        }

        fn leave(&mut self, warp: usize) {
            let all = self.all_of(warp);
            self.left.get_or_insert_default().extend(all);
        }

        fn meet_cluster(&mut self) {
            let Some(mut left) = self.left.take() else { return self.meet(PARTIES) };
            left.extend(self.all_of(PARTIES - 1));
            self.known.iter_mut().for_each(|known| known.extend(&left));
        }

        fn races(&self, kind: AccessKind, thread: ThreadIndex) -> bool {
            let conflict = |other| other != kind || kind == AccessKind::Write;
            self.accesses.iter().enumerate().any(|(i, &(other, earlier))| {
                let knows = self.known[party(thread)].contains(&i);
                conflict(other) && earlier != thread && !knows
            })
        }
    }

    #[test]
    fn finds_a_race_exactly_when_some_earlier_access_races() {
        const THREADS: [u32; 8] = [0, 1, 2, 32, 33, 64, 1024, 2048];
        let (mut races_seen, mut ends_seen) = (0, 0);
        for seed in 0..200_000 {
            let mut order = Order::new(seed, 0);
            let mut draw = |count| order.shuffled(count)[0];
            let (mut clocks, mut barrier) = (Clocks::new(), NOTHING);
            let (mut history, mut past) = (History::default(), Past::default());
            let raced = (0..16).any(|_| {
                let (choice, warp) = (draw(15), u32::from(draw(3)));
                let at = warp as usize;
                match choice {
                    0 => {
                        clocks.synchronize_block();
                        past.meet(PARTIES - 1);
                    }
                    1 | 2 => {
                        clocks.synchronize_warp(warp);
                        past.known[at] = past.all_of(at);
                    }
                    3 | 4 => {
                        clocks.release(warp, &mut barrier);
                        past.barrier.extend(past.all_of(at));
                    }
                    5 | 6 => {
                        clocks.acquire(warp, &barrier);
                        past.known[at].extend(&past.barrier);
                    }
                    7 => {
                        clocks.leave(warp, true);
                        past.leave(at);
                    }
                    8 | 9 => {
                        clocks.synchronize_cluster();
                        past.meet_cluster();
                    }
                    choice => {
                        let kinds = [AccessKind::Write, AccessKind::Atomic];
                        let kind =
                            *kinds.get(usize::from(choice) - 10).unwrap_or(&AccessKind::Read);
                        let thread = ThreadIndex(THREADS[usize::from(draw(8))]);
                        let expected = past.races(kind, thread);
                        let event = clocks.event(thread, Location::caller());
                        let found = history.add(kind, event, &clocks).is_err();
                        assert_eq!(found, expected, "seed {seed}: {kind:?} by {thread}");
                        past.accesses.push((kind, thread));
                        return expected;
                    }
                }
                false
            });
            if raced { races_seen += 1 } else { ends_seen += 1 }
        }
        assert!(races_seen > 10_000 && ends_seen > 1_000, "{races_seen}, {ends_seen}");
    }
}
