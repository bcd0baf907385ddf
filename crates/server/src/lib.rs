//! Serves OpenAI's completions over HTTP, from a DeepSeek-V4 model.
//!
//! ```text
//! connections (tokio)                              the scheduler's thread
//! request: fields, tokens ──> queue ─────────────> scheduler: steps of all that run ──> engine
//! answer: pieces of text  <── events of a sequence ┘
//! ```
//!
//! When a client disconnects, its answer is dropped, and with it the receivers of its sequences. The scheduler releases
//! these sequences before its next step.
//!
//! | module | what it holds |
//! |---|---|
//! | [`server`] | [`Server`]: from binding an address to the shutdown |
//! | [`scheduler`] | admits requests, runs steps, preempts |
//! | `admission`, `plan` | which requests fit in the cache; which tokens of which requests run in a step |
//! | [`cold`] | the cold tier: prefixes that outlive the server |
//! | [`queue`] | waiting requests; the events of a sequence |
//! | `app`, `routes` | the state that all handlers share; the paths that are served |
//! | `completions`, `request`, `fields` | reads and checks a request, and answers it |
//! | `choice` | turns tokens into pieces of text |
//! | [`stop`] | stop texts, which end a completion |
//! | `answer`, `api_error` | answers and errors in OpenAI's format |
//! | [`metrics`], `outcome` | metrics, and the outcome of each request |
//! | [`error`] | typed refusals and failures |
#![forbid(unsafe_code)]

mod admission;
mod answer;
mod api_error;
mod app;
mod choice;
pub mod cold;
mod completions;
pub mod error;
mod fields;
pub mod metrics;
mod outcome;
mod plan;
pub mod queue;
mod request;
mod routes;
pub mod scheduler;
pub mod server;
pub mod stop;

pub use cold::ColdCache;
pub use dsv4_kv_tier::{ColdError, ColdOptions};
pub use error::ServerError;
pub use server::{Ended, Server, Settings};
