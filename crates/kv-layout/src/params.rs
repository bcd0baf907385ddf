//! The scalars each kernel takes: one `#[repr(C)]` struct, passed by value after the pointers.
//!
//! `u32` only, no implicit padding, no `bool`: the struct is the PTX `.param` byte for byte.

use bytemuck::{Pod, Zeroable};

/// Scalars of `append_swa_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct AppendSwaParams {
    /// Rows of `kv` that the launch covers: the token capacity of the step's bucket.
    pub tokens: u32,
    /// Rows of the ring planes, slots times ring; a row beyond them is a fault, not a write.
    pub rows: u32,
}

/// Scalars of `gather_swa_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct GatherSwaParams {
    /// The first query token of the launch; its tile row is 0.
    pub first: u32,
    /// Query tokens that the launch covers, from `first` on.
    pub tokens: u32,
    /// Rows of one request's ring, `R` (see [`crate::geometry::swa_ring_rows`]).
    pub ring: u32,
    /// Request slots the ring planes hold; a slot beyond them is a fault, not a read.
    pub slots: u32,
}

const _: () = assert!(size_of::<AppendSwaParams>() == 8 && align_of::<AppendSwaParams>() == 4);
const _: () = assert!(core::mem::offset_of!(AppendSwaParams, tokens) == 0);
const _: () = assert!(core::mem::offset_of!(AppendSwaParams, rows) == 4);
const _: () = assert!(size_of::<GatherSwaParams>() == 16 && align_of::<GatherSwaParams>() == 4);
const _: () = assert!(core::mem::offset_of!(GatherSwaParams, first) == 0);
const _: () = assert!(core::mem::offset_of!(GatherSwaParams, tokens) == 4);
const _: () = assert!(core::mem::offset_of!(GatherSwaParams, ring) == 8);
const _: () = assert!(core::mem::offset_of!(GatherSwaParams, slots) == 12);
