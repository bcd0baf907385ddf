//! Events: which blocks the tree has got and lost since somebody last asked, for routers and other indexes of what is
//! cached.
//!
//! Each block that is registered has a [`Serial`] of its own. A log of bounded size says in order what was
//! [stored](Event::Stored) and [removed](Event::Removed); it is off unless [`crate::PrefixTree::log_events`] was called. What
//! is logged is written into memory that was allocated before, so that nothing that the tree does allocates for it, or
//! fails by it. A log that is full is given up whole: [`Drained::Overflowed`], until a snapshot was taken, from which
//! the log goes on.
//!
//! ```
//! use dsv4_kv_prefix::{Drained, Event, EventBatch, EventSource, Limits, PrefixTree, RootKey, ScoredLru};
//!
//! let limits = Limits { block_bytes: 10, checkpoint_bytes: 80, lease_bytes: 0, remembered: 0, room: 16 };
//! let mut tree = PrefixTree::<u32, (), _, 4>::new(limits, ScoredLru { capacity: 1000 });
//! tree.log_events(16);
//! let mut batch = EventBatch::with_capacity(tree.event_capacity());
//!
//! let root = RootKey::new(b"tenant", b"", b"model");
//! let mut at = tree.adopt(&root, &[]).reference;
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

/// What happened to blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'b, const T: usize> {
    /// The tree has them from now on.
    Stored(Stored<'b, T>),
    /// The tree has them no longer. Blocks below a block went before it.
    Removed(&'b [Serial]),
}

/// Blocks that follow each other, and that were registered together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored<'b, const T: usize> {
    /// Whose they are.
    pub root: &'b RootKey,
    /// The block above the first of them, which was stored before; `None` at the root.
    pub parent: Option<Serial>,
    /// Of each block.
    pub serials: &'b [Serial],
    /// Token ids of each block.
    pub tokens: &'b [[u32; T]],
}

/// As [`Stored`], where blocks lie in a tree.
pub(crate) struct Run<'t, B, const T: usize> {
    pub root: &'t RootKey,
    pub parent: Option<Serial>,
    pub cells: &'t Cells<B, T>,
    /// The blocks are those from here down to the end of the segment.
    pub first: CellKey,
    pub blocks: u32,
}

/// What a drain found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "after an overflow the events that follow mean nothing without a snapshot"]
pub enum Drained {
    /// All that happened since the last drain, or since the last snapshot. It may be nothing.
    Events,
    /// More happened than the log has room for: nothing was drained. The next thing to ask for is
    /// [`EventSource::snapshot_events`]; until then every drain says this.
    Overflowed,
    /// Events are not logged.
    Off,
}

/// A drain that found events, or a snapshot: a number that is unique in the process. A batch has that of the reading that
/// it is, and of the one before it, so that who reads a log sees whether somebody else did in between.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading(u64);

impl Reading {
    pub(crate) fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Relaxed))
    }
}

/// Somebody whose events can be asked for: a [`crate::PrefixTree`], or what has one.
pub trait EventSource<const T: usize> {
    /// Blocks, stored or removed, that are logged between two drains; 0 if events are not logged.
    fn event_capacity(&self) -> u32;

    /// Moves what is logged into `batch`, whose contents are lost. Nothing is copied: the memory of a batch with
    /// [`Self::event_capacity`] becomes the log's. Of a batch with another capacity it does not: the log gets new memory.
    /// The batch is empty after anything but [`Drained::Events`].
    fn drain_events(&mut self, batch: &mut EventBatch<T>) -> Drained;

    /// All blocks that are there, as if they had just been stored, parents before children. What is logged is given up: the
    /// next drain has what happens after this. Allocates, and takes as long as all tokens take to be copied.
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
    /// Of all records, one after the other.
    serials: Vec<Serial>,
    /// Of all blocks that were stored.
    tokens: Vec<[u32; T]>,
    capacity: u32,
    reading: Reading,
    after: Reading,
}

impl<const T: usize> EventBatch<T> {
    /// Room for events of so many blocks, stored or removed: 4 `T` + 48 bytes each.
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

    /// Which reading of the log it is.
    #[must_use]
    pub const fn reading(&self) -> Reading {
        self.reading
    }

