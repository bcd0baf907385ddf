//! Who may do what with registered memory.

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

/// What has become of a read.
#[derive(Debug)]
pub enum Polled {
    /// It goes on.
    Pending(InFlight),
    /// It has ended. Whether the bytes are those that were meant, the transport does not know.
    Done(Registered),
    /// It has failed; some bytes may have been written, and others may be yet.
    Failed(InFlight, TransportError),
}

/// What a transport keeps of registered memory: the memory itself. Who has it can say that a read of the memory has ended;
/// nobody else can.
#[derive(Debug)]
pub struct Held {
    id: u64,
    region: Region,
}

impl Held {
    /// Memory that is registered, and its token.
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

    /// The memory, to write.
    pub fn region_mut(&mut self) -> RegionMut<'_> {
        RegionMut(&mut self.region)
    }

    /// The memory, which is not registered any more.
    #[must_use]
    pub fn into_region(self) -> Region {
        self.region
    }

    /// A read into this memory has ended, and nothing writes it any more. A read into other memory has not.
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
    /// Which memory: a number that is unique in the process.
    #[must_use]
    pub const fn id(&self) -> u64 {
        self.id
    }

    /// Its bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A read into it has begun: for transports.
    pub const fn in_flight(self) -> InFlight {
        InFlight(self)
    }
}

impl InFlight {
    /// Which memory.
    #[must_use]
    pub const fn id(&self) -> u64 {
        self.0.id
    }

    /// Its bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.0.len
    }

    /// Whether it has none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// The token of memory that a read may still write: the mistake that the types are there against.
    pub(crate) fn taken_for_ended(self) -> Registered {
        self.0
    }
}
