//! Kinds of memory.

/// The kind of memory in which a payload lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// Memory of the host.
    Host,
    /// Memory of a GPU.
    Cuda {
        /// The driver's number of the GPU.
        ordinal: u32,
    },
    /// Memory of an emulated device, which only its own process can reach.
    Emulated,
}
