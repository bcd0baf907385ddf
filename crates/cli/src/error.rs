//! Refusals that the user can put right; they end the program with exit code 2.

use std::path::PathBuf;

use bytesize::ByteSize;
use dsv4_kv::KvError;
use dsv4_kv::device::DeviceError;
use dsv4_kv::kv_layout::config::{ConfigError, ModelConfig};

use dsv4_kv_cli::trace::TraceError;

/// What is wrong with the input.
#[derive(Debug, thiserror::Error)]
pub enum InputError {
    /// A trace that cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// Neither a preset nor a file.
    #[error(
        "unknown model `{name}`: give one of {}, or the path of a config.json",
        ModelConfig::PRESETS.join(", ")
    )]
    UnknownModel {
        /// What was asked for.
        name: String,
    },
    /// A model file that cannot be opened.
    #[error("{}: {source}", path.display())]
    ModelFile {
        /// The file.
        path: PathBuf,
        /// Why it cannot be read.
        source: std::io::Error,
    },
    /// A model file of another kind of model.
    #[error("{}: {source}", path.display())]
    ModelConfig {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: ConfigError,
    },
    /// `--device cuda` on a machine without.
    #[error("--device cuda: {0}")]
    NoCuda(#[source] DeviceError),
    /// The replay's own buffers take all the memory.
    #[error("{memory} of memory do not hold the replay's own buffers of {working}")]
    NoRoomToWork {
        /// The memory there is.
        memory: ByteSize,
        /// What the replay needs beside the cache.
        working: ByteSize,
    },
    /// The indexer cannot be made as asked.
    #[error("indexer: {0}")]
    Indexer(#[source] KvError),
    /// The cache cannot be made as asked.
    #[error("model {model} with {memory} of memory, {left} of it for the cache: {source}")]
    Cache {
        /// The model.
        model: String,
        /// The memory there is.
        memory: ByteSize,
        /// Memory left for the cache.
        left: ByteSize,
        /// The cache's refusal.
        source: KvError,
    },
    /// Verification without anything to verify.
    #[error("--verify needs --execute full: bookkeeping stores no rows")]
    NothingToVerify,
    /// A report that cannot be written.
    #[error("{}: {source}", path.display())]
    Report {
        /// The file.
        path: PathBuf,
        /// Why it cannot be written.
        source: std::io::Error,
    },
}
