//! Products of activations with weights in NVFP4 and BF16.

pub mod bf16;
pub mod product;
pub mod quantise;
