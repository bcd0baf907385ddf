//! The CPU backend: one fiber per CUDA thread, blocks in parallel, every access checked.
//!
//! [`launch()`] runs a body once per thread of a grid. The lanes of a warp run one after another, each
//! until it reaches a collective. When all 32 lanes are at the same collective, its results are computed and the lanes
//! continue. The order of lanes and warps is random, drawn from [`Launch::seed`] anew at each stop, so
//! that a body which depends on the order fails in some run. The result depends on the seed only, except
//! where blocks communicate through global memory.
//!
//! A broken rule is reported as a [`Fault`]: a collective that not all threads reach, an access out of bounds or
//! misaligned, a read of unwritten shared memory, a race on shared or global memory, an access to the words of a copy
//! in flight, a write to its source or to operands of a product in flight, operands that no proxy fence makes visible, a
//! panic. It is also a fault if the system provides no stacks for the threads of a cluster, or no OS threads for blocks.
//!
//! Race detection is dynamic: it finds two accesses that the happens-before relation of this run leaves unordered;
//! vector clocks hold that relation. The emulator does not notice when the host frees an allocation that a launch uses.
//! A body that needs more than 64 KiB of stack ends the process at a guard page.
//!
//! | module | what it holds |
//! |---|---|
//! | `launch` | the shape of a launch |
//! | `dispatch` | runs the blocks of a launch on OS threads |
//! | `pool` | these OS threads |
//! | `schedule` | runs the fibers of a cluster's blocks from collective to collective |
//! | `stacks` | the stacks of fibers, whose number a process limits |
//! | `order` | the seeded order in which lanes, warps, and blocks of a cluster run |
//! | `block` | the running block and thread: index, shared memory, the place at which each thread stopped |
//! | `collective` | the operations at which threads stop, and their results |
//! | `barriers` | the named barriers of a block |
//! | `matrix` | matrix products of a warp |
//! | `copies` | asynchronous copies that a thread has started |
//! | `in_flight` | who started a copy or a product that is in flight, where and when |
//! | `products`, `operands` | products of warpgroups that a thread has started, and the operands of a warp's products |
//! | `shared_memory`, `race` | shared memory: unwritten words, bounds, races |
//! | `proxy` | stores to shared memory that products do not see, because a proxy fence is missing |
//! | `clock`, `time` | happens-before within a block: vector clocks of its warps |
//! | `global_memory`, `past` | races on global memory, also between blocks |
//! | `memory` | the registry of device allocations |
//! | `fault` | all faults, with their messages |
//! | `panic` | catches panics of a kernel body |
//! | `thread`, `cluster`, `grid`, `warp`, `mma`, `mem`, `shared`, `copy`, `atomic`, `math` | the crate's API on the CPU |
//!
//! The modules of the last row use the modules above them, which do not use the API.

pub(crate) mod atomic;
mod barriers;
mod block;
mod clock;
pub(crate) mod cluster;
mod collective;
mod copies;
pub(crate) mod copy;
mod dispatch;
mod fault;
mod global_memory;
pub(crate) mod grid;
mod in_flight;
mod launch;
pub(crate) mod math;
mod matrix;
pub(crate) mod mem;
mod memory;
pub(crate) mod mma;
mod operands;
mod order;
mod panic;
mod past;
mod pool;
mod products;
mod proxy;
mod race;
mod schedule;
pub(crate) mod shared;
mod shared_memory;
mod stacks;
pub(crate) mod thread;
mod time;
pub(crate) mod warp;

pub use collective::Operation;
pub use dispatch::{launch, launch_clusters};
pub use fault::{Access, AccessKind, Fault, FaultKind, GlobalAccess, LaneGroup, Site, ThreadIndex};
pub use launch::Launch;
pub use memory::{Allocation, Memory};
