//! The MoE router: its kernels, and the type around them.

pub mod api;
pub mod batches;
pub mod decode;
pub mod selection;
