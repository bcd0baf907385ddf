//! Decode in one launch a layer.

pub mod early;
pub mod one_launch;
pub mod refusals;
