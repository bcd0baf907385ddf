//! Ways by which payloads come: a target reads memory that a source has registered.
//!
//! A transport owns the memory that is registered with it. Who uses it has a token: [`Registered`] for memory that nobody
//! writes, [`InFlight`] for memory that a read may write at any time. A token cannot be copied, and a read takes the
//! first and gives the second, so that memory that is being written is neither looked at, nor read into again, nor freed,
//! as long as the program compiles. There is no call that ends a read: what transports call cancelling lets bytes arrive
//! later ([ai-dynamo/nixl#2067](https://github.com/ai-dynamo/nixl/issues/2067)). Only [`Transport::fence`] does, which
//! ends the transport's own life with it.
//!
//! | file | what it holds |
//! |---|---|
//! | `mod.rs` | [`Transport`] and its tokens |
//! | `region.rs` | memory that can be registered |
//! | `error.rs` | why a transport fails |
//! | `loopback.rs` | within a process |
//! | `file.rs` | through a directory |
//! | `nixl/` | NIXL, from a shared library that is found at run time; feature `nixl` |

mod error;
mod file;
mod loopback;
#[cfg(feature = "nixl")]
mod nixl;
mod region;

pub use error::TransportError;
pub use file::Files;
pub use loopback::{Fabric, Loopback};
#[cfg(feature = "nixl")]
pub use nixl::{Nixl, NixlOptions};
pub use region::Region;

use std::sync::atomic::{AtomicU64, Ordering};

/// What a peer needs to read registered memory. It goes over the control channel; only its transport understands it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Descriptor(pub Vec<u8>);

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

impl Registered {
    /// The token of memory of `len` bytes that was registered just now: for transports.
    pub fn new(len: usize) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self { id: NEXT.fetch_add(1, Ordering::Relaxed), len }
    }

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

    /// The read has ended, and nothing writes the memory any more: for transports, which alone can know.
    pub fn ended(self) -> Registered {
        self.0
    }
}

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

/// A read that was not begun, and the memory that it would have written.
#[derive(Debug)]
pub struct NotPosted(pub Registered, pub TransportError);

/// Reads of memory of other processes, or machines.
///
/// The tokens help programs, and no more than that: a transport whose reads go on behind its calls records itself which memory
/// they may write, and refuses that in all calls but [`Self::poll`] and [`Self::fence`] ([`TransportError::Read`]).
///
/// Calls may block, [`Self::post`] for as long as the bytes take where they are copied by the CPU: so they belong in a
/// thread of their own.
pub trait Transport {
    /// Takes memory, for peers to read or to be read into.
    ///
    /// # Errors
    /// [`TransportError`].
    fn register(&mut self, region: Region) -> Result<Registered, TransportError>;

    /// Takes memory back, which peers cannot read any more from now on.
    ///
    /// # Errors
    /// [`TransportError`]; the memory is kept until the transport ends then.
    fn deregister(&mut self, memory: Registered) -> Result<Region, TransportError>;

    /// Lets `work` see and change the bytes of memory.
    ///
    /// # Errors
    /// [`TransportError::Unknown`] for memory of another transport, or that was given up by [`Self::fence`].
    fn with_bytes<R>(
        &mut self,
        memory: &mut Registered,
        work: impl FnOnce(&mut [u8]) -> R,
    ) -> Result<R, TransportError>;

    /// What peers need to read the memory; they may see its bytes as they are now, or as they are later.
    ///
    /// # Errors
    /// [`TransportError`].
    fn publish(&mut self, memory: &Registered) -> Result<Descriptor, TransportError>;

    /// Begins to read a peer's memory, from its first byte on, into all of `into`.
    ///
    /// # Errors
    /// [`NotPosted`], if nothing was begun.
    fn post(&mut self, into: Registered, from: &Descriptor) -> Result<InFlight, NotPosted>;

    /// What has become of a read.
    fn poll(&mut self, read: InFlight) -> Polled;

    /// Ends everything: after it no read writes anything, all memory is given up, and all tokens are void. New memory can be
    /// registered.
    ///
    /// # Errors
    /// [`TransportError`]; memory is kept for ever then.
    fn fence(&mut self) -> Result<(), TransportError>;
}
