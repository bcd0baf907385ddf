//! A worker of [Dynamo](https://github.com/ai-dynamo/dynamo) on the model and the cache of dsv4-kv.
//!
//! ```text
//! frontend ── request plane ──> worker.rs: LLMEngine ── jobs ──> batch.rs: a thread with the engine
//!          <── tokens ───────────────────────────── updates ───┘   │ events of its prefix tree (ZMQ)
//!                                                                   │
//! prefill: a prompt is computed and leaves as an offer; its ticket is the result
//!          (moves.rs, offers.rs, ticket.rs, questions.rs)
//! decode:  the ticket's payload is read and verified beside the steps, and admitted between two of them
//! ```
//!
//! | module | what it holds |
//! |---|---|
//! | [`args`] | options |
//! | [`worker`] | [`KvWorker`]: the interface for Dynamo |
//! | [`request`] | a request of Dynamo as a job, or why it is refused |
//! | [`batch`] | steps of all running requests |
//! | [`moves`] | requests that leave and arrive |
//! | [`offers`] | the offers that decode workers can claim |
//! | [`questions`] | the port at which decode workers claim requests |
//! | [`ticket`] | the data by which a decode worker takes a request from a prefill worker |
//! | [`device`] | the model and where it runs |

pub mod args;
pub mod batch;
pub mod device;
pub mod moves;
pub mod offers;
pub mod questions;
pub mod request;
pub mod ticket;
pub mod worker;

pub use args::Options;
pub use worker::KvWorker;
