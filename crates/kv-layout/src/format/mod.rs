//! The number formats of the cache, as newtypes over their bits.
//!
//! Encoders round to nearest, ties to even, and saturate, as `cvt.rn.satfinite` does in hardware
//! (PTX ISA, "cvt"). All are `const fn` on bits, so host, device and tests share one definition.

mod bf16;
mod e2m1;
mod e4m3;
mod ue8m0;

pub use bf16::{bf16_from_f32, bf16_to_f32};
pub use e2m1::E2m1;
pub use e4m3::E4m3;
pub use ue8m0::Ue8m0;
