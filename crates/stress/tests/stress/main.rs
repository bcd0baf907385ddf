//! Tests of the stress test. They are one program, since each program would compile the cache and the emulator again.

mod configs;
mod engine;
mod ranks;
mod reuse;
mod reuse_kernels;
mod tier;
#[cfg(feature = "mistakes")]
mod tier_mistakes;
