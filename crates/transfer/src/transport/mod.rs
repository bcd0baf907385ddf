//! Ways by which payloads come: a target reads memory that a source has registered.
//!
//! A transport owns the memory that is registered with it. Who uses it has a token: [`Registered`] for memory that nobody
//! writes, [`InFlight`] for memory that a read may write at any time. A token cannot be copied, and a read takes the
//! first and gives the second, so that memory that is being written is neither looked at, nor read into again, nor freed,
//! as long as the program compiles. Only who has the memory itself, as [`Held`], can say that a read into it has ended: its
//! transport. There is no call that ends a read: what transports call cancelling lets bytes arrive
//! later ([ai-dynamo/nixl#2067](https://github.com/ai-dynamo/nixl/issues/2067)). Only [`Transport::fence`] does, which
//! ends the transport's own life with it.
//!
//! | file | what it holds |
//! |---|---|
//! | `mod.rs` | [`Transport`] |
//! | `token.rs` | who may do what with memory, and what has become of a read |
//! | `region.rs`, `storage.rs` | memory that can be registered: of the host, of a device |
//! | `on_device.rs`, `digester.rs` | memory of a device, and digests of what is there |
//! | `error.rs` | why a transport fails |
//! | `loopback.rs` | within a process |
//! | `file.rs` | through a directory |
//! | `nixl/` | NIXL, from a shared library that is found at run time; feature `nixl` |

mod digester;
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

/// What a peer needs to read registered memory. It goes over the control channel; only its transport understands it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Descriptor(pub Vec<u8>);

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

    /// Lets `work` see and change memory. It must not call a transport of the same fabric, which may wait for this call's end.
    ///
    /// # Errors
    /// [`TransportError::Unknown`] for memory of another transport, or that was given up by [`Self::fence`].
    fn with_region<R>(
        &mut self,
        memory: &mut Registered,
        work: impl FnOnce(RegionMut<'_>) -> R,
    ) -> Result<R, TransportError>;

    /// Lets `work` see and change the bytes of memory of the host.
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

    /// What peers need to read the memory. They see bytes as they were at the last [`Self::flush`], or as they are later.
    ///
    /// # Errors
    /// [`TransportError`].
    fn publish(&mut self, memory: &Registered) -> Result<Descriptor, TransportError>;

    /// Lets peers see bytes of published memory as they are now.
    ///
    /// # Errors
    /// [`TransportError`], [`TransportError::Outside`].
    fn flush(&mut self, memory: &Registered, bytes: Range<usize>) -> Result<(), TransportError>;

    /// Begins to read bytes of a peer's memory into the same place of `into`.
    ///
    /// # Errors
    /// [`NotPosted`], if nothing was begun.
    fn post(
        &mut self,
        into: Registered,
        bytes: Range<usize>,
        from: &Descriptor,
    ) -> Result<InFlight, NotPosted>;

    /// What has become of a read.
    fn poll(&mut self, read: InFlight) -> Polled;

    /// Ends everything: after it no read writes anything, all memory is given up, and all tokens are void. New memory can be
    /// registered.
    ///
    /// # Errors
    /// [`TransportError`]. Reads may go on then, and nothing can be registered or read before a call of this has succeeded: it
    /// may be called again.
    fn fence(&mut self) -> Result<(), TransportError>;
}
