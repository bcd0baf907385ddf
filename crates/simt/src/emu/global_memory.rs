//! Races on global memory that a launch may write.
//!
//! As in [`super::clock`], two accesses are ordered if one thread makes both, or if synchronization leads from one to
//! the other. Between blocks, synchronization is a cluster barrier whose arrival releases, or atomics of device scope:
//! acquire-release ones, or relaxed ones with fences around them (PTX ISA, "Memory Consistency Model").
//!
//! A copy in flight reads its source at any time until its thread waits for it. Until then nothing orders that read
//! before a write, not even a write of the same thread.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::clock::Event;
use super::fault::{AccessKind, FaultKind, GlobalAccess, Site};
use super::past::{Observer, Past};

/// The bytes of an access, and how a fault names them.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// The address, aligned to `bytes`.
    pub address: u64,
    /// Bytes of the access, 1 to 16.
    pub bytes: u32,
    /// The kernel's argument.
    pub argument: &'static str,
    /// Bytes from the start of the allocation.
    pub offset: u64,
}

/// The effect of an atomic on its word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// It only reads: a load, or a compare-and-exchange that fails.
    Load,
    /// It writes without reading.
    Store,
    /// It reads and writes.
    Modify,
}

/// A recorded access to some of the bytes of a granule.
#[derive(Clone, Copy, Debug)]
struct Recorded {
    event: Event,
    block: u64,
    /// One bit for each byte of the granule.
    bytes: u16,
    kind: AccessKind,
    /// Whether it is the read of a copy that has started and was not waited for.
    is_copy: bool,
}

impl Recorded {
    /// An access that a thread makes now.
    fn new(thread: Observer<'_>, place: Place, kind: AccessKind, location: Site) -> Self {
        let Place { address, bytes, .. } = place;
        let bytes = (((1_u32 << bytes) - 1) << (address % 16)) as u16;
        let event = thread.event(location);
        Self { event, block: thread.block, bytes, kind, is_copy: false }
    }
}

/// The accesses to 16 aligned bytes with which later ones may race. Every access lies within one granule, and most
/// granules have one access.
#[derive(Debug, Default)]
struct Granule {
    first: Option<Recorded>,
    others: Vec<Recorded>,
}

/// Whether accesses of two kinds to the same bytes have to be ordered.
fn conflict(kinds: [AccessKind; 2]) -> bool {
    let is_read = |kind| matches!(kind, AccessKind::Read | AccessKind::ReadConstant);
    kinds.contains(&AccessKind::Write) || is_read(kinds[0]) != is_read(kinds[1])
}

/// Most unordered accesses of one kind to the same bytes that are kept. If there are more, for instance on a counter to
/// which all threads add, the oldest is dropped, so that a race with that one alone is missed.
const REMEMBERED: usize = 64;

impl Granule {
    /// Adds an access that a thread makes now.
    ///
    /// # Errors
    /// The earlier access with which it races.
    fn add(&mut self, new: Recorded, thread: Observer<'_>) -> Result<(), Recorded> {
        let racing = |old: &&Recorded| {
            let kinds = [old.kind, new.kind];
            old.bytes & new.bytes != 0
                && conflict(kinds)
                && (kinds.contains(&AccessKind::ReadConstant)
                    || old.is_copy
                    || !thread.knows(old.block, &old.event))
        };
        if let Some(old) = self.first.iter().chain(&self.others).find(racing) {
            return Err(*old);
        }
        // The new access replaces older ones if every later access that races with one of those
        // also races with the new one.
        let is_replaced = |old: &Recorded| {
            let is_covered = old.kind == new.kind
                || new.kind == AccessKind::Write && old.kind != AccessKind::ReadConstant;
            let has_all = old.bytes & !new.bytes == 0;
            is_covered && has_all && !old.is_copy && thread.knows(old.block, &old.event)
        };
        self.others.retain(|old| !is_replaced(old));
        if self.first.as_ref().is_none_or(is_replaced) {
            self.first = Some(new);
            return Ok(());
        }
        let is_alike = |old: &&Recorded| {
            (old.kind, old.bytes, old.is_copy) == (new.kind, new.bytes, new.is_copy)
        };
        if self.others.iter().filter(is_alike).count() >= REMEMBERED {
            let oldest = self.others.iter().position(|old| is_alike(&old));
            oldest.map(|oldest| self.others.remove(oldest));
        }
        self.others.push(new);
        Ok(())
    }

    /// Removes the oldest read that equals `read`, up to time and place.
    fn remove_copy(&mut self, read: &Recorded) {
        let thread = |of: &Recorded| (of.block, of.event.at.thread());
        let is_it =
            |old: &Recorded| old.is_copy && old.bytes == read.bytes && thread(old) == thread(read);
        if self.first.take_if(|first| is_it(first)).is_none()
            && let Some(at) = self.others.iter().position(is_it)
        {
            self.others.remove(at);
        }
    }
}

/// Hashes numbers by a multiplication: they are addresses, not chosen by an adversary.
#[derive(Default)]
struct Multiply(u64);

