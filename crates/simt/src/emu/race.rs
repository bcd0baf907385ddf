//! Races on a word of shared memory.
//!
//! A [`History`] remembers what is needed of a word's past to find a racing pair whenever there is one.

use smallvec::SmallVec;

use super::clock::Clocks;
use super::fault::{AccessKind, ThreadIndex};
use super::time::{Moment, warp_of};

/// An access, in eight bytes: each word of a block's shared memory remembers several.
#[derive(Clone, Copy, Debug)]
pub struct Recorded {
    time: u32,
    thread: u16,
    /// The number of its place in the source.
    pub site: u16,
}

impl Recorded {
    /// An access at a place of this number.
    ///
    /// # Panics
    /// The time or the thread's number is too large.
    pub fn new(Moment { thread, time }: Moment, site: u16) -> Self {
        let time = u32::try_from(time).expect("clocks start anew before");
        let thread = u16::try_from(thread.0).expect("a cluster has at most 16 blocks");
        Self { time, thread, site }
    }

    /// Who made it, and when.
    pub fn at(self) -> Moment {
        Moment { thread: ThreadIndex(self.thread.into()), time: self.time.into() }
    }

    fn warp(self) -> usize {
        warp_of(self.at().thread)
    }
}

/// The accesses of one kind since the last write that none of the others is ordered after, and some that others are, in their
/// order. Of a warp the last one races with another warp if any does, and it or the last one of another lane with a lane of its own.
#[derive(Clone, Debug, Default)]
struct Concurrent(SmallVec<[Recorded; 6]>);

impl Concurrent {
    fn add(&mut self, new: Recorded, clocks: &Clocks) {
        let is_like = |old: &Recorded| old.time == new.time && old.warp() == new.warp();
        if let [.., first, second] = &self.0[..]
            && is_like(first)
            && is_like(second)
        {
            // Who races with this one races with one of those two.
            return;
        }
        if let Some(last) = self.0.last_mut()
            && last.thread == new.thread
        {
            *last = new;
            return;
        }
        self.0.retain(|old| !clocks.orders(old.at(), new.at().thread));
        let mut of_warp = (0..self.0.len()).filter(|&i| self.0[i].warp() == new.warp());
        if let (Some(first), Some(_)) = (of_warp.next(), of_warp.next()) {
            self.0.remove(first);
        }
        self.0.push(new);
    }

    /// An access that races with what a thread does now.
    fn racing(&self, thread: ThreadIndex, clocks: &Clocks) -> Option<Recorded> {
        self.0.iter().copied().find(|old| !clocks.orders(old.at(), thread))
    }
}

/// The accesses to a word that matter for later ones.
#[derive(Clone, Debug, Default)]
pub struct History {
    write: Option<Recorded>,
    reads: Concurrent,
    /// Few words have any.
    atomics: Option<Box<Concurrent>>,
}

impl History {
    /// An earlier access, which an access that a thread makes now races with, if there is one.
    pub fn racing(
        &self,
        kind: AccessKind,
        thread: ThreadIndex,
        clocks: &Clocks,
    ) -> Option<(AccessKind, Recorded)> {
        let write = self.write.filter(|write| !clocks.orders(write.at(), thread));
        let read = || Some((AccessKind::Read, self.reads.racing(thread, clocks)?));
        let atomic = || Some((AccessKind::Atomic, self.atomics.as_ref()?.racing(thread, clocks)?));
        write.map(|write| (AccessKind::Write, write)).or_else(|| match kind {
            AccessKind::Read | AccessKind::ReadConstant => atomic(),
            AccessKind::Atomic => read(),
            AccessKind::Write => read().or_else(atomic),
        })
    }

