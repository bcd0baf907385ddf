//! Gathers of compressed entries.

pub mod lists;
pub mod pool;
