//! What a kernel's launch and its PTX must agree on, as data.

/// One pointer argument of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PointerInfo {
    /// Its name in the table.
    pub name: &'static str,
    /// The element type it points to, as Rust spells it.
    pub element: &'static str,
    /// What its address must be a multiple of, in bytes.
    pub align: u32,
    /// Whether the kernel writes through it.
    pub mutable: bool,
}

/// One kernel: what a launch and the PTX must agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelInfo {
    /// The PTX entry's name.
    pub name: &'static str,
    /// The pointer arguments, in order; each is one 64-bit `.param`.
    pub pointers: &'static [PointerInfo],
    /// Bytes of the parameter struct, the last `.param`.
    pub params_size: u32,
    /// Alignment of the parameter struct.
    pub params_align: u32,
    /// Threads of a block, a multiple of 32. Patched into the PTX as `.maxntid`.
    pub block: u32,
    /// Blocks that must fit on a multiprocessor at once. Patched in as `.minnctapersm`.
    pub min_blocks: u32,
    /// Bytes of shared memory of a block.
    pub shared: u32,
    /// Least compute capability, as in `sm_90`.
    pub min_sm: u32,
    /// Consecutive blocks of a row of the grid that run as a cluster; 1 = none. Patched in as
    /// `.reqnctapercluster`.
    pub cluster: u32,
}
