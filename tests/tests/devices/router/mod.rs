//! The MoE router: its kernels, and the type `Router`.

pub mod api;
pub mod batches;
pub mod decode;
pub mod selection;