    /// Adds an access that is made now, and races with none.
    pub fn add(&mut self, kind: AccessKind, new: Recorded, clocks: &Clocks) {
        match kind {
            AccessKind::Read | AccessKind::ReadConstant => self.reads.add(new, clocks),
            AccessKind::Atomic => self.atomics.get_or_insert_default().add(new, clocks),
            AccessKind::Write => {
                // All earlier accesses are ordered before this one, and what races with them later
                // races with this one too.
                self.write = Some(new);
                self.reads.0.clear();
                self.atomics = None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::emu::order::Order;
    use crate::emu::proxy::Store;
    use crate::emu::time::Released;

    /// Three warps, and the threads of other blocks.
    const PARTIES: usize = 4;

    /// The rule itself, by sets: which earlier accesses and proxy fences, by number, each party knows.
    #[derive(Default)]
    struct Past {
        /// Accesses, and of fences which accesses they make visible.
        events: Vec<(Result<AccessKind, HashSet<usize>>, ThreadIndex)>,
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
            let is_own = |&i: &usize| party(self.events[i].1) == of;
            let own = (0..self.events.len()).filter(is_own);
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

        /// Whether an earlier event is ordered before what a thread does now.
        fn knows(&self, thread: ThreadIndex, event: usize) -> bool {
            self.events[event].1 == thread || self.known[party(thread)].contains(&event)
        }

        fn races(&self, kind: AccessKind, thread: ThreadIndex) -> bool {
            let conflict = |other| other != kind || kind == AccessKind::Write;
            self.events.iter().enumerate().any(|(i, (event, _))| {
                event.as_ref().is_ok_and(|&other| conflict(other)) && !self.knows(thread, i)
            })
        }

        fn fence(&mut self, thread: ThreadIndex) {
            let visible = (0..self.events.len()).filter(|&i| self.knows(thread, i)).collect();
            self.events.push((Err(visible), thread));
        }

        /// Whether a product of a thread sees the last write.
        fn sees_write(&self, thread: ThreadIndex) -> Option<bool> {
            let is_write = |(event, _): &(_, _)| matches!(event, Ok(AccessKind::Write));
            let write = self.events.iter().rposition(is_write)?;
            Some(self.events.iter().enumerate().any(|(i, (event, _))| {
                event.as_ref().is_err_and(|visible| visible.contains(&write))
                    && self.knows(thread, i)
            }))
        }
    }

    #[test]
    fn finds_a_race_exactly_when_some_earlier_access_races() {
        const THREADS: [u32; 8] = [0, 1, 2, 32, 33, 64, 1024, 2048];
        let (mut races_seen, mut ends_seen, mut seen) = (0, 0, [0, 0]);
        for seed in 0..200_000 {
            let mut order = Order::new(seed, 0);
            let mut draw = |count| order.shuffled(count)[0];
            let (mut clocks, mut barrier) = (Clocks::new(), Released::NOTHING);
            let (mut history, mut past) = (History::default(), Past::default());
            let mut write = None;
            let raced = (0..20).any(|_| {
                let (choice, warp) = (draw(19), u32::from(draw(3)));
                let thread = ThreadIndex(THREADS[usize::from(draw(8))]);
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
                    // Threads of other blocks neither fence here nor multiply.
                    10..=13 if party(thread) == PARTIES - 1 => {}
                    10 | 11 => {
                        clocks.fence_proxy(thread);
                        past.fence(thread);
                    }
                    12 | 13 => {
                        let found = write.map(|write| clocks.is_visible(write, thread));
                        assert_eq!(found, past.sees_write(thread), "seed {seed}: {thread}");
                        found.into_iter().for_each(|found| seen[usize::from(found)] += 1);
                    }
                    choice => {
                        let kinds = [AccessKind::Write, AccessKind::Atomic];
                        let kind =
                            *kinds.get(usize::from(choice) - 14).unwrap_or(&AccessKind::Read);
                        let expected = past.races(kind, thread);
                        let new = Recorded::new(clocks.moment(thread), 0);
                        let found = history.racing(kind, thread, &clocks).is_some();
                        assert_eq!(found, expected, "seed {seed}: {kind:?} by {thread}");
                        if kind == AccessKind::Write {
                            let fences = clocks.proxy_fences(thread);
                            write = Some(Store { at: new.at(), fences });
                        }
                        history.add(kind, new, &clocks);
                        past.events.push((Ok(kind), thread));
                        return expected;
                    }
                }
                false
            });
            if raced { races_seen += 1 } else { ends_seen += 1 }
        }
        assert!(races_seen > 10_000 && ends_seen > 1_000, "{races_seen}, {ends_seen}");
        assert!(seen.iter().all(|&seen| seen > 1_000), "{seen:?}");
    }
}
