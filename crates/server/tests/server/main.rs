//! The server on the CPU, with the small models of `tests/e2e`.
//!
//! | file | what it tests |
//! |---|---|
//! | `scheduler.rs` | batches, preemption, cancellation and failures, without HTTP |
//! | `prefixes.rs` | shared prefixes, host memory, and a store that outlives the server |
//! | `http.rs` | completions over HTTP, refusals, clients that disconnect, shutdown |
//! | `clients.rs` | what load generators, balancers and `curl` rely on |
//! | `echo.rs` | prompts in front of completions, and their log probabilities |
//! | `client.rs` | a server in a thread, and a client |
//! | `small.rs` | a small model, and its answers when no other request runs |

mod client;
mod clients;
mod echo;
mod http;
mod prefixes;
mod scheduler;
mod small;
