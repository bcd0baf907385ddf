//! Events: the blocks that entered and left the tree since the last drain, for routers and other indexes of cached
//! blocks.
//!
//! Each registered block has its own [`Serial`]. A log of bounded size records in order which blocks were
//! [stored](Event::Stored) and [removed](Event::Removed); it is off unless [`crate::PrefixTree::log_events`] was
//! called. Events are written into memory that was allocated before, so that logging makes no call of the tree allocate
//! or fail. A log that overflows is discarded: drains return [`Drained::Overflowed`] until a snapshot is taken, after
//! which logging continues.
//!
//! ```
//! use dsv4_kv_prefix::{Drained, Event, EventBatch, EventSource, Limits, PrefixTree, RootKey, ScoredLru};
//!
//! let limits = Limits { block_bytes: 10, checkpoint_bytes: 80, lease_bytes: 0, remembered: 0, reserved_blocks: 16 };
//! let mut tree = PrefixTree::<u32, (), _, 4>::new(limits, ScoredLru { capacity: 1000 });
//! tree.log_events(16);
//! let mut batch = EventBatch::with_capacity(tree.event_capacity());
//!
//! let root = RootKey::new(b"tenant", b"", b"model");
//! let mut at = tree.match_and_lock(&root, &[]).reference;
//! tree.extend(&mut at, &[[1, 2, 3, 4], [5, 6, 7, 8]], |i| i as u32, |_| ())?;
//! assert_eq!(tree.drain_events(&mut batch), Drained::Events);
//! let stored: Vec<_> = batch.iter().collect();
//! let [Event::Stored(run)] = stored[..] else { panic!("one run of blocks") };
//! assert_eq!((run.parent, run.tokens), (None, &[[1, 2, 3, 4], [5, 6, 7, 8]][..]));
//! assert_eq!(run.root.salt(), b"tenant");
//!
//! // Nothing goes on from these blocks, so that they go with the reference, the last one first.
//! let serials = [run.serials[1], run.serials[0]];
//! tree.release(at, |_| ())?;
//! assert_eq!(tree.drain_events(&mut batch), Drained::Events);
//! assert_eq!(batch.iter().collect::<Vec<_>>(), [Event::Removed(&serials)]);
//! # Ok::<(), dsv4_kv_prefix::Foreign>(())
//! ```

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::cell::{CellKey, Cells};
use crate::mistake::{Mistake, made};
use crate::root::RootKey;
pub use crate::serial::Serial;

/// An event of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'b, const T: usize> {
    /// Blocks entered the tree.
    Stored(Stored<'b, T>),
    /// Blocks left the tree. Blocks below a block are removed before it.
    Removed(&'b [Serial]),
}

/// Consecutive blocks that were registered together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored<'b, const T: usize> {
    /// Key of their root.
    pub root: &'b RootKey,
    /// The block above the first of them, which was stored before; `None` at the root.
    pub parent: Option<Serial>,
    /// Serial of each block.
    pub serials: &'b [Serial],
    /// Token ids of each block.
    pub tokens: &'b [[u32; T]],
}

/// As [`Stored`], but the blocks are still in the tree.
pub(crate) struct Run<'t, B, const T: usize> {
    pub root: &'t RootKey,
    pub parent: Option<Serial>,
    pub cells: &'t Cells<B, T>,
    /// The blocks are those from here down to the end of the segment.
    pub first: CellKey,
    pub blocks: u32,
}

/// Result of a drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "after an overflow the events that follow mean nothing without a snapshot"]
pub enum Drained {
    /// All events since the last drain or snapshot; there may be none.
    Events,
    /// There were more events than the log has room for, and nothing was drained. Every drain
    /// returns this until [`EventSource::snapshot_events`] is called.
    Overflowed,
    /// Events are not logged.
    Off,
}

/// Identifies one reading of a log, a drain with events or a snapshot; unique in the process. A batch has the id of its
/// own reading and that of the reading before it, so that a reader can see whether another reader came in between.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading(u64);

impl Reading {
    pub(crate) fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Relaxed))
    }
}

/// A source of events: a [`crate::PrefixTree`], or a type that has one.
pub trait EventSource<const T: usize> {
    /// Most blocks, stored or removed, that can be logged between two drains; 0 if events are not logged.
    fn event_capacity(&self) -> u32;

