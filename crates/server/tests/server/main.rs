//! The server on the CPU, with the small models of `tests/e2e`.
//!
//! | file | what it tests |
//! |---|---|
//! | `scheduler.rs` | batches, preemption, cancellation and failures, without HTTP |
//! | `small.rs` | a small model, and what it answers alone |

mod scheduler;
mod small;
