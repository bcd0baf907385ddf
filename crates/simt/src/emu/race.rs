//! Races on a word of shared memory.
//!
//! A [`History`] keeps enough of a word's earlier accesses to find a race whenever there is one.

use super::clock::{Clocks, Event};
use super::fault::{AccessKind, ThreadIndex};
use super::time::warp_of;

/// Accesses of one kind since the last write, in their order: enough of them to find a race with a later access. An
/// access that happens before a newer one of them may be dropped, since a later access that races with it also races
/// with the newer one. Of a warp at most two accesses are kept. If any access of the warp races with a thread of
/// another warp, its last one does. If any races with a lane of the same warp, the last one does, or the last one of
/// another lane. Most words have one access, which needs no memory of its own.
#[derive(Clone, Debug, Default)]
struct Concurrent {
    first: Option<Event>,
    others: Vec<Event>,
}

impl Concurrent {
    /// All of them, in their order.
    fn all(&self) -> impl DoubleEndedIterator<Item = &Event> {
        self.first.iter().chain(&self.others)
    }

    /// Adds an access that is made now.
    fn add(&mut self, new: Event, clocks: &Clocks) {
        let Some(first) = &mut self.first else {
            self.first = Some(new);
            return;
        };
        let thread = new.at.thread();
        let is_own = |old: &Event| warp_of(old.at.thread()) == warp_of(thread);
        let is_like = |old: &Event| old.at.time() == new.at.time() && is_own(old);
        let last = match &mut self.others[..] {
            [] => first,
            [others @ .., last] => {
                if is_like(last) && is_like(others.last().unwrap_or(first)) {
                    // A later access that races with the new one also races with one of those two.
                    return;
                }
                last
            }
        };
        if last.at.thread() == thread {
            *last = new;
            return;
        }
        self.retain(|old| !clocks.orders(old.at, thread));
        if self.all().filter(|old| is_own(old)).count() > 1 {
            let mut earlier = 0;
            self.retain(|old| {
                earlier += u32::from(is_own(old));
                !is_own(old) || earlier > 1
            });
        }
        match &mut self.first {
            None => self.first = Some(new),
            Some(_) => self.others.push(new),
        }
    }

    /// Keeps those for which `is_kept` is true; it is called for each of them, in their order.
    fn retain(&mut self, mut is_kept: impl FnMut(&Event) -> bool) {
        let keeps_first = self.first.as_ref().is_some_and(&mut is_kept);
        self.others.retain(is_kept);
        if !keeps_first {
            self.first = (!self.others.is_empty()).then(|| self.others.remove(0));
        }
    }

    fn clear(&mut self) {
        self.first = None;
        self.others.clear();
    }

    /// One of the accesses that is not ordered before what a thread does now.
    fn racing(&self, thread: ThreadIndex, clocks: &Clocks) -> Option<Event> {
        self.all().copied().find(|old| !clocks.orders(old.at, thread))
    }
}

/// The accesses to a word with which later ones may race.
#[derive(Clone, Debug, Default)]
pub struct History {
    write: Option<Event>,
    reads: Concurrent,
    /// Few words have any.
    atomics: Option<Box<Atomics>>,
}

/// The atomic accesses to a word since the last plain write.
#[derive(Clone, Debug, Default)]
struct Atomics {
    all: Concurrent,
    last_write: Option<Event>,
}

impl History {
    /// An earlier access with which an access of kind `kind`, made by `thread` now, races.
    pub fn racing(
        &self,
        kind: AccessKind,
        thread: ThreadIndex,
        clocks: &Clocks,
    ) -> Option<(AccessKind, Event)> {
        let write = self.write.filter(|write| !clocks.orders(write.at, thread));
        let read = || Some((AccessKind::Read, self.reads.racing(thread, clocks)?));
        let atomics = self.atomics.as_ref();
        let atomic = || Some((AccessKind::Atomic, atomics?.all.racing(thread, clocks)?));
        write.map(|write| (AccessKind::Write, write)).or_else(|| match kind {
            AccessKind::Read | AccessKind::ReadConstant => atomic(),
            AccessKind::Atomic => read(),
            AccessKind::Write => read().or_else(atomic),
        })
    }