    /// Moves the logged events into `batch`, whose previous contents are lost. No event is copied: the log takes the
    /// memory of the batch if that has the capacity [`Self::event_capacity`], and else allocates new memory. The batch
    /// is empty after any result except [`Drained::Events`].
    fn drain_events(&mut self, batch: &mut EventBatch<T>) -> Drained;

    /// All blocks of the tree, as if they had just been stored, parents before children. Clears the log: the next drain
    /// has the events after this call. Allocates, and copies the tokens of all blocks.
    fn snapshot_events(&mut self) -> EventBatch<T>;
}

/// One entry of a batch, without its lists.
#[derive(Debug)]
enum Record {
    Stored { root: RootKey, parent: Option<Serial>, blocks: u32 },
    Removed { blocks: u32 },
}

/// Events in order, in memory that is allocated once.
#[derive(Debug, Default)]
pub struct EventBatch<const T: usize> {
    records: Vec<Record>,
    /// Serials of all records, one after the other.
    serials: Vec<Serial>,
    /// Tokens of all stored blocks.
    tokens: Vec<[u32; T]>,
    capacity: u32,
    reading: Reading,
    after: Reading,
}

impl<const T: usize> EventBatch<T> {
    /// A batch with room for events of `blocks` blocks, stored or removed: 4 `T` + 48 bytes each.
    #[must_use]
    pub fn with_capacity(blocks: u32) -> Self {
        let most = blocks as usize;
        Self {
            records: Vec::with_capacity(most),
            serials: Vec::with_capacity(most),
            tokens: Vec::with_capacity(most),
            capacity: blocks,
            reading: Reading::default(),
            after: Reading::default(),
        }
    }

    /// The reading of the log that filled this batch.
    #[must_use]
    pub const fn reading(&self) -> Reading {
        self.reading
    }

    /// The reading before it, by any reader; the events of a drain follow that reading. If it is not the reader's own
    /// last batch, events are missing, and the reader needs a snapshot.
    #[must_use]
    pub const fn after(&self) -> Reading {
        self.after
    }

    /// Marks the batch as the result of the reading that follows `after`; returns the new reading.
    pub(crate) fn read(&mut self, after: Reading) -> Reading {
        (self.after, self.reading) = (after, Reading::next());
        self.reading
    }

    /// Number of blocks that it has room for.
    #[must_use]
    pub const fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Number of blocks in its events, stored and removed.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.serials.len() as u32
    }

    /// Whether it has no events.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Its events, in the order in which they happened.
    pub fn iter(&self) -> impl Iterator<Item = Event<'_, T>> {
        let (mut serials, mut tokens) = (&self.serials[..], &self.tokens[..]);
        self.records.iter().map(move |record| match record {
            Record::Stored { root, parent, blocks } => {
                let stored = Stored {
                    root,
                    parent: *parent,
                    serials: split(&mut serials, *blocks),
                    tokens: split(&mut tokens, *blocks),
                };
                Event::Stored(stored)
            }
            Record::Removed { blocks } => Event::Removed(split(&mut serials, *blocks)),
        })
    }

    /// Removes its events, and keeps its memory.
    pub fn clear(&mut self) {
        self.records.clear();
        self.serials.clear();
        self.tokens.clear();
    }

    fn has_room(&self, blocks: usize) -> bool {
        self.serials.len() + blocks <= self.capacity as usize
    }

    /// Adds blocks that were stored. The batch must have room.
    pub(crate) fn stored<B>(&mut self, stored: &Run<'_, B, T>) {
        let &Run { root, parent, cells, first, blocks } = stored;
        let keys = || cells.downward(Some(first));
        self.serials.extend(keys().map(|key| cells[key].serial));
        self.tokens.extend(keys().map(|key| cells.tokens(key)));
        self.records.push(Record::Stored { root: root.clone(), parent, blocks });
    }
}

/// Removes and returns the first `count` elements.
fn split<'s, U>(slice: &mut &'s [U], count: u32) -> &'s [U] {
    let (first, rest) = slice.split_at(count as usize);
    *slice = rest;
    first
}

/// The log of a tree.
#[derive(Debug)]
pub(crate) struct EventLog<const T: usize> {
    batch: EventBatch<T>,
    /// Whether the log has overflowed since the last snapshot.
    overflowed: bool,
    /// The last reading.
    reading: Reading,
    /// Most blocks between two drains.
    pub capacity: u32,
}

impl<const T: usize> EventLog<T> {
    /// An empty log.
    pub fn new(capacity: u32) -> Self {
        let batch = EventBatch::with_capacity(capacity);
        Self { batch, overflowed: false, reading: Reading::next(), capacity }
    }