impl Hasher for Multiply {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(byte.into()));
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0 ^ number).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(32);
    }
}

type Map<V> = HashMap<u64, V, BuildHasherDefault<Multiply>>;

/// `PAGE_GRANULES` consecutive granules, which share an entry of the map because neighbours are accessed together.
type Page = [Granule; PAGE_GRANULES as usize];
const PAGE_GRANULES: u64 = 16;

/// The granules and atomic words of a part of the memory.
#[derive(Debug, Default)]
struct Shard {
    pages: Map<Box<Page>>,
    /// By address of an atomic word, the past that atomics have released to it.
    released: Map<Past>,
}

/// Number of shards, each of which has its own lock.
const SHARDS: usize = 64;
/// Consecutive bytes that belong to the same shard.
const SHARD_BYTES: u64 = 1024;

/// The accesses of a launch so far to the global memory that it may write.
#[derive(Debug)]
pub struct GlobalMemory {
    /// Blocks of a row of the grid.
    columns: u32,
    shards: [Mutex<Shard>; SHARDS],
}

impl GlobalMemory {
    /// No accesses yet, of a launch with `columns` blocks in a row of its grid.
    pub fn new(columns: u32) -> Self {
        Self { columns, shards: std::array::from_fn(|_| Mutex::default()) }
    }

    fn shard(&self, address: u64) -> MutexGuard<'_, Shard> {
        let shard = &self.shards[(address / SHARD_BYTES) as usize % SHARDS];
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a plain access of a thread.
    ///
    /// # Errors
    /// A `GlobalRace`, if it races with an earlier access.
    pub fn access(
        &self,
        thread: Observer<'_>,
        place: Place,
        kind: AccessKind,
        location: Site,
    ) -> Result<(), FaultKind> {
        self.add(thread, place, Recorded::new(thread, place, kind, location))
    }

    /// Records that a thread starts a copy from `place`, at `location`.
    ///
    /// # Errors
    /// As [`access`](Self::access).
    pub fn start_copy(
        &self,
        thread: Observer<'_>,
        place: Place,
        location: Site,
    ) -> Result<(), FaultKind> {
        let read = Recorded::new(thread, place, AccessKind::Read, location);
        self.add(thread, place, Recorded { is_copy: true, ..read })
    }

    /// Records that a thread has waited for its oldest copy from `place`, which it started at `location`: the copy may
    /// have read until now.
    ///
    /// # Errors
    /// As [`access`](Self::access).
    pub fn end_copy(
        &self,
        thread: Observer<'_>,
        place: Place,
        location: Site,
    ) -> Result<(), FaultKind> {
        let read = Recorded::new(thread, place, AccessKind::Read, location);
        let mut shard = self.shard(place.address);
        let granule = shard.granule(place.address);
        granule.remove_copy(&read);
        granule.add(read, thread).map_err(|old| self.fault(place, [old, read]))
    }

    /// Records and performs an atomic of a thread: `operate` performs it, and returns a result and the effect. If it
    /// writes, it releases `releases` to the word. Returns the result, and the past that was released to the word
    /// before, which is empty if the atomic does not read.
    ///
    /// # Errors
    /// A `GlobalRace`, if it races with a plain access.
    pub fn atomic<R>(
        &self,
        thread: Observer<'_>,
        (place, location): (Place, Site),
        releases: &Past,
        operate: impl FnOnce() -> (R, Effect),
    ) -> Result<(R, Past), FaultKind> {
        let new = Recorded::new(thread, place, AccessKind::Atomic, location);
        let mut shard = self.shard(place.address);
        let added = shard.granule(place.address).add(new, thread);
        added.map_err(|old| self.fault(place, [old, new]))?;
        let released = shard.released.entry(place.address).or_default();
        let (result, effect) = operate();
        let before = match effect {
            Effect::Store => {
                *released = Past::new();
                Past::new()
            }
            Effect::Load | Effect::Modify => released.clone(),
        };
        if effect != Effect::Load {
            released.join(releases);
        }
        Ok((result, before))
    }

    fn add(&self, thread: Observer<'_>, place: Place, new: Recorded) -> Result<(), FaultKind> {
        let added = self.shard(place.address).granule(place.address).add(new, thread);
        added.map_err(|old| self.fault(place, [old, new]))
    }

    /// The fault of two accesses that race.
    fn fault(&self, place: Place, races: [Recorded; 2]) -> FaultKind {
        let columns = u64::from(self.columns);
        let [first, second] = races.map(|Recorded { event, block, kind, .. }| {
            let block = ((block % columns) as u32, (block / columns) as u32);
            GlobalAccess { block, access: event.access(kind) }
        });
        let Place { argument, offset, .. } = place;
        FaultKind::GlobalRace { argument, offset, first, second }
    }
}

impl Shard {
    /// The granule that contains `address`.
    fn granule(&mut self, address: u64) -> &mut Granule {
        let granule = address / 16;
        let page = self.pages.entry(granule / PAGE_GRANULES).or_default();
        &mut page[(granule % PAGE_GRANULES) as usize]
    }
}
