//! Memory, capture, identity and foreign contexts: the rules of every device.

pub mod capture;
pub mod digests;
pub mod embedder;
pub mod host_units;
pub mod identity;
pub mod memory;
pub mod rules;
