//! The options of `dsv4-kv serve`.

use std::path::PathBuf;

use bytesize::ByteSize;
use clap::Args;
use dsv4_kv::CacheConfig;

use crate::device::DeviceChoice;
use crate::generate::AttentionArgs;
use crate::options::{integer, number, size};
use crate::outcome::{Exit, after_help};

/// Examples for `--help`: the purpose of each, and the command.
const EXAMPLES: [(&str, &str); 1] = [(
    "a tiny model of random weights",
    "cargo kv serve --model tests/e2e/hash --listen 127.0.0.1:8000",
)];

/// Exit codes.
const EXITS: [Exit; 5] = [
    (0, "SIGINT or SIGTERM has ended it, with all that it had taken"),
    (1, "the device failed"),
    (2, "an option, the model or the address was refused, or the cache does not fit"),
    (130, "a signal has ended it before all was done; or a second SIGINT, at once"),
    (143, "a second SIGTERM has ended it at once"),
];

/// Serves a model over HTTP, as OpenAI's /v1/completions.
///
/// Also /v1/models, /health and /metrics; docs/serving.md describes all of it. SIGINT and SIGTERM end the server
/// once the requests that it has taken are done; a second one ends it at once.
#[derive(Args, Debug)]
#[command(after_help = after_help(&EXAMPLES, &EXITS))]
pub struct ServeArgs {
    /// The model: a folder with config.json and safetensors files, and tokenizer.json unless its vocabulary
    /// has 256 tokens, which are bytes then.
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,

    /// Where to listen. Whoever reaches it may use it: there are no keys.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8000")]
    pub listen: String,

    /// The model's name for clients [default: the name of its folder]
    #[arg(long, value_name = "NAME")]
    pub model_name: Option<String>,

    /// Where the kernels run.
    #[arg(long, value_enum, default_value_t = DeviceChoice::Auto)]
    pub device: DeviceChoice,

    /// Completions in the cache at once; more wait.
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = integer(1..=CacheConfig::MAX_REQUESTS))]
    pub max_requests: u32,

    /// Most tokens of a completion, prompt included [default: 8192, or what the model can]
    #[arg(long, value_name = "TOKENS", value_parser = integer(1..=1 << 20))]
    pub context: Option<u32>,

    /// Capacity of the KV cache in tokens, over all completions; if they need more, some are preempted and computed
    /// again later [default: a quarter of --max-requests times --context, at least --context]
    #[arg(long, value_name = "N", value_parser = integer(1..=1 << 31))]
    pub max_total_tokens: Option<u32>,

    /// Checkpoints for prefix sharing: saved states from which later completions with the same first tokens and cache_salt
    /// continue; completions are the same with and without.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = integer(0..=1 << 23))]
    pub checkpoints: u32,

    /// Pinned host memory for prefixes that do not fit on the device, as in 16GiB; needs --checkpoints.
    #[arg(long, value_name = "SIZE", default_value = "0B", value_parser = size)]
    pub host_cache: ByteSize,

    /// Where prefixes that came to host memory are stored, for this server and for later ones with the same model,
    /// build, device, kind of processor, --attention and --attention-cluster: a directory, or the URL of a store; needs
    /// --host-cache.
    #[arg(long, value_name = "URL")]
    pub cold_cache: Option<String>,

    /// How long a completion waits for the cold cache at most; then its prompt is computed. Needs --cold-cache.
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0, value_parser = number(0.0..=86400.0), requires = "cold_cache")]
    pub cold_timeout: f64,

    /// Maximum number of tokens of a step, over all completions; at least --max-requests.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = integer(1..=1 << 20))]
    pub max_step_tokens: u32,

    /// Most tokens of one prompt in a step.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = integer(1..=1 << 20))]
    pub chunk: u32,

    /// Tokens that prompt lookup proposes and one step verifies; completions are the same with and without.
    #[arg(long, value_name = "K", default_value_t = 0, value_parser = integer(0..=31))]
    pub draft: u32,

    /// Completions that may wait; a request gets 429 while they leave too little room for it, and 400 if it asks for more
    /// than N completions.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = integer(1..=1 << 20))]
    pub max_waiting: u32,

    /// Largest body of a request; more gets 413.
    #[arg(long, value_name = "SIZE", default_value = "8MiB", value_parser = size)]
    pub max_body: ByteSize,

    /// Send a comment in a stream after so long without an event, for proxies that close idle connections; 0: never.
    /// Several clients fail on it, vLLM's and SGLang's benchmarks among them.
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0, value_parser = number(0.0..=86400.0))]
    pub sse_keep_alive: f64,

    /// How long completions may take to their end when the server shuts down.
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, value_parser = number(0.0..=86400.0))]
    pub shutdown_timeout: f64,

    /// Replay each layer's launches as a graph while decoding.
    #[arg(long)]
    pub graphs: bool,

    #[command(flatten)]
    pub attention: AttentionArgs,
}