    /// Adds an access that is made now and does not race. `writes` says whether an atomic access is a write.
    pub fn add(&mut self, (kind, writes): (AccessKind, bool), new: Event, clocks: &Clocks) {
        match kind {
            AccessKind::Read | AccessKind::ReadConstant => self.reads.add(new, clocks),
            AccessKind::Atomic => {
                let atomics = self.atomics.get_or_insert_default();
                atomics.all.add(new, clocks);
                if writes {
                    atomics.last_write = Some(new);
                }
            }
            AccessKind::Write => {
                // All earlier accesses happen before this write. So a later access that races with
                // one of them also races with the write.
                self.write = Some(new);
                self.reads.clear();
                if let Some(atomics) = &mut self.atomics {
                    atomics.all.clear();
                    atomics.last_write = None;
                }
            }
        }
    }

    /// The last write, plain or atomic.
    pub fn last_write(&self) -> Option<(AccessKind, Event)> {
        let atomic = self.atomics.as_ref().and_then(|atomics| atomics.last_write);
        let atomic = atomic.map(|write| (AccessKind::Atomic, write));
        atomic.or_else(|| Some((AccessKind::Write, self.write?)))
    }

    /// An access of kind `kind` since the last write, or that write: the last of them, or one by another lane of its warp
    /// at the same time.
    pub fn last(&self, kind: AccessKind) -> Option<Event> {
        match kind {
            AccessKind::Read | AccessKind::ReadConstant => self.reads.all().next_back().copied(),
            AccessKind::Atomic => self.atomics.as_ref()?.all.all().next_back().copied(),
            AccessKind::Write => self.write,
        }
    }

    /// Makes this the same as `other`.
    pub fn copy_from(&mut self, other: &Self) {
        self.write = other.write;
        self.reads.first = other.reads.first;
        self.reads.others.clone_from(&other.reads.others);
        self.atomics.clone_from(&other.atomics);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::panic::Location;

    use super::*;
    use crate::emu::order::Order;
    use crate::emu::proxy::Store;
    use crate::emu::time::Released;

    /// Three warps, and the threads of other blocks.
    const PARTIES: usize = 4;

    enum Done {
        Access(AccessKind),
        /// The earlier events that it makes visible.
        Fence(HashSet<usize>),
    }

    /// A reference model of the rule, by sets: the numbers of the earlier accesses and proxy fences that each party
    /// knows.
    #[derive(Default)]
    struct Past {
        events: Vec<(Done, ThreadIndex)>,
        known: [HashSet<usize>; PARTIES],
        barrier: HashSet<usize>,
        left: Option<HashSet<usize>>,
    }

    fn party(thread: ThreadIndex) -> usize {
        warp_of(thread).min(PARTIES - 1)
    }

    impl Past {
        /// The events of a party itself, and those that it knows.
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

        /// Whether an earlier event happens before what a thread does now.
        fn knows(&self, thread: ThreadIndex, event: usize) -> bool {
            self.events[event].1 == thread || self.known[party(thread)].contains(&event)
        }

        fn races(&self, kind: AccessKind, thread: ThreadIndex) -> bool {
            let conflict = |other| other != kind || kind == AccessKind::Write;
            self.events.iter().enumerate().any(|(i, (event, _))| {
                matches!(event, Done::Access(other) if conflict(*other)) && !self.knows(thread, i)
            })
        }

        fn fence(&mut self, thread: ThreadIndex) {
            let visible = (0..self.events.len()).filter(|&i| self.knows(thread, i)).collect();
            self.events.push((Done::Fence(visible), thread));
        }

        /// Whether a product of a thread sees the last write.
        fn sees_write(&self, thread: ThreadIndex) -> Option<bool> {
            let is_write = |(event, _): &(_, _)| matches!(event, Done::Access(AccessKind::Write));
            let write = self.events.iter().rposition(is_write)?;
            Some(self.events.iter().enumerate().any(|(i, (event, _))| {
                matches!(event, Done::Fence(visible) if visible.contains(&write))
                    && self.knows(thread, i)
            }))
        }
    }

    #[test]
    fn races_and_stores_that_are_not_visible_are_those_of_the_rule() {
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
                        let new = clocks.event(thread, Location::caller());
                        let found = history.racing(kind, thread, &clocks).is_some();
                        assert_eq!(found, expected, "seed {seed}: {kind:?} by {thread}");
                        if kind == AccessKind::Write {
                            let fences = clocks.proxy_fences(thread);
                            write = Some(Store { at: new.at, fences });
                        }
                        history.add((kind, true), new, &clocks);
                        past.events.push((Done::Access(kind), thread));
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
