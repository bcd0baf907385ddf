//! The host tier: copies of blocks and checkpoints in pinned host memory, from which prompts continue when the device has
//! evicted theirs.
//!
//! A checkpoint that enters the device's prefix tree is copied here soon after, with the blocks above it that are not here
//! yet, so eviction from the device moves nothing. A prefix tree of its own says which prefixes are here; its blocks are units of
//! host memory. Blocks lie in a unit as they lie in the pools, layer after layer; a checkpoint takes as many units as its
//! bytes need.
//!
//! Each direction runs at most one transfer: one checkpoint, and the blocks above it. The prefix tree that it reads from
//! holds a reference until it is done; the transfer owns the memory that it writes. A kernel packs blocks into staging memory
//! that one copy moves; checkpoints are contiguous, and are copied directly.
//!
//! | file | what it holds |
//! |---|---|
//! | `layout.rs` | sizes |
//! | `state.rs` | what is in host memory, and the transfers under way |
//! | `in_flight.rs` | the queued copies of a transfer |
//! | `loans.rs` | references held for a lower tier |
//! | `copy_streams.rs` | the streams and the staging memory of a direction |
//! | `store.rs` | transfers from the device to host memory |
//! | `load.rs` | transfers from host memory to the device |
//! | `images.rs` | what a lower tier stores, and brings back |
//! | `stats.rs` | counters and events |
//! | `mistake.rs` | mistakes that tests make |

mod copy_streams;
mod images;
mod in_flight;
pub(crate) mod layout;
mod load;
mod loans;
#[doc(hidden)]
pub mod mistake;
mod state;
mod stats;
mod store;

pub use images::{HostImage, HostRoom};
pub(crate) use load::Turn;
pub use state::PrefetchId;
pub(crate) use state::Tier;
pub use stats::{TierEvent, TierMiss, TierStats};
