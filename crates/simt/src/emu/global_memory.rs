//! Races on global memory that a launch may write.
//!
//! As in [`super::race`], two accesses are ordered when one thread makes both, or when synchronization leads from one to
//! the other. Between blocks that are barriers of the cluster whose arrival releases, and atomics of device scope: those that
//! order, and relaxed ones between fences (PTX ISA, "Memory Consistency Model").

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Mutex, PoisonError};

use super::block::Block;
use super::fault::{AccessKind, FaultKind, GlobalAccess, Site};
use super::past::Past;
use super::race::Event;

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

/// How an atomic orders other accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ordered {
    /// By fences around it, if there are any.
    Relaxed,
    /// Accesses before it are ordered before those behind one that sees it.
    AcquireRelease,
}

/// What an atomic does to its word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    Load,
    Store,
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

/// Accesses that matter for later ones, of 16 bytes. Most have one.
#[derive(Debug, Default)]
struct Quad {
    first: Option<Recorded>,
    others: Vec<Recorded>,
}

/// Atomics of one kind of word that are remembered: of more, which are counts that nobody reads plainly, the oldest are forgotten.
const ATOMICS: usize = 64;

impl Quad {
    /// Adds an access that is made now, by the running thread of `block`.
    ///
    /// # Errors
    /// It races with the one that is returned.
    fn add(&mut self, new: Recorded, block: &Block) -> Result<(), Recorded> {
        let meets = |old: &Recorded| {
            let both = old.kind == new.kind && old.kind != AccessKind::Write;
            old.bytes & new.bytes != 0 && !both
        };
        let racing = |old: &&Recorded| meets(old) && !block.knows(old.block, &old.event);
        if let Some(old) = self.first.iter().chain(&self.others).find(racing) {
            return Err(*old);
        }
        // What an older access races with later, the new one does too.
        let is_replaced = |old: &Recorded| {
            let is_covered = new.kind == AccessKind::Write || old.kind == new.kind;
            let has_all = old.bytes & !new.bytes == 0;
            is_covered && has_all && block.knows(old.block, &old.event)
        };
        self.others.retain(|old| !is_replaced(old));
        if self.first.as_ref().is_none_or(is_replaced) {
            self.first = Some(new);
            return Ok(());
        }
        if self.others.len() >= ATOMICS && new.kind == AccessKind::Atomic {
            let oldest = self.others.iter().position(|old| old.kind == AccessKind::Atomic);
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

/// A part of the memory, by address.
#[derive(Debug, Default)]
struct Shard {
    quads: Map<Quad>,
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
    shards: [Mutex<Shard>; SHARDS],
}

impl GlobalMemory {
    /// Nothing.
    pub fn new() -> Self {
        Self { shards: std::array::from_fn(|_| Mutex::default()) }
    }

    fn with_shard<R>(&self, address: u64, use_shard: impl FnOnce(&mut Shard) -> R) -> R {
        let shard = &self.shards[(address / SHARD_BYTES) as usize % SHARDS];
        use_shard(&mut shard.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A plain access by the running thread of `block`.
    ///
    /// # Errors
    /// It races.
    pub fn access(
        &self,
        block: &Block,
        place: Place,
        kind: AccessKind,
        location: Site,
    ) -> Result<(), FaultKind> {
        self.with_shard(place.address, |shard| shard.add(block, place, kind, location))
    }

    /// An atomic by the running thread of `block`; what `operate` returns.
    ///
    /// # Errors
    /// It races with a plain access.
    pub fn atomic<R>(
        &self,
        block: &Block,
        (place, location): (Place, Site),
        (effect, ordered): (Effect, Ordered),
        operate: impl FnOnce() -> R,
    ) -> Result<R, FaultKind> {
        let (result, seen) = self.with_shard(place.address, |shard| {
            shard.add(block, place, AccessKind::Atomic, location)?;
            let released = shard.released.entry(place.address).or_default();
            let seen = if effect == Effect::Store { Past::new() } else { released.clone() };
            if effect == Effect::Store {
                *released = Past::new();
            }
            if effect != Effect::Load {
                released.join(&block.released(ordered));
            }
            Ok((operate(), seen))
        })?;
        block.acquire(ordered, &seen, location);
        Ok(result)
    }
}

impl Shard {
    fn add(
        &mut self,
        block: &Block,
        place: Place,
        kind: AccessKind,
        location: Site,
    ) -> Result<(), FaultKind> {
        let Place { address, bytes, argument, offset } = place;
        let mask = (((1_u32 << bytes) - 1) << (address % 16)) as u16;
        let new =
            Recorded { event: block.event(location), block: block.number.get(), bytes: mask, kind };
        let of = |recorded: Recorded| GlobalAccess {
            block: block.index_of(recorded.block),
            access: recorded.event.access(recorded.kind),
        };
        let quad = self.quads.entry(address / 16).or_default();
        quad.add(new, block).map_err(|old| FaultKind::GlobalRace {
            argument,
            offset,
            first: of(old),
            second: of(new),
        })
    }
}
