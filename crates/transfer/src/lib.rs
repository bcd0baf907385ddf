//! A request moves from one KV cache to another, as an image that is checked before a byte of it is used.
//!
//! | module | what it holds |
//! |---|---|
//! | [`mod@image`] | manifest and payload, and why they are refused |
//! | [`transport`] | ways by which payloads come |
//! | [`protocol`] | offers, reads, deadlines, quarantine, admission |

pub mod image;
#[doc(hidden)]
pub mod mistake;
pub mod protocol;
pub mod transport;

pub use image::{Expected, Fingerprint, Image, ImageError, Manifest, Section, Source};
pub use protocol::{
    Control, Deadlines, Offer, Receiver, Sender, Target, TransferError, TransferId, Verified,
};
pub use transport::{Transport, TransportError};
