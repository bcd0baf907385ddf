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
//! | [`queue`], `accepted` | waiting requests; a sequence and its events |
//! | `app`, `routes` | the state that all handlers share; the paths that are served |
//! | `completions`, `body`, `request`, `fields` | receives, parses and checks a request |
//! | `reply` | its reply, whole or as a stream |
//! | `choice`, `echo` | turns tokens into pieces of text; the prompt in front of them |
//! | [`stop`] | stop texts, which end a completion |
//! | `answer`, `api_error` | answers and errors in OpenAI's format |
//! | [`metrics`], `outcome` | metrics, and the outcome of each request |
//! | [`error`] | typed refusals and failures |
#![forbid(unsafe_code)]

mod accepted;
mod admission;
mod answer;
mod api_error;
mod app;
mod body;
mod choice;
pub mod cold;
mod completions;
mod echo;
pub mod error;
mod fields;
pub mod metrics;
mod outcome;
mod plan;
pub mod queue;
mod reply;
mod request;
mod routes;
pub mod scheduler;
pub mod server;
pub mod stop;

pub use cold::ColdCache;
pub use dsv4_kv_cold_tier::{ColdError, ColdOptions};
pub use error::ServerError;
pub use server::{Ended, Server, Settings};
