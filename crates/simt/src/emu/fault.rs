//! The faults of a launch, with the source line.

use std::fmt;
use std::io;
use std::panic::Location;

use super::collective::Operation;
use crate::limits::{MAX_BLOCK_THREADS, WARP_SIZE};

/// A place in the source: file, line, column.
pub type Site = &'static Location<'static>;

/// A broken rule of the thread model, and where it was found.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{}{kind}", Place { kernel: *kernel, block: *block })]
pub struct Fault {
    /// The kernel's name; `None` if binding an argument failed before the launch.
    pub kernel: Option<&'static str>,
    /// The block, as (x, y); `None` if the fault concerns the whole launch.
    pub block: Option<(u32, u32)>,
    /// Which rule was broken, and how.
    pub kind: Box<FaultKind>,
}

/// The kinds of faults. Thread numbers are indices in the block.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum FaultKind {
    /// No device accepts the launch's shape.
    #[error("a grid of {} x {} blocks of {block} threads cannot be launched", grid.0, grid.1)]
    InvalidLaunch {
        /// Blocks, as (x, y).
        grid: (u32, u32),
        /// Threads of a block.
        block: u32,
    },
    /// Not all threads of a collective have reached it.
    #[error("threads diverged at a collective: {}", Groups(groups))]
    Divergence {
        /// The threads of the warp, or of the block for a block barrier, grouped by the place where they are.
        groups: Vec<LaneGroup>,
    },
    /// An access to global memory outside the allocation to which its pointer was bound.
    #[error(
        "out of bounds: {thread} accesses {bytes} bytes at element {index} of `{argument}`, which \
         ends {} bytes into the allocation `{label}` of {allocation_bytes} bytes, at {location}",
        offset + u128::from(*bytes)
    )]
    OutOfBounds {
        /// The kernel's argument.
        argument: &'static str,
        /// The allocation's label.
        label: &'static str,
        /// The element index of the access.
        index: u64,
        /// Where the access starts, in bytes from the start of the allocation.
        offset: u128,
        /// Bytes of the access.
        bytes: u32,
        /// Bytes of the allocation.
        allocation_bytes: u64,
        /// The thread.
        thread: ThreadIndex,
        /// Source location of the access.
        location: Site,
    },
    /// An access whose address is not a multiple of its size.
    #[error(
        "misaligned: {thread} accesses {memory} at {address:#x}, no multiple of {align} bytes, at \
         {location}"
    )]
    Misaligned {
        /// The kernel's argument, or `shared memory`.
        memory: &'static str,
        /// The address; in shared memory, the byte offset.
        address: u64,
        /// Required alignment in bytes.
        align: u32,
        /// The thread.
        thread: ThreadIndex,
        /// Source location of the access.
        location: Site,
    },
    /// A shared array outside the block's shared memory, or an element outside its array.
    #[error(
        "out of bounds of shared memory: {thread} reaches for bytes {offset}..{} where {limit} is \
         the end, at {location}",
        offset + u64::from(*bytes)
    )]
    SharedOutOfBounds {
        /// First byte of the array or element, from the start of the block's shared memory.
        offset: u64,
        /// Size in bytes of the array or element.
        bytes: u32,
        /// The end of the array, or of the shared memory.
        limit: u64,
        /// The thread.
        thread: ThreadIndex,
        /// Source location of the access.
        location: Site,
    },
    /// A read of shared memory that the block has not written.
    #[error(
        "{thread} reads shared memory at byte {offset}, which was never written, at {location}"
    )]
    PoisonedShared {
        /// Byte offset in the block's shared memory of the word, or of the first of several words.
        offset: u32,
        /// The thread.
        thread: ThreadIndex,
        /// Source location of the access.
        location: Site,
    },
    /// Two threads access one word of shared memory, at least one writes, with no barrier between.
    #[error(
        "race on shared memory at byte {offset}: {first}, then, with no barrier between, {second}"
    )]
    SharedRace {
        /// Byte offset in the block's shared memory of the word, or of the first of several words.
        offset: u32,
        /// The access that came first in this run.
        first: Access,
        /// The access that came second.
        second: Access,
    },
    /// An operand of a product is written before the warp has waited for the product.
    #[error(
        "{write}, while the product that {thread} started at {location} may still read shared memory at byte {offset}"
    )]
    OperandOverwritten {
        /// Byte offset in the block's shared memory of the word, or of the first of several words.
        offset: u32,
        /// The write.
        write: Access,
        /// The thread that starts the product.
        thread: ThreadIndex,
        /// The place where it started the product.
        location: Site,
    },
    /// A word is accessed while a copy into it is in flight, that is, before the copy is waited for.
    #[error(
        "{thread} has started a copy at {location} that writes shared memory at byte {offset} at any time until it is \
         waited for, and before that {access}"
    )]
    CopyInFlight {
        /// Byte offset in the block's shared memory of the word, or of the first of several words.
        offset: u32,
        /// The access.
        access: Access,
        /// The thread that copies.
        thread: ThreadIndex,
        /// The place where it started the copy.
        location: Site,
    },
    /// A product of a warpgroup, which reads through the async proxy, reads a store to shared memory with no proxy
    /// fence between.
    #[error(
        "{thread} starts a product at {location} that reads shared memory at byte {offset}, and no `fence_proxy_async` makes \
         visible what {write}"
    )]
    UnfencedOperand {
        /// Byte offset in the block's shared memory of the word, or of the first of several words.
        offset: u32,
        /// The store.
        write: Access,
        /// The thread that starts the product.
        thread: ThreadIndex,
        /// The place where it starts the product.
        location: Site,
    },
    /// Two threads of a launch access the same bytes of global memory, at least one writes, and neither access happens
    /// before the other. Or a thread, perhaps the same one, writes to the source of a copy in flight.
    #[error(
        "race on global memory, byte {offset} of the allocation of `{argument}`: {first}, and, with nothing that orders \
         them, {second}"
    )]
    GlobalRace {
        /// The kernel's argument through which the second access is made.
        argument: &'static str,
        /// Where the second access starts, in bytes from the start of the allocation.
        offset: u64,
        /// The access that was made first in this run.
        first: GlobalAccess,
        /// The access that was made second.
        second: GlobalAccess,
    },
    /// An access to another block's shared memory with no cluster barrier after it: that block may have returned.
    #[error(
        "{thread} reads the shared memory of block {rank} of its cluster, which may have returned: no \
         barrier of the cluster follows, at {location}"
    )]
    PeerMayReturn {
        /// The rank of the block whose memory is accessed.
        rank: u32,
        /// The thread.
        thread: ThreadIndex,
        /// Source location of the access.
        location: Site,
    },
    /// A pointer argument that does not point into a live allocation.
    #[error("argument `{argument}`: no live allocation contains address {address:#x}")]
    UnboundPointer {
        /// The kernel's argument.
        argument: &'static str,
        /// The address that was passed.
        address: u64,
    },
    /// A cluster has more threads than the process may have stacks. It needs one per thread, all at once.
    #[error(
        "a cluster of {threads} threads needs a stack for each of them, and this process has room for {most}: let it have more \
         mappings of memory (`sysctl -w vm.max_map_count={mappings}`)"
    )]
    TooManyThreads {
        /// Threads of the cluster.
        threads: u32,
        /// Most stacks that the process may have.
        most: u32,
        /// A limit of memory mappings that would be high enough.
        mappings: u64,
    },
    /// The system has no memory for the stack of a thread.
    #[error(
        "the system has no memory for the stack of a thread ({reason}): let the process have more of it, or more mappings \
         (`ulimit -v`, `sysctl vm.max_map_count`), or run fewer blocks at once (`RAYON_NUM_THREADS`)"
    )]
    NoStack {
        /// The system's error.
        reason: io::ErrorKind,
    },
    /// The system starts no OS threads on which blocks could run.
    #[error(
        "the system does not start the emulator's threads ({reason}): let the process have more (`ulimit -u`), or ask for fewer \
         (`RAYON_NUM_THREADS`)"
    )]
    NoThreads {
        /// The system's error.
        reason: String,
    },
    /// A Rust panic in the body.
    #[error("{thread} panicked{}: {message}", At(location))]
    Panic {
        /// The panic's text.
        message: String,
        /// The thread.
        thread: ThreadIndex,
        /// `file:line:column`; `None` if another panic hook has replaced the emulator's.
        location: Option<String>,
    },
}

