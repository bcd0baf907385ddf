//! Products of activations with weights in NVFP4, for decode batches: the weight is read as it is stored, 4.5
//! bits an element.
//!
//! [`Nvfp4Matrix`] is a weight on the host, quantised from f32 or BF16 or taken from a checkpoint;
//! [`Nvfp4Linear`] is one on a device. Activations are BF16, sums f32. On one device a token gets the same bits
//! in every batch. See docs/specification.md, section 3.
//!
//! | module | what it holds |
//! |---|---|
//! | `matrix` | [`Nvfp4Matrix`]: codes and scales |
//! | `quantise` | from numbers to codes and scales, exactly rounded |
//! | `linear` | [`Nvfp4Linear`] |
//! | `tiles` | a weight as it lies on a device |
//! | [`ops`] | products with a weight in BF16, of few tokens and of many |
//! | `error` | [`LinearError`] |

mod error;
mod linear;
mod matrix;
pub mod ops;
mod quantise;
mod tiles;

pub use dsv4_kv_device::bf16;
pub use error::LinearError;
pub use linear::Nvfp4Linear;
pub use matrix::Nvfp4Matrix;
