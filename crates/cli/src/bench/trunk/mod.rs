//! The layers of a model, beside a cache whose requests have long contexts.
//!
//! | file | what it holds |
//! |---|---|
//! | `filled.rs` | the cache, and how its requests come to their tokens |
//! | `tensors.rs` | what its layers read besides, and write |
//! | `heads.rs` | heads of queries, where attention is in place |
//! | `parts.rs` | the parts of a step, queued alone or together |

mod filled;
mod heads;
mod parts;
mod tensors;

pub use filled::{Filled, PREFILL_TOKENS, trunk_of};
pub use parts::{Part, queue, queue_layer};
pub use tensors::{Size, Tensors};
