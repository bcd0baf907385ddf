//! The server on the CPU, with the small models of `tests/e2e`.
//!
//! | file | what it tests |
//! |---|---|
//! | `scheduler.rs` | batches, preemption, cancellation and failures, without HTTP |
//! | `prefixes.rs` | shared prefixes, host memory, and a store that outlives the server |
//! | `http.rs` | completions over HTTP, refusals, clients that leave, shutting down |
//! | `client.rs` | a server in a thread, and a client |
//! | `small.rs` | a small model, and what it answers alone |

mod client;
mod http;
mod prefixes;
mod scheduler;
mod small;
