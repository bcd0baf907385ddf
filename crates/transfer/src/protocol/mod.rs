//! The protocol by which a request moves, and which admits only bytes that were verified.
//!
//! | file | what it holds |
//! |---|---|
//! | `sender.rs`, `open_transfer.rs` | the source, and the payloads that it fills |
//! | `receiver.rs` | the target: reads, and their deadlines |
//! | `quarantine.rs`, `fence.rs` | memory that a read may still write, and the fence that closes the transport |
//! | `reading.rs`, `verified.rs` | a payload that is being read, and one that was read and verified |
//! | `sources.rs` | which sources a target has read and asked, so that an offer that arrives twice is taken once |
//! | `transfer_id.rs` | the id of a transfer |
//! | `buffers.rs`, `memory.rs` | the memory into which the target reads |
//! | `admit.rs`, `claim.rs` | from verified bytes to a request in the cache |
//! | `prefix.rs` | prefixes, from offer to tree |
//! | `offer.rs` | the messages of the control channel |
//! | `error.rs` | why a transfer failed |

mod admit;
mod buffers;
mod claim;
mod error;
mod fence;
mod memory;
mod offer;
mod open_transfer;
mod prefix;
mod quarantine;
mod reading;
mod receiver;
mod sender;
mod sources;
mod transfer_id;
mod verified;

pub use admit::Target;
pub use claim::{Claim, Claimed};
pub use error::TransferError;
pub use offer::{Control, Offer, Opening, Ready};
pub use open_transfer::OpenTransfer;
pub use receiver::{Deadlines, Ended, Receiver, ReceiverStats};
pub use sender::{NotOffered, Sender};
pub use transfer_id::TransferId;
pub use verified::Verified;
