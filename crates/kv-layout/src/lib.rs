//! The data layouts on which host and device must agree, written once: number formats and cache row layouts. The kernel
//! table, in `kernels-gpu`, has what they must agree on about launches.
//!
//! No threads, no device, no unsafe. `kernels-gpu` compiles this crate for `nvptx64`, the host
//! library compiles it for the CPU.
//!
//! | module | what it holds |
//! |---|---|
//! | [`format`] | E4M3FN, E2M1, UE8M0 and BF16: bits, exact decode, IEEE encode |
//! | [`geometry`] | the constants of a DeepSeek-V4 attention layer |
//! | [`main_row`] | SWA and compressed-entry rows: 448 E4M3 + 64 BF16 + scales |
//! | [`index_row`] | indexer keys: NVFP4, MXFP4, FP8 |
//! | [`linear`] | NVFP4 weights, and the choice of a kernel by the number of tokens |
//! | [`router`] | limits of the router kernels |
//! | [`xxh3`] | constants of the digests of payloads, and their last step |
//! | [`attention`] | the keys and the form of each attention kernel |
//! | [`config`] | `ModelConfig` from a model's `config.json` (feature `config`) |
#![no_std]
#![forbid(unsafe_code)]

#[cfg(feature = "config")]
extern crate alloc;

pub mod attention;
#[cfg(feature = "config")]
pub mod config;
pub mod format;
pub mod geometry;
pub mod index_row;
pub mod linear;
pub mod main_row;
pub mod router;
pub mod xxh3;
