//! Ways to move payloads: a target reads memory that a source has registered.
//!
//! A transport owns the memory that is registered with it. Its users have a token: [`Registered`] for memory that no
//! read writes, [`InFlight`] for memory that a read may write at any time. A token cannot be copied, and a read takes a
//! `Registered` and returns an `InFlight`. So a program that compiles cannot look at memory that is being written, read
//! into it again, or free it. Only the owner of the memory itself ([`Held`]), the transport, can declare that a read
//! into it has ended. No call cancels a read: bytes may still arrive after what transports call cancelling
//! ([ai-dynamo/nixl#2067](https://github.com/ai-dynamo/nixl/issues/2067)). Only [`Transport::fence`] stops reads, by
//! closing the whole transport and opening it again.
//!
//! | file | what it holds |
//! |---|---|
//! | `mod.rs` | [`Transport`] |
//! | `token.rs` | who may do what with memory, and the state of a read |
//! | `memory_kind.rs`, `region.rs`, `storage.rs` | memory that can be registered: of the host, of a device |
//! | `on_device.rs`, `digester.rs` | memory of a device, and digests that are computed there |
//! | `error.rs` | reasons why a transport fails |
//! | `loopback.rs` | within a process |
//! | `file.rs`, `directory_lock.rs` | through a directory, and the lock that shows whether a process still uses it |
//! | `nixl/` | NIXL, from a shared library that is found at run time; feature `nixl` |

mod digester;
mod directory_lock;
mod error;
mod file;
mod loopback;
mod memory_kind;
#[cfg(feature = "nixl")]
mod nixl;
mod on_device;
mod region;
mod storage;
mod token;

pub use error::TransportError;
pub use file::Files;
pub use loopback::{Fabric, Loopback};
pub use memory_kind::MemoryKind;
#[cfg(feature = "nixl")]
pub use nixl::{Nixl, NixlOptions};
pub use region::{Region, RegionMut};
pub use storage::Storage;
pub use token::{Held, InFlight, Polled, Registered};

use std::ops::Range;

/// The address of registered memory, by which a peer reads it. It is sent over the control channel; only transports of
/// the same kind understand it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Descriptor(pub Vec<u8>);

/// A read that could not begin: the memory into which it would have read, and the error.
#[derive(Debug)]
pub struct NotPosted(pub Registered, pub TransportError);

/// Reads of memory of other processes, or machines.
///
/// The tokens only guard against programming errors. A transport whose reads go on between its calls must itself record
/// which memory they may write, and refuse that memory in all calls except [`Self::poll`] and [`Self::fence`]
/// ([`TransportError::Read`]).
///
/// Calls may block. [`Self::post`] may block for the whole copy if the CPU copies the bytes. So call a transport from a
/// thread of its own.
pub trait Transport {
    /// Registers memory, which peers can read or into which this side reads.
    ///
    /// # Errors
    /// [`TransportError`].
    fn register(&mut self, region: Region) -> Result<Registered, TransportError>;

    /// Gives registered memory back. Peers cannot read it from now on.
    ///
    /// # Errors
    /// [`TransportError`]; the transport then keeps the memory until it ends.
    fn deregister(&mut self, memory: Registered) -> Result<Region, TransportError>;

    /// Lets `work` read and change memory. `work` must not call a transport of the same fabric: that may deadlock.
    ///
    /// # Errors
    /// [`TransportError::Unknown`] for memory of another transport, or that was given up by [`Self::fence`].
    fn with_region<R>(
        &mut self,
        memory: &mut Registered,
        work: impl FnOnce(RegionMut<'_>) -> R,
    ) -> Result<R, TransportError>;

    /// Lets `work` read and change the bytes of host memory.
    ///
    /// # Errors
    /// As [`Self::with_region`]; [`TransportError::OnDevice`] for memory of a device.
    fn with_bytes<R>(
        &mut self,
        memory: &mut Registered,
        work: impl FnOnce(&mut [u8]) -> R,
    ) -> Result<R, TransportError> {
        let id = memory.id();
        self.with_region(memory, |mut region| match region.kind() {
            MemoryKind::Host => Ok(work(region.bytes_mut())),
            _ => Err(TransportError::OnDevice { id }),
        })?
    }

    /// Lets peers read the memory, and returns the descriptor that they need. They see bytes as they were at the last
    /// [`Self::flush`], or newer ones.
    ///
    /// # Errors
    /// [`TransportError`].
    fn publish(&mut self, memory: &Registered) -> Result<Descriptor, TransportError>;

    /// Lets peers see the current contents of a range of published memory.
    ///
    /// # Errors
    /// [`TransportError`], [`TransportError::Outside`].
    fn flush(&mut self, memory: &Registered, bytes: Range<usize>) -> Result<(), TransportError>;

    /// Begins to read `bytes` of a peer's memory into the same range of `into`.
    ///
    /// # Errors
    /// [`NotPosted`] if no read was begun.
    fn post(
        &mut self,
        into: Registered,
        bytes: Range<usize>,
        from: &Descriptor,
    ) -> Result<InFlight, NotPosted>;

    /// The state of a read.
    fn poll(&mut self, read: InFlight) -> Polled;

    /// Closes the transport and opens it again. Afterwards no earlier read writes anything, all memory is unregistered
    /// and dropped, and all tokens are void. New memory can be registered.
    ///
    /// # Errors
    /// [`TransportError`]. Reads may then still go on, and nothing can be registered or read until a further call
    /// succeeds.
    fn fence(&mut self) -> Result<(), TransportError>;
}
