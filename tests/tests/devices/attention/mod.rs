//! Attention over the stored rows of the cache.

mod blocks;
pub mod consecutive;
pub mod decode;
pub mod forms;
mod layer;
pub mod mixed;
pub mod needles;
pub mod queries;
pub mod refusals;
pub mod splits;
pub mod spread;
pub mod steps;
pub mod values;
mod workspace;
mod world;
