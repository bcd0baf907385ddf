//! Compressors: pooled entries, their flush, compressor state, and every value through every quantiser.

pub mod entries;
pub mod flush;
pub mod refusals;
pub mod state;
pub mod values;