/// A thread's index in its block, displayed with its warp and lane. The threads of other blocks of the cluster have the
/// numbers after the block's own: thread `t` of the block with rank `r` is `1024 (1 + r) + t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ThreadIndex(pub u32);

impl fmt::Display for ThreadIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let thread = self.0 % MAX_BLOCK_THREADS;
        let (warp, lane) = (thread / WARP_SIZE, thread % WARP_SIZE);
        write!(f, "thread {thread} (warp {warp}, lane {lane})")?;
        match (self.0 / MAX_BLOCK_THREADS).checked_sub(1) {
            Some(rank) => write!(f, " of block {rank} of the cluster"),
            None => Ok(()),
        }
    }
}

/// Threads that are at the same place.
#[derive(Clone, Debug, PartialEq)]
pub struct LaneGroup {
    /// Indices in the block, ascending.
    pub threads: Vec<u32>,
    /// The collective at which they wait, and its place; `None` if they have returned from the kernel.
    pub waiting: Option<(Operation, Site)>,
}

impl fmt::Display for LaneGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("threads ")?;
        let runs = self.threads.chunk_by(|a, b| a + 1 == *b);
        for (i, run) in runs.enumerate() {
            let separator = if i == 0 { "" } else { ", " };
            match run {
                [only] => write!(f, "{separator}{only}")?,
                [first, .., last] => write!(f, "{separator}{first}-{last}")?,
                [] => {}
            }
        }
        match self.waiting {
            Some((operation, location)) => write!(f, " wait at {operation}, {location}"),
            None => f.write_str(" have returned"),
        }
    }
}

