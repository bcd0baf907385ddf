//! The registry of device allocations. The host owns the memory; this is for checks only.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock, RwLockWriteGuard};

/// The live allocations of one emulated device. A clone is the same registry.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    live: Arc<RwLock<Live>>,
    /// Whether launches may race on this memory without a fault.
    allows_races: bool,
}

/// The live allocations and their parts, by address. No two allocations overlap, and no two parts.
#[derive(Debug, Default)]
struct Live {
    allocations: BTreeMap<u64, Extent>,
    /// Parts of allocations. A pointer into a part is bound to the part alone.
    parts: BTreeMap<u64, Extent>,
}

/// One live allocation, or a part of one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    pub address: u64,
    pub bytes: u64,
    pub label: &'static str,
}

/// The extent that contains `address`.
fn find(extents: &BTreeMap<u64, Extent>, address: u64) -> Option<Extent> {
    let (_, extent) = extents.range(..=address).next_back()?;
    (address - extent.address < extent.bytes).then_some(*extent)
}

/// Adds an extent. Panics if it is empty or overlaps another.
fn insert(extents: &mut BTreeMap<u64, Extent>, new: Extent) {
    let Extent { address, bytes, label } = new;
    assert!(bytes > 0, "allocation `{label}` has no bytes");
    let end = address.checked_add(bytes).expect("an allocation ends inside the address space");
    // The extents are disjoint, so only the last one that starts below `end` can overlap.
    if let Some((_, other)) = extents.range(..end).next_back() {
        let before = other.address + other.bytes <= address;
        assert!(before, "allocation `{label}` overlaps `{}`", other.label);
    }
    extents.insert(address, new);
}

impl Memory {
    /// A device with no allocations.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The same device, on which launches may race on global memory without a fault: for tests whose memory contents
    /// break a kernel's contract on purpose.
    #[must_use]
    pub fn allowing_races(self) -> Self {
        Self { allows_races: true, ..self }
    }

    /// Whether races are no faults.
    pub(super) fn allows_races(&self) -> bool {
        self.allows_races
    }

    /// Registers `bytes` bytes at `address` as an allocation, until the result is dropped.
    /// `label` names it in faults.
    ///
    /// # Safety
    /// Until the result is dropped, and every launch that began before has returned, the bytes are valid for reads and
    /// writes. While a launch over this registry runs, only launches access them. Both are *unchecked*.
    ///
    /// # Panics
    /// If `bytes` is 0, or if a live allocation overlaps: these are errors of the caller's allocator.
    pub unsafe fn register(&self, address: u64, bytes: u64, label: &'static str) -> Allocation {
        let extent = Extent { address, bytes, label };
        insert(&mut self.change().allocations, extent);
        Allocation { memory: self.clone(), extent }
    }

    /// The part that contains `address`, or else the live allocation that contains it.
    pub(super) fn find(&self, address: u64) -> Option<Extent> {
        let live = self.live.read().unwrap_or_else(PoisonError::into_inner);
        find(&live.parts, address).or_else(|| find(&live.allocations, address))
    }

    fn change(&self) -> RwLockWriteGuard<'_, Live> {
        self.live.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A registered allocation; dropping it removes it from its [`Memory`].
#[derive(Debug)]
#[must_use = "an allocation is known only as long as this lives"]
pub struct Allocation {
    memory: Memory,
    extent: Extent,
}

impl Allocation {
    /// Makes ranges of its bytes parts, in addition to the parts that it has. A pointer into a part may access that
    /// part alone; a pointer outside all parts may access the whole allocation.
    ///
    /// # Panics
    /// If a range is empty, lies outside the allocation, or overlaps another part.
    pub fn divide(&self, parts: impl IntoIterator<Item = Range<u64>>) {
        let Extent { address, bytes, label } = self.extent;
        let mut live = self.memory.change();
        for part in parts {
            assert!(part.end <= bytes, "a part of allocation `{label}` ends behind it");
            let bytes = part.end.saturating_sub(part.start);
            insert(&mut live.parts, Extent { address: address + part.start, bytes, label });
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let Extent { address, bytes, .. } = self.extent;
        let mut live = self.memory.change();
        live.allocations.remove(&address);
        while let Some((&part, _)) = live.parts.range(address..address + bytes).next() {
            live.parts.remove(&part);
        }
    }
}
