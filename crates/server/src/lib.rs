//! OpenAI's completions over HTTP, from a DeepSeek-V4 model.
//!
//! ```text
//! connections (tokio)                              the scheduler's thread
//! request: fields, tokens ──> queue ─────────────> scheduler: steps of all that run ──> engine
//! answer: pieces of text  <── events of a sequence ┘
//! ```
//!
//! A client that leaves drops its answer, and with it the receivers of its sequences: the scheduler releases
//! them before its next step.
//!
//! | module | what it holds |
//! |---|---|
//! | [`server`] | [`Server`]: from binding an address to the end |
//! | [`scheduler`] | which tokens of which requests run in a step |
//! | [`cold`] | prefixes that outlive the server |
//! | [`queue`] | requests that wait; the events of a sequence |
//! | `app`, `routes` | what all handlers share; the paths that are served |
//! | `completions`, `request`, `fields` | a request, read and checked, and its answer |
//! | `choice` | from tokens to pieces of text |
//! | [`stop`] | texts that end a completion |
//! | `answer`, `api_error` | answers and errors as OpenAI's clients read them |
//! | [`metrics`], `outcome` | what is counted |
//! | [`error`] | typed refusals and failures |
#![forbid(unsafe_code)]

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
