//! Refused input, which the user can correct: exit code 2.

use std::path::PathBuf;

use bytesize::ByteSize;
use dsv4_kv::KvError;
use dsv4_kv::device::DeviceError;
use dsv4_kv::kv_layout::config::{ConfigError, ModelConfig};

use dsv4_kv_trace::{TooLong, TraceError};

/// Why an input is refused.
#[derive(Debug, thiserror::Error)]
pub enum InputError {
    /// A trace that cannot be read.
    #[error("--trace {0}")]
    Trace(#[from] TraceError),
    /// A request of a soak of which nothing is known but its lengths.
    #[error(
        "--trace {}: request {request} has no hash_ids, which say what prompts have in common; a soak needs them in every line",
        path.display()
    )]
    NoHashIds {
        /// The trace.
        path: PathBuf,
        /// Its place in the load, from 1.
        request: usize,
    },
    /// A request that `--shrink` makes too long.
    #[error("--shrink: request {request} of the load: {source}")]
    Shrink {
        /// Its place in the load, from 1.
        request: usize,
        /// Its lengths.
        source: TooLong,
    },
    /// The value of `--model` is neither a preset nor a file.
    #[error(
        "--model: unknown model `{name}`: give one of {}, or the path of a config.json",
        ModelConfig::PRESETS.join(", ")
    )]
    UnknownModel {
        /// The value of the option.
        name: String,
    },
    /// A model file that cannot be opened.
    #[error("--model {}: {source}; give a model's config.json", path.display())]
    ModelFile {
        /// The file.
        path: PathBuf,
        /// Why it cannot be read.
        source: std::io::Error,
    },
    /// A model file that is not a `config.json`.
    #[error("--model {}: it has more than {limit} bytes; give a model's config.json", path.display())]
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
        /// Why it is refused.
        source: ConfigError,
    },
    /// A measurement without a GPU.
    #[error(
        "bench measures a GPU: {0}; without one there are `bench bookkeeping` and `bench --from FILE`"
    )]
    NothingToMeasure(#[source] DeviceError),
    /// `--device cuda` on a machine without a usable GPU.
    #[error("--device cuda: {0}")]
    NoCuda(#[source] DeviceError),
    /// The buffers of the replay take all the memory.
    #[error("{memory} of memory do not hold the replay's own buffers of {working}")]
    NoRoomToWork {
        /// The available memory.
        memory: ByteSize,
        /// Memory that the replay needs besides the cache.
        working: ByteSize,
    },
    /// The indexer's workspace cannot be created with these options.
    #[error("indexer: {0}")]
    Indexer(#[source] KvError),
    /// The cache cannot be created with these options.
    #[error("model {model} with {memory} of memory, {left} of it for the cache: {source}")]
    Cache {
        /// The model.
        model: String,
        /// The available memory.
        memory: ByteSize,
        /// Memory left for the cache.
        left: ByteSize,
        /// The error of the cache.
        source: KvError,
    },
    /// Verification in a mode without rows.
    #[error("--verify needs --execute full: bookkeeping stores no rows")]
    NothingToVerify,
    /// Attention in a mode without rows.
    #[error("--attend needs --execute full: bookkeeping stores no rows")]
    NothingToAttend,
    /// A host tier in a mode without a device whose prefixes it could keep.
    #[error("--host-cache needs --execute full: bookkeeping has no memory to copy")]
    NothingToCopy,
    /// Transfers of payloads in a mode that moves none.
    #[error("--payloads device needs --execute full: in bookkeeping no bytes move")]
    NothingMoves,
    /// Memory for the bytes of requests in a mode that moves none.
    #[error("--arrival-memory needs --execute full: in bookkeeping no bytes move")]
    NothingArrives,
    /// A GPU in a mode that runs no kernels.
    #[error("--device cuda needs --execute full: bookkeeping runs no kernels")]
    NothingRuns,
    /// Memory of the indexer in a mode that runs none.
    #[error("--indexer-memory needs --execute full: bookkeeping runs no indexer")]
    NothingToScore,
    /// A cluster setting of attention in a replay without attention.
    #[error("--attention-cluster needs --attend: without attention no thread blocks share keys")]
    ClusterWithoutAttention,
    /// A program that was built without support for several processes.
    #[cfg(not(feature = "peers"))]
    #[error(
        "this program is built without --peers: run `cargo kv replay --peers N`, or build it with the feature `peers`"
    )]
    NoPeers,
    /// A request that is not in the load.
    #[error("--request {request}: the load has {requests} requests, counted from 0")]
    NoSuchRequest {
        /// The value of the option.
        request: usize,
        /// Number of requests in the load.
        requests: usize,
    },
    /// A request that is longer than the cache.
    #[error(
        "--request {request}: it needs {tokens} tokens in the cache, which holds {most} of a request; choose another, or raise --shrink"
    )]
    NeverFits {
        /// The value of the option.
        request: usize,
        /// Tokens of the request.
        tokens: u32,
        /// Most tokens of a request.
        most: u32,
    },
    /// A load without a request that `inspect` can show.
    #[error(
        "the load has no request to show: each generates a single token, or is longer than the cache; choose another --trace, --requests or --seed, or raise --shrink"
    )]
    NothingToInspect,
    /// A request that ends as soon as its prompt is computed.
    #[error(
        "--request {request}: it is gone when its prompt is computed; choose one with more than one token of its own"
    )]
    EndedAtOnce {
        /// The value of the option.
        request: usize,
    },
    /// A layer that the model does not have.
    #[error("--layer {layer}: the model has {layers} layers, counted from 0")]
    NoSuchLayer {
        /// The value of the option.
        layer: u32,
        /// Number of layers of the model.
        layers: usize,
    },
    /// A token whose row is no longer in the window, or not yet.
    #[error("--position {position}: the window has the rows of tokens {first} to {last}")]
    NotInWindow {
        /// The value of the option.
        position: u32,
        /// The first token of the window.
        first: u32,
        /// The last token.
        last: u32,
    },
    /// An option of `bench` that its suite does not read.
    #[error("--{option} is of `bench {}`: `bench {suite}` would ignore it", suites.join("`, `bench "))]
    OtherSuite {
        /// The option.
        option: String,
        /// The suites that read it.
        suites: Vec<String>,
        /// The suite to measure.
        suite: String,
    },
    /// `--report` for a suite that has no report.
    #[error("--report: `bench bookkeeping` has no page; use --json")]
    NoReportOfBookkeeping,
    /// A file that is not a result of `bench`.
    #[error("--from {}: {reason}; give a file that `bench --json` has written", path.display())]
    BenchResult {
        /// The file.
        path: PathBuf,
        /// Why it is refused.
        reason: String,
    },
    /// A model that cannot be read.
    #[cfg(feature = "generate")]
    #[error("--model: {0}; give a folder with config.json and safetensors files")]
    Model(#[source] dsv4_kv_model::ModelError),
    /// A text prompt without a tokenizer.
    #[cfg(feature = "generate")]
    #[error("--prompt: {0}")]
    Text(String),
    /// An address on which the server cannot listen.
    #[cfg(feature = "serve")]
    #[error("--listen {address}: {source}; give an address and a port, as in 127.0.0.1:8000")]
    Listen {
        /// The value of the option.
        address: String,
        /// The error of the system.
        source: std::io::Error,
    },
    /// A host tier for a cache without checkpoints.
    #[error(
        "--host-cache {size} needs --checkpoints of at least 1: a prefix is kept up to a checkpoint"
    )]
    HostWithoutCheckpoints {
        /// The value of the option.
        size: ByteSize,
    },
    /// A host tier for a load without prompts that could share prefixes.
    #[error(
        "--host-cache {size} needs prompts that share prefixes, but no line of --trace has hash_ids; leave it out, or give --checkpoints"
    )]
    HostWithoutPrefixes {
        /// The value of the option.
        size: ByteSize,
    },
    /// A cold tier without a host tier.
    #[cfg(feature = "serve")]
    #[error("--cold-cache needs --host-cache: prefixes are stored from host memory")]
    ColdWithoutHost,
    /// A cluster setting of attention that runs on the host.
    #[cfg(feature = "generate")]
    #[error(
        "--attention-cluster needs attention on the device, but it runs on the host: give --attention device"
    )]
    ClusterOnHost,
    /// Graphs for steps that are longer than the longest step of the cache.
    #[cfg(feature = "serve")]
    #[error(
        "--graphs needs --max-step-tokens of at least {needed}, --draft + 1: a graph serves a step of a completion"
    )]
    GraphsWithoutTokens {
        /// Fewest tokens of a step.
        needed: u32,
    },
    /// A model that cannot run with these options.
    #[cfg(feature = "generate")]
    #[error("{0}")]
    Engine(#[source] dsv4_kv_model::ModelError),
    /// A server that cannot run with these options.
    #[cfg(feature = "serve")]
    #[error("serve: {0}")]
    Serve(String),
    /// A command that was left out of this build.
    #[cfg(not(feature = "serve"))]
    #[error(
        "this program was built without `{command}`: run `cargo kv {command}`, or build it with \
         `cargo build --release --package dsv4-kv-cli --features {command}`"
    )]
    NotBuiltIn {
        /// The command; the feature has the same name.
        command: &'static str,
    },
    /// An option of draws for a request whose tokens are not drawn.
    #[cfg(feature = "generate")]
    #[error("--{option} needs --temperature above 0: at 0 the most likely token is taken")]
    NothingToDraw {
        /// The option.
        option: &'static str,
    },
    /// A prompt without tokens.
    #[cfg(feature = "generate")]
    #[error("the prompt is empty; a request needs a token to begin with")]
    EmptyPrompt,
    /// A file that does not contain token ids.
    #[cfg(feature = "generate")]
    #[error("--prompt-tokens {}: {reason}", path.display())]
    PromptTokens {
        /// The file.
        path: PathBuf,
        /// Why it is refused.
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
    /// A file to write that is also read.
    #[error("{output} {}: this is the file of {input}, which it would replace; give another one", path.display())]
    OutputIsInput {
        /// The option that names the file to write.
        output: &'static str,
        /// The file.
        path: PathBuf,
        /// The option that names the file to read.
        input: &'static str,
    },
    /// A choice of cases of `bench attention` without a case.
    #[error("--only {only}: no case contains it; a case is called, for example, `{example}`")]
    NoSuchCase {
        /// The value of the option.
        only: String,
        /// The name of a case.
        example: String,
    },
    /// A report file that cannot be opened.
    #[error("--report {}: {source}", path.display())]
    Report {
        /// The file.
        path: PathBuf,
        /// Why it cannot be opened.
        source: std::io::Error,
    },
}
