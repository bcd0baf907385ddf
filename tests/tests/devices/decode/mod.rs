//! Decode steps with one launch per layer.

pub mod early;
pub mod one_launch;
pub mod refusals;
