//! Tests of the stress test, in one program, as each would compile the cache and the emulator anew.

mod engine;
mod ranks;
mod reuse;
mod reuse_kernels;
mod tier;
#[cfg(feature = "mistakes")]
mod tier_mistakes;