    /// Logs stored blocks.
    pub fn stored<B>(&mut self, stored: &Run<'_, B, T>) {
        let times = 1 + usize::from(made(Mistake::EventTwice));
        if self.make_room(stored.blocks as usize * times) {
            (0..times).for_each(|_| self.batch.stored(stored));
        }
    }

    /// Logs `blocks` removed blocks, in this order.
    pub fn removed(&mut self, serials: impl Iterator<Item = Serial>, blocks: u32) {
        if blocks == 0 || made(Mistake::RemovalNotTold) || !self.make_room(blocks as usize) {
            return;
        }
        self.batch.serials.extend(serials);
        self.batch.records.push(Record::Removed { blocks });
    }

    /// Clears the log, after a snapshot that has all blocks.
    pub fn restart(&mut self, snapshot: &mut EventBatch<T>) {
        self.overflowed = false;
        self.reading = snapshot.read(self.reading);
        if !made(Mistake::SnapshotKeepsLog) {
            self.batch.clear();
        }
    }

    /// Whether there is room for `blocks` blocks. If not, discards the log.
    fn make_room(&mut self, blocks: usize) -> bool {
        if !self.overflowed && !self.batch.has_room(blocks) {
            self.batch.clear();
            self.overflowed = !made(Mistake::OverflowNotTold);
        }
        !self.overflowed && self.batch.has_room(blocks)
    }

    /// See [`EventSource::drain_events`].
    pub fn drain(&mut self, batch: &mut EventBatch<T>) -> Drained {
        batch.clear();
        if self.overflowed {
            return Drained::Overflowed;
        }
        std::mem::swap(&mut self.batch, batch);
        if self.batch.capacity != self.capacity {
            self.batch = EventBatch::with_capacity(self.capacity);
        }
        self.reading = batch.read(self.reading);
        Drained::Events
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Limits, PrefixTree, Reference, ScoredLru};

    type Tree = PrefixTree<(), (), ScoredLru, 1>;

    fn tree() -> Tree {
        let limits = Limits {
            block_bytes: 1,
            checkpoint_bytes: 1,
            lease_bytes: 0,
            remembered: 0,
            reserved_blocks: 64,
        };
        let mut tree = Tree::new(limits, ScoredLru { capacity: 100 });
        tree.log_events(16);
        tree
    }

    fn compute(tree: &mut Tree, tokens: &[[u32; 1]]) -> Reference {
        let mut at = tree.match_and_lock(&RootKey::new(b"", b"", b""), &[]).reference;
        tree.extend(&mut at, tokens, |_| (), drop).unwrap();
        at
    }

    /// A batch of another capacity, as a snapshot is, does not become the log.
    #[test]
    fn the_log_keeps_its_capacity() {
        for capacity in [0, 1, 1000] {
            let mut tree = tree();
            let mut batch = EventBatch::with_capacity(capacity);
            assert_eq!(tree.drain_events(&mut batch), Drained::Events);
            let at = compute(&mut tree, &[[7]; 16]);
            assert_eq!((tree.drain_events(&mut batch), batch.blocks()), (Drained::Events, 16));
            let mut snapshot = tree.snapshot_events();
            assert_eq!(tree.drain_events(&mut snapshot), Drained::Events);
            // 16 blocks are removed, and one is stored.
            tree.release(at, drop).unwrap();
            let at = compute(&mut tree, &[[8]]);
            assert_eq!(tree.drain_events(&mut batch), Drained::Overflowed);
            tree.release(at, drop).unwrap();
        }
    }

    /// A reader of a log detects another reader, by a drain, a snapshot or a restarted log.
    #[test]
    fn a_second_reader_is_seen() {
        let mut tree = tree();
        let (mut mine, mut other) = (EventBatch::with_capacity(16), EventBatch::with_capacity(16));
        let mut last = tree.snapshot_events().reading();
        for turn in 0..5 {
            let _held = compute(&mut tree, &[[turn]]);
            match turn {
                1 => assert_eq!(tree.drain_events(&mut other), Drained::Events),
                2 => drop(tree.snapshot_events()),
                3 => tree.log_events(16),
                _ => {}
            }
            assert_eq!(tree.drain_events(&mut mine), Drained::Events);
            assert_eq!(mine.after() == last, [0, 4].contains(&turn), "{turn}");
            last = mine.reading();
        }
    }
}
