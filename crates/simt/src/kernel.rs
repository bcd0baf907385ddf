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
    /// How many elements a launch may touch: the product of these dimensions, as the table writes them.
    pub extent: &'static str,
}

/// One kernel: what a launch and the PTX must agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelInfo {
    /// The PTX entry's name.
    pub name: &'static str,
    /// The pointer arguments, in order; each is one 64-bit `.param`.
    pub pointers: &'static [PointerInfo],
    /// The names of the parameter struct's fields, in order.
    pub params: &'static [&'static str],
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
    /// Whether its body waits for the launch before it; of other kernels the entry does, first.
    pub waits_in_body: bool,
    /// Blocks along x and y, as the table writes them.
    pub grid: &'static str,
}

impl KernelInfo {
    /// The kernel called `name`, in blocks of a warp, without pointers, scalars or shared memory.
    #[must_use]
    pub const fn new(name: &'static str) -> Self {
        Self {
            name,
            pointers: &[],
            params: &[],
            params_size: 0,
            params_align: 1,
            block: 32,
            min_blocks: 1,
            shared: 0,
            min_sm: 90,
            cluster: 1,
            waits_in_body: false,
            grid: "1, 1",
        }
    }
}
