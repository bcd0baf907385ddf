//! How a request moves so that nothing else is ever admitted.
//!
//! | file | what it holds |
//! |---|---|
//! | `sender.rs`, `draft.rs` | the source, and what it prepares |
//! | `receiver.rs` | the target: reads, and their deadlines |
//! | `quarantine.rs`, `fence.rs` | memory that a read may still write, and the end of the transport |
//! | `reading.rs`, `verified.rs` | a request that comes, and one that has come |
//! | `sources.rs` | which sources a target has read and asked: an offer that comes twice is taken once |
//! | `transfer_id.rs` | the name of a transfer |
//! | `memory.rs` | memory of the target's reads |
//! | `admit.rs` | from bytes to a request |
//! | `prefix.rs` | prefixes, from offer to tree |
//! | `offer.rs` | what goes over the control channel |
//! | `error.rs` | why a request did not come |

mod admit;
mod draft;
mod error;
mod fence;
mod memory;
mod offer;
mod prefix;
mod quarantine;
mod reading;
mod receiver;
mod sender;
mod sources;
mod transfer_id;
mod verified;

pub use admit::{Claim, Claimed, Target};
pub use draft::Draft;
pub use error::TransferError;
pub use offer::{Control, Offer, Opening, Ready};
pub use receiver::{Deadlines, Ended, Receiver, ReceiverStats};
pub use sender::{NotOffered, Sender};
pub use transfer_id::TransferId;
pub use verified::Verified;