/// One access to global memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GlobalAccess {
    /// The block, as (x, y).
    pub block: (u32, u32),
    /// The thread, the kind of access, and the place.
    pub access: Access,
}

impl fmt::Display for GlobalAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (x, y) = self.block;
        write!(f, "block ({x}, {y}), {}", self.access)
    }
}

/// One access to a word of memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Access {
    /// The thread.
    pub thread: ThreadIndex,
    /// The kind of access.
    pub kind: AccessKind,
    /// The place in the source.
    pub location: Site,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = match self.kind {
            AccessKind::Read => "reads",
            AccessKind::ReadConstant => "reads, as memory that nobody writes,",
            AccessKind::Write => "writes",
            AccessKind::Atomic => "modifies atomically",
        };
        write!(f, "{} {verb} at {}", self.thread, self.location)
    }
}

/// The kinds of accesses to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessKind {
    /// A plain load.
    Read,
    /// A load that is allowed only where the launch does not write (`ld.global.nc`): it races with every write of the
    /// launch, whatever synchronization lies between.
    ReadConstant,
    /// A plain store.
    Write,
    /// An operation of [`crate::atomic::BlockAtomicU32`] or [`crate::atomic::DeviceAtomicU32`].
    Atomic,
}

struct Place {
    kernel: Option<&'static str>,
    block: Option<(u32, u32)>,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(kernel) = self.kernel {
            write!(f, "kernel `{kernel}`, ")?;
        }
        if let Some((x, y)) = self.block {
            write!(f, "block ({x}, {y}): ")?;
        }
        Ok(())
    }
}

struct Groups<'a>(&'a [LaneGroup]);

impl fmt::Display for Groups<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, group) in self.0.iter().enumerate() {
            write!(f, "{}{group}", if i == 0 { "" } else { "; " })?;
        }
        Ok(())
    }
}

struct At<'a>(&'a Option<String>);

impl fmt::Display for At<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|location| write!(f, " at {location}"))
    }
}
