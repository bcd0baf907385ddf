//! The memory of a cache: what there is of it, how it lies, and views of its parts.

pub mod buffer_spec;
pub mod cache_memory;
pub mod pools;
pub mod state_layout;
pub mod state_memory;
pub mod step_memory;
