//! The registry of device allocations. The host owns the memory; this is for checks only.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

/// The live allocations of one emulated device. A clone is the same registry.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    live: Arc<RwLock<BTreeMap<u64, Extent>>>,
}

/// One live allocation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    pub address: u64,
    pub bytes: u64,
    pub label: &'static str,
}

impl Memory {
    /// A device with no allocations.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Registers `bytes` bytes at `address` as an allocation, until the result is dropped.
    /// `label` names it in faults.
    ///
    /// # Safety
    /// Until the result is dropped the bytes are valid for reads and writes, and while a launch over this
    /// registry runs, only launches access them: *unchecked*.
    ///
    /// # Panics
    /// When `bytes` is 0, or when a live allocation overlaps: errors of the caller's allocator.
    pub unsafe fn register(&self, address: u64, bytes: u64, label: &'static str) -> Allocation {
        assert!(bytes > 0, "allocation `{label}` has no bytes");
        let end = address.checked_add(bytes).expect("an allocation ends inside the address space");
        let mut live = self.live.write().unwrap_or_else(PoisonError::into_inner);
        // Live allocations are disjoint, so only the last one that starts below `end` can overlap.
        if let Some((_, other)) = live.range(..end).next_back() {
            assert!(
                other.address + other.bytes <= address,
                "allocation `{label}` overlaps `{}`",
                other.label
            );
        }
        live.insert(address, Extent { address, bytes, label });
        Allocation { memory: self.clone(), address }
    }

    /// The live allocation that contains `address`.
    pub(super) fn find(&self, address: u64) -> Option<Extent> {
        let live = self.live.read().unwrap_or_else(PoisonError::into_inner);
        let (_, extent) = live.range(..=address).next_back()?;
        (address - extent.address < extent.bytes).then_some(*extent)
    }
}

/// A registered allocation; dropping it removes it from its [`Memory`].
#[derive(Debug)]
#[must_use = "an allocation is known only as long as this lives"]
pub struct Allocation {
    memory: Memory,
    address: u64,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let mut live = self.memory.live.write().unwrap_or_else(PoisonError::into_inner);
        live.remove(&self.address);
    }
}
