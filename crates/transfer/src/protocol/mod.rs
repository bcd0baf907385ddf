//! How a request moves so that nothing else is ever admitted.
//!
//! | file | what it holds |
//! |---|---|
//! | `sender.rs` | the source |
//! | `receiver.rs` | the target: reads, deadlines, quarantine |
//! | `memory.rs` | memory of the target's reads |
//! | `admit.rs` | from bytes to a request |
//! | `offer.rs` | what goes over the control channel |
//! | `error.rs` | why a request did not come |

mod admit;
mod error;
mod memory;
mod offer;
mod receiver;
mod sender;

pub use admit::Target;
pub use error::TransferError;
pub use offer::{Control, Offer};
pub use receiver::{Deadlines, Receiver, ReceiverStats, TransferId, Verified};
pub use sender::{Draft, Sender};
