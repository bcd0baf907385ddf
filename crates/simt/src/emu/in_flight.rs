//! Copies and products in flight: what started them, and when.

use super::fault::{Site, ThreadIndex};

/// Bytes of a granule. Operands of products are whole granules.
pub const GRANULE_BYTES: u32 = 16;

/// A copy or a product in flight. Until it is waited for, a copy may write its words at any time, and a product may
/// read its operands at any time.
#[derive(Clone, Copy, Debug)]
pub struct InFlight {
    /// The thread that started it.
    pub thread: ThreadIndex,
    /// The place where it was started.
    pub location: Site,
    /// Number of accesses to the memory before it was started.
    pub accesses: u64,
}
