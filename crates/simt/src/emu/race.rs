//! Detects races on a word of shared memory.
//!
//! Two accesses are ordered when one thread makes both, or when barriers lead from one to the other: those of the block,
//! of the warp, and named ones. Each warp has a vector clock: how far it knows the other warps to have come. A
//! [`History`] remembers what is needed of a word's past to find a racing pair whenever there is one.

use super::fault::{Access, AccessKind, Site, ThreadIndex};
use crate::limits::WARP_SIZE;

/// The warps of a block, and one for the threads of other blocks of the cluster.
const WARPS: usize = WARP_SIZE as usize + 1;

/// What a warp knows of each: accesses at smaller times are ordered before all that it does from now on.
pub type Known = [u64; WARPS];
/// Nothing of anybody.
pub const NOTHING: Known = [0; WARPS];

/// The time of each warp, and what it knows of the others'.
pub struct Clocks([Known; WARPS]);

impl Clocks {
    /// Nobody knows of anybody.
    pub const fn new() -> Self {
        Self([NOTHING; WARPS])
    }

    /// All warps come together.
    pub fn synchronize_block(&mut self) {
        let mut all = NOTHING;
        for (warp, known) in self.0.iter_mut().enumerate() {
            known[warp] += 1;
            join(&mut all, known);
        }
        self.0.fill(all);
    }

    /// The lanes of a warp come together.
    pub fn synchronize_warp(&mut self, warp: u32) {
        self.0[warp as usize][warp as usize] += 1;
    }

    /// A warp, whose lanes are together, makes what it did known to whoever has `barrier`.
    pub fn release(&mut self, warp: u32, barrier: &mut Known) {
        self.synchronize_warp(warp);
        join(barrier, &self.0[warp as usize]);
    }

    /// A warp learns what has been released to `barrier`.
    pub fn acquire(&mut self, warp: u32, barrier: &Known) {
        join(&mut self.0[warp as usize], barrier);
    }

    /// An access that a thread makes now.
    pub fn event(&self, thread: ThreadIndex, location: Site) -> Event {
        let warp = warp_of(thread);
        Event { thread, location, time: self.0[warp][warp] }
    }

    /// Whether an earlier access is ordered before all that a thread does from now on.
    fn orders(&self, earlier: &Event, thread: ThreadIndex) -> bool {
        earlier.thread == thread || self.0[warp_of(thread)][warp_of(earlier.thread)] > earlier.time
    }
}

/// Makes `known` the larger of both in each element.
fn join(known: &mut Known, other: &Known) {
    for (known, other) in known.iter_mut().zip(other) {
        *known = (*known).max(*other);
    }
}

/// The warp of a thread; threads of other blocks are of one warp.
fn warp_of(thread: ThreadIndex) -> usize {
    ((thread.0 / WARP_SIZE) as usize).min(WARPS - 1)
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
    fn access(&self, kind: AccessKind) -> Access {
        Access { thread: self.thread, kind, location: self.location }
    }
}

/// The accesses of one kind since the last write that none of the others is ordered after: of a warp two are enough.
#[derive(Clone, Debug, Default)]
struct Concurrent(Vec<Event>);

impl Concurrent {
    fn add(&mut self, event: Event, clocks: &Clocks) {
        self.0.retain(|earlier| !clocks.orders(earlier, event.thread));
        let of_warp = |other: &&Event| warp_of(other.thread) == warp_of(event.thread);
        if self.0.iter().filter(of_warp).count() < 2 {
            self.0.push(event);
        }
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
            AccessKind::Read => atomic(),
            AccessKind::Atomic => read(),
            AccessKind::Write => read().or_else(atomic),
        });
        if let Some(first) = racing {
            return Err((first, event.access(kind)));
        }
        match kind {
            AccessKind::Read => self.reads.add(event, clocks),
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

    /// The rule itself, by sets: which earlier accesses, by number, each warp knows.
    #[derive(Default)]
    struct Past {
        accesses: Vec<(AccessKind, ThreadIndex)>,
        known: [HashSet<usize>; 3],
        barrier: HashSet<usize>,
    }

    impl Past {
        /// A warp knows what its own lanes did.
        fn meet(&mut self, warp: usize) {
            let of_warp = |&(i, &(_, thread)): &(usize, &(AccessKind, ThreadIndex))| {
                (warp_of(thread) == warp).then_some(i).is_some()
            };
            let own = self.accesses.iter().enumerate().filter(of_warp).map(|(i, _)| i);
            self.known[warp].extend(own);
        }

        fn release(&mut self, warp: usize) {
            self.meet(warp);
            self.barrier.extend(self.known[warp].iter());
        }

        fn acquire(&mut self, warp: usize) {
            self.known[warp].extend(self.barrier.iter());
        }

        fn races(&self, kind: AccessKind, thread: ThreadIndex) -> bool {
            let conflict = |other| other != kind || kind == AccessKind::Write;
            self.accesses.iter().enumerate().any(|(i, &(other, earlier))| {
                let knows = self.known[warp_of(thread)].contains(&i);
                conflict(other) && earlier != thread && !knows
            })
        }
    }

    #[test]
    fn finds_a_race_exactly_when_some_earlier_access_races() {
        const THREADS: [u32; 6] = [0, 1, 2, 32, 33, 64];
        let (mut races_seen, mut ends_seen) = (0, 0);
        for seed in 0..200_000 {
            let mut order = Order::new(seed, 0);
            let mut draw = |count| order.shuffled(count)[0];
            let (mut clocks, mut barrier) = (Clocks::new(), NOTHING);
            let (mut history, mut past) = (History::default(), Past::default());
            let raced = (0..16).any(|_| {
                let (choice, warp) = (draw(12), draw(3));
                match choice {
                    0 => {
                        clocks.synchronize_block();
                        (0..3).for_each(|warp| past.meet(warp));
                        past.known.fill((0..past.accesses.len()).collect());
                    }
                    1 | 2 => {
                        clocks.synchronize_warp(u32::from(warp));
                        past.meet(usize::from(warp));
                    }
                    3 | 4 => {
                        clocks.release(u32::from(warp), &mut barrier);
                        past.release(usize::from(warp));
                    }
                    5 | 6 => {
                        clocks.acquire(u32::from(warp), &barrier);
                        past.acquire(usize::from(warp));
                    }
                    choice => {
                        let kinds = [AccessKind::Write, AccessKind::Atomic];
                        let kind = *kinds.get(usize::from(choice) - 7).unwrap_or(&AccessKind::Read);
                        let thread = ThreadIndex(THREADS[usize::from(draw(6))]);
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
