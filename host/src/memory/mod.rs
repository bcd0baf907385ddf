//! The device memory of a cache: its buffers, their layout, and views of their parts.

pub mod buffer_spec;
pub mod cache_memory;
pub mod pools;
pub mod state_layout;
pub mod state_memory;
pub mod step_memory;
