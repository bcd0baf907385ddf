//! Races on global memory that a launch may write.
//!
//! As in [`super::race`], two accesses are ordered when one thread makes both, or when synchronization leads from one to
//! the other. Between blocks that are barriers of the cluster whose arrival releases, and atomics of device scope: those that
//! order, and relaxed ones between fences (PTX ISA, "Memory Consistency Model").

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::clock::Event;
use super::fault::{AccessKind, FaultKind, GlobalAccess, Site};
use super::past::{Observer, Past};

/// Where an access lies, as the kernel names it.
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

/// What an atomic does to its word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// It reads, or compares and finds another value.
    Load,
    /// It writes whatever was there.
    Store,
    /// It reads and writes.
    Modify,
}

/// An access to some of sixteen bytes.
#[derive(Clone, Copy, Debug)]
struct Recorded {
    event: Event,
    block: u64,
    /// A bit for each of the bytes.
    bytes: u16,
    kind: AccessKind,
}

/// Accesses that matter for later ones, of 16 aligned bytes, in which every access lies. Most have one.
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

/// Accesses of a kind to the same bytes that are remembered, of those that nothing orders: of more, such as counts that all threads
/// add to, the oldest are forgotten.
const REMEMBERED: usize = 64;

impl Granule {
    /// Adds an access that a thread makes now.
    ///
    /// # Errors
    /// It races with the one that is returned.
    fn add(&mut self, new: Recorded, thread: Observer<'_>) -> Result<(), Recorded> {
        let racing = |old: &&Recorded| {
            let kinds = [old.kind, new.kind];
            old.bytes & new.bytes != 0
                && conflict(kinds)
                && (kinds.contains(&AccessKind::ReadConstant)
                    || !thread.knows(old.block, &old.event))
        };
        if let Some(old) = self.first.iter().chain(&self.others).find(racing) {
            return Err(*old);
        }
        // What an older access races with later, the new one does too.
        let is_replaced = |old: &Recorded| {
            let is_covered = old.kind == new.kind
                || new.kind == AccessKind::Write && old.kind != AccessKind::ReadConstant;
            let has_all = old.bytes & !new.bytes == 0;
            is_covered && has_all && thread.knows(old.block, &old.event)
        };
        self.others.retain(|old| !is_replaced(old));
        if self.first.as_ref().is_none_or(is_replaced) {
            self.first = Some(new);
            return Ok(());
        }
        let is_alike = |old: &&Recorded| old.kind == new.kind && old.bytes == new.bytes;
        if self.others.iter().filter(is_alike).count() >= REMEMBERED {
            let oldest = self.others.iter().position(|old| is_alike(&old));
            oldest.map(|oldest| self.others.remove(oldest));
        }
        self.others.push(new);
        Ok(())
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

/// Accesses that matter for later ones, of so many granules in a row: neighbours are accessed together.
type Page = [Granule; PAGE_GRANULES as usize];
const PAGE_GRANULES: u64 = 16;

/// A part of the memory, by address.
#[derive(Debug, Default)]
struct Shard {
    pages: Map<Box<Page>>,
    /// What is ordered before whoever reads an atomic word, by address.
    released: Map<Past>,
}

/// Parts that OS threads lock one at a time.
const SHARDS: usize = 64;
/// Bytes that lie in one part.
const SHARD_BYTES: u64 = 1024;

/// What a launch has done so far to the global memory that it may write.
#[derive(Debug)]
pub struct GlobalMemory {
    /// Blocks of a row of the grid.
    columns: u32,
    shards: [Mutex<Shard>; SHARDS],
}

impl GlobalMemory {
    /// Nothing, by a launch with so many blocks in a row of its grid.
    pub fn new(columns: u32) -> Self {
        Self { columns, shards: std::array::from_fn(|_| Mutex::default()) }
    }

    fn shard(&self, address: u64) -> MutexGuard<'_, Shard> {
        let shard = &self.shards[(address / SHARD_BYTES) as usize % SHARDS];
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A plain access by a thread.
    ///
    /// # Errors
    /// It races.
    pub fn access(
        &self,
        thread: Observer<'_>,
        place: Place,
        kind: AccessKind,
        location: Site,
    ) -> Result<(), FaultKind> {
        let mut shard = self.shard(place.address);
        shard.add(thread, place, kind, location).map_err(|races| self.fault(place, races))
    }

    /// An atomic by a thread, which makes `releases` known if it writes; what `operate` returns, with what it did, and what was
    /// released there before.
    ///
    /// # Errors
    /// It races with a plain access.
    pub fn atomic<R>(
        &self,
        thread: Observer<'_>,
        (place, location): (Place, Site),
        releases: &Past,
        operate: impl FnOnce() -> (R, Effect),
    ) -> Result<(R, Past), FaultKind> {
        let mut shard = self.shard(place.address);
        let added = shard.add(thread, place, AccessKind::Atomic, location);
        added.map_err(|races| self.fault(place, races))?;
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
    /// Adds an access that a thread makes now.
    ///
    /// # Errors
    /// It races: the earlier access and this one.
    fn add(
        &mut self,
        thread: Observer<'_>,
        place: Place,
        kind: AccessKind,
        location: Site,
    ) -> Result<(), [Recorded; 2]> {
        let Place { address, bytes, .. } = place;
        let bytes = (((1_u32 << bytes) - 1) << (address % 16)) as u16;
        let new = Recorded { event: thread.event(location), block: thread.block, bytes, kind };
        let granule = address / 16;
        let page = self.pages.entry(granule / PAGE_GRANULES).or_default();
        let granule = &mut page[(granule % PAGE_GRANULES) as usize];
        granule.add(new, thread).map_err(|old| [old, new])
    }
}
