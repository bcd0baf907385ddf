//! Description of a kernel: the data on which its launch and its PTX must agree.

/// One pointer argument of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PointerInfo {
    /// Its name in the kernel table.
    pub name: &'static str,
    /// The element type it points to, as Rust spells it.
    pub element: &'static str,
    /// Required alignment of its address, in bytes.
    pub align: u32,
    /// Whether the kernel writes through it.
    pub mutable: bool,
    /// Number of elements that a launch may access: the product of these dimensions, as the kernel table writes them.
    pub extent: &'static str,
}

/// Description of one kernel, on which its launch and its PTX must agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelInfo {
    /// The PTX entry's name.
    pub name: &'static str,
    /// The pointer arguments, in order; each is one 64-bit `.param`.
    pub pointers: &'static [PointerInfo],
    /// The names of the parameter struct's fields, in order.
    pub params: &'static [&'static str],
    /// Size in bytes of the parameter struct, which is the last `.param`.
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
    /// Blocks of a cluster, which are consecutive in a row of the grid; 1 = no clusters. Patched in as
    /// `.reqnctapercluster`.
    pub cluster: u32,
    /// Whether its body calls [`crate::grid::wait_for_dependencies`]. For other kernels the PTX entry calls it first.
    pub waits_in_body: bool,
    /// Blocks along x and y, as the kernel table writes them.
    pub grid: &'static str,
}

impl KernelInfo {
    /// A kernel called `name` with blocks of one warp, without pointers, scalars or shared memory.
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
