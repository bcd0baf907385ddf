//! Kinds of memory.

/// Which kind of memory something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// Of the host.
    Host,
    /// Of a GPU.
    Cuda {
        /// The driver's number of the GPU.
        ordinal: u32,
    },
    /// Of an emulated device, which only its own process can reach.
    Emulated,
}
