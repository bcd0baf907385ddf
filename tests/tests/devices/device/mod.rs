//! Memory, capture and foreign contexts: the rules of every device.

pub mod capture;
pub mod embedder;
pub mod memory;
