//! The identity of a device, and its properties.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// Properties of a device, for people and reports.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct DeviceInfo {
    /// Its name, as the driver gives it.
    pub name: String,
    /// Compute capability as in `sm_90`; `None` for the emulated device.
    pub sm: Option<u32>,
    /// Memory of the device, in bytes.
    pub total_memory: u64,
}

/// The identity of a [`Device`](crate::Device). No two devices of a process have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceId(u64);

impl DeviceId {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {}", self.0)
    }
}
