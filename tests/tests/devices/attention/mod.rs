//! Attention over the rows of the cache.

pub mod decode;
mod layer;
pub mod steps;
mod world;
