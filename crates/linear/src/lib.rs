//! Products of activations with weights in NVFP4, for decode batches, and in BF16, for any number of tokens. An NVFP4
//! weight is read as it is stored, at 4.5 bits per element.
//!
//! [`Nvfp4Matrix`] is a weight on the host, quantised from f32 or BF16 or taken from a model's files; [`Nvfp4Linear`] is a
//! weight on a device. Activations are BF16, sums f32. On one device a token gets the same bits in every batch. See
//! docs/specification.md, section 3.
//!
//! | module | what it holds |
//! |---|---|
//! | `matrix` | [`Nvfp4Matrix`]: codes and scales |
//! | `quantise` | converts numbers to codes and scales, exactly rounded |
//! | `linear` | [`Nvfp4Linear`] |
//! | `tiles` | the device layout of a weight |
//! | [`ops`] | products with a weight in BF16, for few and for many tokens |
//! | `error` | [`LinearError`] |
//!
//! # From numbers to a product
//!
//! ```
//! use dsv4_kv_device::{EmuDevice, EmuOptions};
//! use dsv4_kv_linear::{Nvfp4Linear, Nvfp4Matrix, bf16};
//!
//! // On a GPU: dsv4_kv::open_cuda(CudaOptions::default())?
//! let device = EmuDevice::new(EmuOptions::default());
//! let stream = device.stream()?;
//!
//! // 64 rows of 128 values, which NVFP4 has exactly: row `i` is ones, or halves if `i` is odd.
//! let values: Vec<f32> = (0..64).flat_map(|i| [[1.0, 0.5][i % 2]; 128]).collect();
//! let matrix = Nvfp4Matrix::quantise(&values, 64, 128)?;
//! assert_eq!(matrix.codes().len() + matrix.scales().len(), 64 * 128 * 9 / 16); // 4.5 bits a value
//! let decoded = matrix.decode();
//! assert!(decoded.iter().zip(&values).all(|(now, was)| (now - was).abs() < 1e-6));
//!
//! // The weight on the device, and two tokens: ones, and twos.
//! let weight = Nvfp4Linear::new(&stream, &matrix)?;
//! let x = device.allocate::<bf16>("activations", 2 * 128)?;
//! let ones_and_twos: Vec<bf16> = [1.0, 2.0].iter().flat_map(|&x| [bf16::from_f32(x); 128]).collect();
//! stream.upload(&ones_and_twos, &x, 0)?;
//! let y = device.allocate::<f32>("results", 2 * 64)?;
//! weight.multiply(&stream, &x, 2, &y)?;
//!
//! let mut result = [0.0_f32; 2 * 64];
//! stream.download(&y, 0, &mut result)?;
//! for (at, expected) in [(0, 128.0), (1, 64.0), (64, 256.0), (65, 128.0)] {
//!     assert!((result[at] - expected).abs() < 1e-3, "{at}: {}", result[at]);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`Nvfp4Matrix::from_parts`] takes a stored NVFP4 weight unchanged. [`Nvfp4Linear::multiply_to_bf16`] rounds
//! the sums to BF16. A graph that captured a product must retain [`Nvfp4Linear::memory`].

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
