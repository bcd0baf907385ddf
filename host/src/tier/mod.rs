//! The host tier: copies of blocks and checkpoints in pinned host memory, from which prompts continue when the device has
//! evicted theirs.
//!
//! A checkpoint that enters the device's prefix tree is copied to host memory soon after, with the blocks above it that
//! host memory does not have yet, so that eviction from the device moves nothing. A second prefix tree says which
//! prefixes are in host memory; its blocks are units of host memory. A unit has the rows of a block from all pools,
//! layer after layer; a checkpoint takes as many units as its bytes need.
//!
//! Each direction runs at most one transfer: one checkpoint, and the blocks above it. The prefix tree that it reads from
//! holds a reference until it is done; the transfer owns the memory that it writes. A kernel packs blocks into staging memory
//! that one copy moves; checkpoints are contiguous, and are copied directly.
//!
//! | file | what it holds |
//! |---|---|
//! | `layout.rs` | sizes |
//! | `state.rs` | the prefix tree of host memory, and the transfers under way |
//! | `in_flight.rs` | the queued copies of a transfer |
//! | `loans.rs` | references held for a lower tier |
//! | `copy_streams.rs` | the streams and the staging memory of a direction |
//! | `store.rs` | transfers from the device to host memory |
//! | `load.rs` | transfers from host memory to the device |
//! | `images.rs` | images and reservations that are lent to a lower tier |
//! | `stats.rs` | counters and events |
//! | `mistake.rs` | deliberate mistakes for tests |

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

pub use images::{CheckpointInfo, HostImage, HostReservation};
pub(crate) use load::Turn;
pub use state::PrefetchId;
pub(crate) use state::Tier;
pub use stats::{TierEvent, TierMiss, TierStats};
