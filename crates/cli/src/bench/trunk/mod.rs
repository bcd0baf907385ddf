//! The layers of a model, and a cache whose requests have long contexts.
//!
//! | file | what it holds |
//! |---|---|
//! | `filled.rs` | the cache, and the prefill of its requests |
//! | `tensors.rs` | the other inputs of the layers, and their outputs |
//! | `heads.rs` | heads of queries, for attention in place |
//! | `parts.rs` | the parts of a step, queued alone or together |

mod filled;
mod heads;
mod parts;
mod tensors;

pub use filled::{Filled, PREFILL_TOKENS, trunk_of};
pub use parts::{Part, queue, queue_layer};
pub use tensors::{Size, Tensors};