    /// The reading before it, of anybody: what a drain found goes on from there. If that is not the last batch that its
    /// reader has, events are missing, and only a snapshot has what is there.
    #[must_use]
    pub const fn after(&self) -> Reading {
        self.after
    }

    /// It is what a log had after a reading; the reading that it is.
    pub(crate) fn read(&mut self, after: Reading) -> Reading {
        (self.after, self.reading) = (after, Reading::next());
        self.reading
    }

    /// Blocks that there is room for.
    #[must_use]
    pub const fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Blocks that its events name: stored and removed.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.serials.len() as u32
    }

    /// Whether nothing happened.
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

    /// Forgets its events, and keeps its memory.
    pub fn clear(&mut self) {
        self.records.clear();
        self.serials.clear();
        self.tokens.clear();
    }

    fn has_room(&self, blocks: usize) -> bool {
        self.serials.len() + blocks <= self.capacity as usize
    }

    /// Adds blocks that were stored. There is room.
    pub(crate) fn stored<B>(&mut self, stored: &Run<'_, B, T>) {
        let &Run { root, parent, cells, first, blocks } = stored;
        let keys = || cells.downward(Some(first));
        self.serials.extend(keys().map(|key| cells[key].serial));
        self.tokens.extend(keys().map(|key| cells.tokens(key)));
        self.records.push(Record::Stored { root: root.clone(), parent, blocks });
    }
}

/// Takes the first `count` elements off.
fn split<'s, U>(slice: &mut &'s [U], count: u32) -> &'s [U] {
    let (first, rest) = slice.split_at(count as usize);
    *slice = rest;
    first
}

/// The log of a tree.
#[derive(Debug)]
pub(crate) struct EventLog<const T: usize> {
    batch: EventBatch<T>,
    /// Whether more happened than there was room for, since the last snapshot.
    overflowed: bool,
    /// The last one.
    reading: Reading,
    /// What it was made with.
    pub capacity: u32,
}

impl<const T: usize> EventLog<T> {
    /// An empty one.
    pub fn new(capacity: u32) -> Self {
        let batch = EventBatch::with_capacity(capacity);
        Self { batch, overflowed: false, reading: Reading::next(), capacity }
    }

    /// Blocks were stored.
    pub fn stored<B>(&mut self, stored: &Run<'_, B, T>) {
        let times = 1 + usize::from(made(Mistake::EventTwice));
        if self.make_room(stored.blocks as usize * times) {
            (0..times).for_each(|_| self.batch.stored(stored));
        }
    }

    /// So many blocks go, in this order.
    pub fn removed(&mut self, serials: impl Iterator<Item = Serial>, blocks: u32) {
        if blocks == 0 || made(Mistake::RemovalNotTold) || !self.make_room(blocks as usize) {
            return;
        }
        self.batch.serials.extend(serials);
        self.batch.records.push(Record::Removed { blocks });
    }

    /// A snapshot is taken: it has what is logged.
    pub fn restart(&mut self, snapshot: &mut EventBatch<T>) {
        self.overflowed = false;
        self.reading = snapshot.read(self.reading);
        if !made(Mistake::SnapshotKeepsLog) {
            self.batch.clear();
        }
    }

    /// Makes room for so many blocks. Without room the log is given up.
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
        let limits =
            Limits { block_bytes: 1, checkpoint_bytes: 1, lease_bytes: 0, remembered: 0, room: 64 };
        let mut tree = Tree::new(limits, ScoredLru { capacity: 100 });
        tree.log_events(16);
        tree
    }

    fn compute(tree: &mut Tree, tokens: &[[u32; 1]]) -> Reference {
        let mut at = tree.adopt(&RootKey::new(b"", b"", b""), &[]).reference;
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
            // 16 blocks go, and another comes.
            tree.release(at, drop).unwrap();
            let at = compute(&mut tree, &[[8]]);
            assert_eq!(tree.drain_events(&mut batch), Drained::Overflowed);
            tree.release(at, drop).unwrap();
        }
    }

    /// Who reads a log sees that somebody else has, whether by a drain, a snapshot, or a log that begins anew.
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
