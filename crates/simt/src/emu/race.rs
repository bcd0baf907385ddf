//! Detects races on a word of shared memory.
//!
//! Two accesses are ordered when one thread makes both, when the block's barrier lies between them,
//! or, for two lanes of a warp, when the warp's barrier does. A [`History`] remembers enough of a
//! word's past to find a racing pair whenever there is one, in constant space.

use super::fault::{Access, AccessKind, Site, ThreadIndex};
use crate::limits::WARP_SIZE;

/// The time of an access, as barriers passed so far.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Clock {
    /// Block barriers over all blocks that used this shared memory; starts at 1.
    pub block: u64,
    /// Barriers of the accessing thread's warp.
    pub warp: u32,
}

/// An access and its time.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// The thread.
    pub thread: ThreadIndex,
    /// The source line.
    pub location: Site,
    /// The time.
    pub clock: Clock,
}

impl Event {
    fn warp(&self) -> u32 {
        self.thread.0 / WARP_SIZE
    }

    /// Whether `later` is ordered after this.
    fn is_before(&self, later: &Self) -> bool {
        let same_warp = self.warp() == later.warp();
        self.thread == later.thread
            || self.clock.block != later.clock.block
            || same_warp && self.clock.warp != later.clock.warp
    }

    fn access(&self, kind: AccessKind) -> Access {
        Access { thread: self.thread, kind, location: self.location }
    }
}

/// The accesses of one kind since the last write; two of them are enough.
///
/// If all are of one warp, they are of its last two threads; if two warps accessed the word between two
/// block barriers, they are one of each. In both cases a write that races with any of the accesses races
/// with one of the two.
#[derive(Clone, Copy, Debug, Default)]
struct Pair {
    last: Option<Event>,
    other: Option<Event>,
}

impl Pair {
    fn add(&mut self, event: Event) {
        let current = |slot: Option<Event>| slot.filter(|e| e.clock.block == event.clock.block);
        match (current(self.last), current(self.other)) {
            (Some(last), _) if last.thread == event.thread => self.last = Some(event),
            (Some(last), Some(other))
                if last.warp() != other.warp() && other.thread != event.thread => {}
            (last, _) => *self = Self { last: Some(event), other: last },
        }
    }

    /// An access that races with `event`.
    fn racing(&self, event: &Event) -> Option<Event> {
        [self.last, self.other].into_iter().flatten().find(|earlier| !earlier.is_before(event))
    }
}

/// The accesses to a word that matter for later ones.
#[derive(Clone, Copy, Debug, Default)]
pub struct History {
    write: Option<Event>,
    reads: Pair,
    atomics: Pair,
}

impl History {
    /// Adds an access.
    ///
    /// # Errors
    /// It races: the earlier access of the two, and the later.
    pub fn add(&mut self, kind: AccessKind, event: Event) -> Result<(), (Access, Access)> {
        let write = self.write.filter(|write| !write.is_before(&event));
        let read = || self.reads.racing(&event);
        let atomic = || self.atomics.racing(&event);
        let racing = write.map(|write| write.access(AccessKind::Write)).or_else(|| match kind {
            AccessKind::Read => atomic().map(|event| event.access(AccessKind::Atomic)),
            AccessKind::Atomic => read().map(|event| event.access(AccessKind::Read)),
            AccessKind::Write => read()
                .map(|event| event.access(AccessKind::Read))
                .or_else(|| atomic().map(|event| event.access(AccessKind::Atomic))),
        });
        if let Some(first) = racing {
            return Err((first, event.access(kind)));
        }
        match kind {
            AccessKind::Read => self.reads.add(event),
            AccessKind::Atomic => self.atomics.add(event),
            AccessKind::Write => {
                // All earlier accesses are ordered before this one, and what races with them later
                // races with this one too.
                *self = Self { write: Some(event), ..Self::default() };
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::panic::Location;

    use super::*;
    use crate::emu::order::Order;

    /// The rule itself: every earlier access, each against the new one.
    fn races(past: &[(AccessKind, Event)], kind: AccessKind, event: &Event) -> bool {
        let conflict = |other| other != kind || kind == AccessKind::Write;
        past.iter().any(|(other, earlier)| conflict(*other) && !earlier.is_before(event))
    }

    #[test]
    fn finds_a_race_exactly_when_some_earlier_access_races() {
        const THREADS: [u32; 6] = [0, 1, 2, 32, 33, 64];
        let (mut races_seen, mut ends_seen) = (0, 0);
        for seed in 0..200_000 {
            let mut order = Order::new(seed, 0);
            let mut draw = |count| order.shuffled(count)[0];
            let (mut block, mut warps) = (1, [0; 3]);
            let (mut history, mut past) = (History::default(), Vec::new());
            let raced = (0..12).any(|_| {
                match draw(8) {
                    0 => block += 1,
                    1 | 2 => warps[usize::from(draw(3))] += 1,
                    choice => {
                        let kinds = [AccessKind::Write, AccessKind::Atomic];
                        let kind = *kinds.get(usize::from(choice) - 3).unwrap_or(&AccessKind::Read);
                        let thread = ThreadIndex(THREADS[usize::from(draw(6))]);
                        let warp = warps[(thread.0 / WARP_SIZE) as usize];
                        let clock = Clock { block, warp };
                        let event = Event { thread, location: Location::caller(), clock };
                        let expected = races(&past, kind, &event);
                        let found = history.add(kind, event).is_err();
                        assert_eq!(
                            found, expected,
                            "seed {seed}: {past:?}, then {kind:?} {event:?}"
                        );
                        past.push((kind, event));
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
