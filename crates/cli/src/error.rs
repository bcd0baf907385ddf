//! Input that is refused, which the user can put right: exit code 2.

use std::path::PathBuf;

use bytesize::ByteSize;
use dsv4_kv::KvError;
use dsv4_kv::device::DeviceError;
use dsv4_kv::kv_layout::config::{ConfigError, ModelConfig};

use dsv4_kv_trace::{TooLong, TraceError};

/// What is wrong with the input.
#[derive(Debug, thiserror::Error)]
pub enum InputError {
    /// A trace that cannot be read.
    #[error("--trace {0}")]
    Trace(#[from] TraceError),
    /// A request that `--shrink` makes too long.
    #[error("--shrink: request {request} of the load: {source}")]
    Shrink {
        /// Its place in the load, counted from 1.
        request: usize,
        /// Its lengths.
        source: TooLong,
    },
    /// Neither a preset nor a file.
    #[error(
        "--model: unknown model `{name}`: give one of {}, or the path of a config.json",
        ModelConfig::PRESETS.join(", ")
    )]
    UnknownModel {
        /// What was asked for.
        name: String,
    },
    /// A model file that cannot be opened.
    #[error("--model {}: {source}; give a checkpoint's config.json", path.display())]
    ModelFile {
        /// The file.
        path: PathBuf,
        /// Why it cannot be read.
        source: std::io::Error,
    },
    /// A model file that is no `config.json`.
    #[error("--model {}: it has more than {limit} bytes; give a checkpoint's config.json", path.display())]
    ModelFileSize {
        /// The file.
        path: PathBuf,
        /// Most bytes that are read.
        limit: u64,
    },
    /// A model file of another kind of model.
    #[error("--model {}: {source}", path.display())]
    ModelConfig {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: ConfigError,
    },
    /// A measurement without a GPU.
    #[error(
        "bench measures a GPU: {0}; without one there are `bench bookkeeping` and `bench --from FILE`"
    )]
    NothingToMeasure(#[source] DeviceError),
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
    /// Attention without rows.
    #[error("--attend needs --execute full: bookkeeping stores no rows")]
    NothingToAttend,
    /// A host tier without a device whose memory it could hold.
    #[error("--host-cache needs --execute full: bookkeeping has no memory to copy")]
    NothingToCopy,
    /// Payloads on a device where there is none.
    #[error("--payloads device needs --execute full: in bookkeeping no bytes move")]
    NothingMoves,
    /// A program without the code for several processes.
    #[cfg(not(feature = "peers"))]
    #[error(
        "this program is built without --peers: run `cargo kv replay --peers N`, or build it with the feature `peers`"
    )]
    NoPeers,
    /// A request that the load has not.
    #[error("--request {request}: the load has {requests} requests, counted from 0")]
    NoSuchRequest {
        /// What was asked for.
        request: usize,
        /// Requests of the load.
        requests: usize,
    },
    /// A request that is over when its prompt is computed, or never fits.
    #[error(
        "--request {request}: it is gone when its prompt is computed; choose one with more than one token of its own"
    )]
    EndedAtOnce {
        /// What was asked for.
        request: usize,
    },
    /// A layer that the model has not.
    #[error("--layer {layer}: the model has {layers} layers, counted from 0")]
    NoSuchLayer {
        /// What was asked for.
        layer: u32,
        /// Layers of the model.
        layers: usize,
    },
    /// A token whose row is not in the window any more, or not yet.
    #[error("--position {position}: the window has the rows of tokens {first} to {last}")]
    NotInWindow {
        /// What was asked for.
        position: u32,
        /// The oldest token of the window.
        first: u32,
        /// The last token.
        last: u32,
    },
    /// A choice of cases, of a suite that has none to choose by their description.
    #[error("--only is of `bench attention`: other suites have no cases that it could choose")]
    OnlyOfAttention,
    /// A page of a suite that has none.
    #[error("--report: `bench bookkeeping` has no page; use --json")]
    NoReportOfBookkeeping,
    /// A file that is no result of `bench`.
    #[error("--from {}: {reason}; give a file that `bench --json` has written", path.display())]
    BenchResult {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A checkpoint that cannot be read.
    #[cfg(feature = "generate")]
    #[error("--checkpoint: {0}; give a folder with config.json and safetensors files")]
    Checkpoint(#[source] dsv4_kv_model::ModelError),
    /// Text without a tokenizer for it.
    #[cfg(feature = "generate")]
    #[error("--prompt: {0}")]
    Text(String),
    /// An address that cannot be had.
    #[cfg(feature = "serve")]
    #[error("--listen {address}: {source}; give an address and a port, as in 127.0.0.1:8000")]
    Listen {
        /// What was asked for.
        address: String,
        /// Why not.
        source: std::io::Error,
    },
    /// Host memory for prefixes in a cache without checkpoints.
    #[cfg(feature = "serve")]
    #[error(
        "--host-cache {size} needs --checkpoints of at least 1: a prefix is kept up to a checkpoint"
    )]
    HostWithoutCheckpoints {
        /// What was asked for.
        size: ByteSize,
    },
    /// A store behind host memory that there is none of.
    #[cfg(feature = "serve")]
    #[error("--cold-cache needs --host-cache: prefixes are stored from host memory")]
    ColdWithoutHost,
    /// Graphs of steps that are longer than any step.
    #[cfg(feature = "serve")]
    #[error(
        "--graphs needs --step-tokens of at least {needed}, --draft + 1: a graph serves a step of a completion"
    )]
    GraphsWithoutTokens {
        /// Least tokens of a step.
        needed: u32,
    },
    /// A server that cannot be as asked.
    #[cfg(feature = "serve")]
    #[error("serve: {0}")]
    Serve(String),
    /// A command that this program was built without.
    #[cfg(not(feature = "serve"))]
    #[error(
        "this program was built without `{command}`: run `cargo kv {command}`, or build it with \
         `cargo build --release --package dsv4-kv-cli --features {command}`"
    )]
    NotBuiltIn {
        /// The command; the feature is called as it is.
        command: &'static str,
    },
    /// A prompt without tokens.
    #[cfg(feature = "generate")]
    #[error("the prompt is empty; a request needs a token to begin with")]
    EmptyPrompt,
    /// A file that holds no token ids.
    #[cfg(feature = "generate")]
    #[error("--prompt-tokens {}: {reason}", path.display())]
    PromptTokens {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A file of logits that cannot be opened.
    #[cfg(feature = "generate")]
    #[error("--logits {}: {source}", path.display())]
    Logits {
        /// The file.
        path: PathBuf,
        /// Why it cannot be opened.
        source: std::io::Error,
    },
    /// A report that cannot be opened.
    #[error("--report {}: {source}", path.display())]
    Report {
        /// The file.
        path: PathBuf,
        /// Why it cannot be opened.
        source: std::io::Error,
    },
}
