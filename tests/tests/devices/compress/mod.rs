//! Compressors: pooled entries, compressor state, every value through every quantiser.

pub mod entries;
pub mod state;
pub mod values;
