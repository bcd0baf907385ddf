//! Tests that launch nothing on a GPU: number formats, configurations, golden vectors, the ledger of the cache, and
//! random input bytes. They are one program, because each program costs a link.

mod cache;
mod config;
mod environment;
mod failures;
mod formats;
mod fuzz;
mod golden;
mod model_files;
mod router;
mod streams;
