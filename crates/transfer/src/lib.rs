//! A request moves from one KV cache to another, as an image that is checked before a byte of it is used.
//!
//! | module | what it holds |
//! |---|---|
//! | [`mod@image`] | manifest and payload, and why they are refused |

pub mod image;
#[doc(hidden)]
pub mod mistake;

pub use image::{Expected, Fingerprint, Image, ImageError, Manifest, Section, Source};
