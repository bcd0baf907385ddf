//! Tokens: who may do what with registered memory.

use std::sync::atomic::{AtomicU64, Ordering};

use super::error::TransportError;
use super::region::{Region, RegionMut};

/// Registered memory that no read writes.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "memory whose token is dropped is kept until its transport ends; deregister it"]
pub struct Registered {
    id: u64,
    len: usize,
}

/// Registered memory that a read may write at any time.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a read whose token is dropped goes on, and its memory is kept until its transport ends; poll it"]
pub struct InFlight(Registered);

/// The state of a read.
#[derive(Debug)]
pub enum Polled {
    /// The read goes on.
    Pending(InFlight),
    /// The read has ended. The transport does not know whether the bytes are the right ones.
    Done(Registered),
    /// The read has failed. Some bytes may have been written, and more may still be.
    Failed(InFlight, TransportError),
}

/// The registered memory itself, which the transport keeps. Only its owner can declare that a read into it has ended.
#[derive(Debug)]
pub struct Held {
    id: u64,
    region: Region,
}

impl Held {
    /// Wraps memory for registration, and returns its token too.
    pub fn new(region: Region) -> (Self, Registered) {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let (id, len) = (NEXT.fetch_add(1, Ordering::Relaxed), region.len());
        (Self { id, region }, Registered { id, len })
    }

    /// The memory.
    #[must_use]
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// The memory, mutable.
    pub fn region_mut(&mut self) -> RegionMut<'_> {
        RegionMut(&mut self.region)
    }

    /// Unwraps the memory. It is no longer registered.
    #[must_use]
    pub fn into_region(self) -> Region {
        self.region
    }

    /// Declares that a read into this memory has ended, and that nothing writes the memory any more. Returns
    /// [`Polled::Failed`] for a read into other memory.
    #[must_use]
    pub fn done(&self, read: InFlight) -> Polled {
        let id = read.id();
        if id == self.id {
            Polled::Done(read.0)
        } else {
            Polled::Failed(read, TransportError::Unknown { id })
        }
    }
}

impl Registered {
    /// The id of the memory, unique in the process.
    #[must_use]
    pub const fn id(&self) -> u64 {
        self.id
    }

    /// Its length in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The token while a read writes the memory. Transports call this when a read has begun.
    pub const fn in_flight(self) -> InFlight {
        InFlight(self)
    }
}

impl InFlight {
    /// The id of the memory.
    #[must_use]
    pub const fn id(&self) -> u64 {
        self.0.id
    }

    /// Its length in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.0.len
    }

    /// Whether it has no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Treats a read as ended although it may still write the memory: the error that these types prevent, for
    /// `Mistake::NoQuarantine` only.
    pub(crate) fn taken_for_ended(self) -> Registered {
        self.0
    }
}
