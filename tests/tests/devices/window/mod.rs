//! The sliding window.

pub mod swa;
