//! Errors of reading a model's files.

use std::path::PathBuf;

use kv_layout::config::ConfigError;
use safetensors::{Dtype, SafeTensorError};

/// Why a model's files were refused, or a tensor in them.
#[derive(Debug, thiserror::Error)]
pub enum ModelFileError {
    /// A file cannot be opened or read.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// `config.json` or `generation_config.json` is refused.
    #[error("{}: {source}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// Why.
        source: ConfigError,
    },
    /// A text file that is implausibly large.
    #[error("{} has more than {most} bytes", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Most bytes that are read.
        most: u64,
    },
    /// The directory has neither `model.safetensors` nor `model.safetensors.index.json`.
    #[error(
        "{} has neither model.safetensors nor model.safetensors.index.json; weights in other formats are \
         not read",
        path.display()
    )]
    NoWeights {
        /// The directory.
        path: PathBuf,
    },
    /// The index is invalid, or does not list the `model.safetensors` that is beside it.
    #[error("{}: {reason}", path.display())]
    Index {
        /// The index.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The index names a file that is not in the model's directory.
    #[error("{}: {shard:?} is not the name of a file beside it", path.display())]
    OutsideDirectory {
        /// The index.
        path: PathBuf,
        /// The name that the index gives.
        shard: String,
    },
    /// The index names a file that does not exist.
    #[error("{} names {shard:?}, which is not there: the download is not complete", path.display())]
    NoShard {
        /// The index.
        path: PathBuf,
        /// The file.
        shard: String,
    },
    /// The index says that a shard has a tensor, but neither the shard nor another one has it.
    #[error(
        "{} has no tensor {tensor:?}, although the index says so, nor has another shard: download the shard and the index again, or correct the index",
        path.display()
    )]
    NotInShard {
        /// The shard.
        path: PathBuf,
        /// The tensor, as the index names it.
        tensor: String,
    },
    /// A file is truncated, or not in the safetensors format.
    #[error("{} is truncated or no safetensors file: {source}", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The error of the reader.
        source: SafeTensorError,
    },
    /// A file is shorter or longer than its header says.
    #[error("{} has {found} bytes; its header says {expected}: it is truncated or damaged", path.display())]
    Length {
        /// The file.
        path: PathBuf,
        /// Its length in bytes.
        found: u64,
        /// The length that its header says.
        expected: u128,
    },
    /// The model has a tensor twice.
    #[error("{name} is there twice: as {first:?} and as {second:?}")]
    Duplicate {
        /// The released name of both.
        name: String,
        /// The first one's name in its file, and the file.
        first: String,
        /// The second one's name in its file, and the file.
        second: String,
    },
    /// No tensor has this name.
    #[error("the model has no tensor {name}")]
    Missing {
        /// The released name.
        name: String,
    },
    /// Tensors that are not read, although they are no part of a draft and no note about activations.
    #[error(
        "{name} has no place in the model that config.json describes ({count} such so far): correct config.json, or \
         write the weights without them"
    )]
    Unused {
        /// The released name of the first, in order of names.
        name: String,
        /// How many were found so far: layers that were not read by then are not among them.
        count: usize,
    },
    /// A tensor has another shape than expected.
    #[error("{name} has the shape {found:?}; it should have {expected:?}")]
    Shape {
        /// The tensor.
        name: String,
        /// Its shape.
        found: Vec<u64>,
        /// The requested shape, or for scales the one that their weight needs.
        expected: Vec<u64>,
    },
    /// A tensor has another type than expected.
    #[error("{name} holds {found:?}; it should hold {expected}")]
    Type {
        /// The tensor.
        name: String,
        /// Its type.
        found: Dtype,
        /// Types that it may have.
        expected: &'static str,
    },
    /// A weight is NaN or infinite.
    #[error(
        "{name}[{index}] is {value}: no model can be computed with it; the file is damaged, or was written so"
    )]
    NotFinite {
        /// The tensor.
        name: String,
        /// The element, counted through the whole tensor.
        index: usize,
        /// Its value.
        value: f32,
    },
    /// A value cannot be represented in the requested type without rounding.
    #[error("{name}[{index}] is {value:e}, which {to} cannot hold; ask for it as f32")]
    WouldRound {
        /// The tensor.
        name: String,
        /// The element, counted through the whole tensor.
        index: usize,
        /// Its value.
        value: f64,
        /// The requested type.
        to: &'static str,
    },
    /// A scale is not finite; or is that of an E4M3 block, and not above 0; or is a divisor without a finite inverse.
    #[error(
        "{name}[{index}] is no usable scale: a scale must be finite, that of an E4M3 block also above 0, and a \
         divisor must have a finite inverse; the file is damaged, or was written so"
    )]
    BadScale {
        /// The tensor of scales.
        name: String,
        /// The element.
        index: usize,
    },
}
