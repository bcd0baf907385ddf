//! The host tier: copies of blocks and checkpoints in pinned host memory, from which prompts go on when the device has
//! lost theirs.
//!
//! A checkpoint that enters the device's prefix tree is copied here soon after, with those blocks above it that are not
//! here. Eviction from the device moves nothing then. Which prefixes are here is said by a prefix tree of its own, whose
//! blocks are units of host memory. Blocks lie in a unit as they lie in the pools, layer after layer; a checkpoint takes
//! as many units as its bytes need.
//!
//! In each direction at most one transfer is under way: of one checkpoint and the blocks above it, of which the device's
//! tree, or the host's, keeps what is read, and of which the transfer owns what is written, until it is done. Blocks are
//! packed by a kernel into memory that one copy moves, and checkpoints are contiguous as they are.
//!
//! | file | what it holds |
//! |---|---|
//! | `layout.rs` | sizes |
//! | `state.rs` | what is there, and what is under way |
//! | `flight.rs` | the copies of a transfer |
//! | `loans.rs` | what a tier below has |
//! | `lane.rs` | streams for each direction, and memory through which blocks go |
//! | `leaving.rs` | to the host |
//! | `arriving.rs` | to the device |
//! | `images.rs` | what a tier below stores, and brings back |
//! | `stats.rs` | what was moved, and why something was not |
//! | `mistake.rs` | mistakes that tests make |

mod arriving;
mod flight;
mod images;
mod lane;
pub(crate) mod layout;
mod leaving;
mod loans;
#[doc(hidden)]
pub mod mistake;
mod state;
mod stats;

pub(crate) use arriving::Turn;
pub use images::{HostImage, HostRoom};
pub use state::PrefetchId;
pub(crate) use state::Tier;
pub use stats::{TierEvent, TierMiss, TierStats};
