//! A DeepSeek-V4 checkpoint: its configuration and its weights, as released or as transformers writes it.
//!
//! Host code only, without a device: `dsv4-kv`, `dsv4-kv-router` and a model take their weights from a
//! [`Checkpoint`].
//!
//! ```no_run
//! use dsv4_kv_checkpoint::Checkpoint;
//!
//! let checkpoint = Checkpoint::open("DeepSeek-V4-Flash".as_ref())?;
//! let config = checkpoint.config();
//! let shape = [u64::from(config.vocab_size), u64::from(config.hidden_size)];
//! let embedding = checkpoint.bf16("embed.weight", &shape)?;
//! # Ok::<(), dsv4_kv_checkpoint::CheckpointError>(())
//! ```
//!
//! | module | what it holds |
//! |---|---|
//! | `config` | [`Config`]: all of a `config.json` that a forward pass needs |
//! | `checkpoint` | [`Checkpoint`]: tensors by released name, shape and type |
//! | `files` | which files a checkpoint has |
//! | `mapped` | a file in memory; the only `unsafe` |
//! | `catalogue` | what tensors the files hold, under released names |
//! | `names` | from transformers' names to released names |
//! | `dequantise` | E4M3, MXFP4 and NVFP4 weights |
//! | `error` | [`CheckpointError`] |

mod catalogue;
mod checkpoint;
mod config;
mod dequantise;
mod error;
mod files;
mod mapped;
mod names;

pub use checkpoint::{Checkpoint, Nvfp4Parts};
pub use config::{CompressRope, Config, Experts, HyperConnections, Routing};
pub use error::CheckpointError;
pub use kv_layout::config::{ConfigError, ModelConfig};
