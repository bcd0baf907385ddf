//! The options of `dsv4-kv replay`.

use std::path::PathBuf;

use bytesize::ByteSize;
use clap::{Args, ValueEnum};
use dsv4_kv::CacheConfig;
use dsv4_kv_trace::MAX_REQUESTS;

use crate::device::DeviceChoice;
use crate::options::{ClusterChoice, integer, number, seed, size};
use crate::outcome::{Exit, after_help};

/// Examples of `--help`: what each is for, and the command.
const EXAMPLES: [(&str, &str); 3] = [
    (
        "a small load on a GPU if there is one, else on the CPU, compared with the reference",
        "cargo kv replay",
    ),
    (
        "a trace through the allocator and the planner alone, and a page with plots",
        "cargo kv replay --execute bookkeeping --trace trace.jsonl --report out.html",
    ),
    (
        "the synthetic load with twice the arrivals",
        "cargo kv replay --execute bookkeeping --time-scale 2",
    ),
];

/// How it ends.
const EXITS: [Exit; 4] = [
    (0, "the load is done, and nothing was wrong"),
    (
        1,
        "a mismatch was found, no request ran or none was verified, a step or the device failed, or a result could not be written",
    ),
    (2, "an option, a file or a model was refused, or the cache does not fit"),
    (
        130,
        "SIGINT (Ctrl-C) ended it early; the result is of the steps until then. A second SIGINT ends it at once, without a result",
    ),
];

/// The default of `--indexer-memory`.
pub const INDEXER_MEMORY: ByteSize = ByteSize::mib(16);
/// The default of `--arrival-memory`.
pub const ARRIVAL_MEMORY: ByteSize = ByteSize::gib(1);

/// Replays a load of requests through the cache: continuous batching, chunked prefill.
///
/// Every step allocates blocks for its requests and runs the cache's kernels of every layer on
/// random KV rows and projections: windows are gathered, compressors write entries and indexer keys,
/// the new rows go to the window, and compressed entries are gathered: in a CSA layer the
/// `index_topk` that its indexer picks, in an HCA layer all that a query sees. On a GPU every query
/// gathers entries, on the CPU the last 16 of each request in the step.
///
/// The cache is made for the longest request of the load, or for the model's longest context if that
/// is shorter; requests that can never fit are counted as rejected.
///
/// Prompts reuse what earlier ones with the same first tokens have computed: token ids are made from a trace's
/// hash_ids, each of which stands for 512 tokens (divided by --shrink), and prompts are admitted with them.
/// Checkpoints are placed and evicted as the cache does by itself, but for those of outputs, which no other prompt of
/// a load has. A request is preempted, and computed again, if blocks run out.
///
/// Time is virtual: a step takes `--step-ms`, or longer if it has more tokens than `--token-rate`
/// allows.
///
/// Ctrl-C ends the replay after the running step: table, JSON and report are of the steps until then.
/// A second one ends the program at once.
#[derive(Args, Debug)]
#[command(after_help = after_help(&EXAMPLES, &EXITS))]
pub struct ReplayArgs {
    /// Trace in Mooncake format, one JSON object a line: timestamp (ms), input_length, output_length
    /// (tokens), hash_ids. At most 1 MiB a line and 1000000 requests.
    /// [default: a synthetic conversation-like load]
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,

    /// flash, pro, tiny, or the path of a model's config.json.
    /// [default: tiny on the CPU, else flash]
    #[arg(long, value_name = "NAME|FILE")]
    pub model: Option<String>,

    /// Where the kernels run.
    #[arg(long, value_enum, default_value_t = DeviceChoice::Auto)]
    pub device: DeviceChoice,

    /// Memory of the cache and of the replay's own buffers, as in 64GiB; at most 1PiB.
    /// [default: 90 % of what is free on a GPU, 8 GiB on the CPU, 64 GiB for bookkeeping]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub gpu_mem: Option<ByteSize>,

    /// Requests to replay, 1 to 1000000: the first of the trace, or as many synthetic ones.
    /// [default: the whole trace; of the synthetic load 32 on a GPU, 12 on the CPU, 1024 for bookkeeping]
    #[arg(long, value_name = "N", value_parser = integer(1..=MAX_REQUESTS))]
    pub requests: Option<u32>,

    /// Speed-up of the arrivals, 0.000001 to 1000000.
    #[arg(long, value_name = "X", default_value_t = 1.0, value_parser = number(1e-6..=1e6))]
    pub time_scale: f64,

    /// Divisor of lengths and of times between arrivals, 0.001 to 1000000.
    /// [default: for the synthetic load 4 on a GPU and 128 on the CPU; else 1]
    #[arg(long, value_name = "X", value_parser = number(1e-3..=1e6))]
    pub shrink: Option<f64>,

    /// Run the kernels, or the block allocator and the step planner alone.
    #[arg(long, value_enum, default_value_t = Execution::Full)]
    pub execute: Execution,

    /// Requests, sampled at random from those that fit, that are compared with the reference, 0 to 64. Window rows,
    /// entries and indexer keys are recomputed from their tokens, reused tokens included. Of one query a step, what it
    /// gathers is compared in every layer, and the list that the indexer picks in one. [default: 2 on a GPU, 4 on the
    /// CPU, 0 for bookkeeping]
    #[arg(long, value_name = "N", value_parser = integer(0..=64))]
    pub verify: Option<u32>,

    /// Also run attention in place for the queries that gather entries, with as many heads as the model has and
    /// random values. Of each request to verify, two heads of one query a step are recomputed in f64, in a layer of
    /// each kind. Slow on the emulator. Needs --execute full. [default: true on a GPU, else false]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub attend: Option<bool>,

    /// With --attend: how many thread blocks share the keys of one query (64 heads).
    #[arg(long, value_enum, default_value_t = ClusterChoice::TwoBlocks)]
    pub attention_cluster: ClusterChoice,

    /// Memory of the indexer's workspace, as in 16MiB, at most 1PiB; queries that do not fit into it
    /// at once are scored in several batches.
    #[arg(long, value_name = "SIZE", default_value = "16MiB", value_parser = size)]
    pub indexer_memory: ByteSize,

    /// Share no prefixes: every prompt is computed in full.
    #[arg(long, conflicts_with = "checkpoints")]
    pub no_reuse: bool,

    /// Checkpoints that prompts go on from, 0 to 8388608; 0 as --no-reuse.
    /// [default: as many as a third of what slots leave of the memory holds; 0 for a trace without hash_ids]
    #[arg(long, value_name = "N", value_parser = integer(0..=CacheConfig::MAX_CHECKPOINTS))]
    pub checkpoints: Option<u32>,

    /// Pinned host memory that keeps what the device evicts, as in 64GiB, at most 1PiB. A request waits for what
    /// comes back from there. Needs --execute full.
    #[arg(long, value_name = "SIZE", value_parser = size, conflicts_with = "no_reuse")]
    pub host_cache: Option<ByteSize>,

    /// Processes, 2 to 16: one computes prompts (prefill), the others answers (decode), and requests move between
    /// them: by NIXL if the program is built with it and DSV4_NIXL names its library, else through files in memory.
    /// GPUs are dealt to the processes in turn; those on one GPU share its memory.
    #[arg(long, value_name = "N", value_parser = integer(2..=16))]
    pub peers: Option<u32>,

    /// Which memory holds the bytes of moving requests: the host's or the device's. NIXL reads device memory of
    /// GPUs; files read that of the emulated device. Needs --execute full.
    #[arg(long, value_enum, value_name = "WHERE", default_value_t = Payloads::Host, requires = "peers")]
    pub payloads: Payloads,

    /// Memory of each process for requests that have arrived and are not admitted yet, as in 4GiB, at most 1PiB.
    /// Others wait until there is room. A request that needs more than all of it ends the replay. Needs --execute full.
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = size, requires = "peers")]
    pub arrival_memory: ByteSize,

    /// Which of these processes this is.
    #[arg(long, value_name = "N", hide = true)]
    pub peer: Option<u32>,

    /// Bytes for the cache of this process: as many as the first one has.
    #[arg(long, value_name = "BYTES", hide = true, requires = "peer")]
    pub peer_memory: Option<u64>,

    /// Request slots, 1 to 65535: how many requests run at once.
    /// [default: as many as let the most requests of the load's mean length fit]
    #[arg(long, value_name = "N", value_parser = integer(1..=CacheConfig::MAX_REQUESTS))]
    pub max_requests: Option<u32>,

    /// Maximum number of tokens of a step, 1 to 1048576.
    /// [default: 8192, 256 on the CPU]
    #[arg(long, value_name = "TOKENS", value_parser = integer(1..=1 << 20))]
    pub max_step_tokens: Option<u32>,

    /// Minimum virtual time of a step, in milliseconds, 0.001 to 3600000.
    #[arg(long, value_name = "MS", default_value_t = 33.0, value_parser = number(1e-3..=3.6e6))]
    pub step_ms: f64,

    /// Maximum throughput, in tokens per second of virtual time, 0.001 to 1000000000000.
    #[arg(long, value_name = "TOKENS", default_value_t = 8192.0, value_parser = number(1e-3..=1e12))]
    pub token_rate: f64,

    /// Seed of the synthetic load, of the cache's input and of the sample to verify, 0 to 2^64 - 1.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = seed)]
    pub seed: u64,

    /// Print the result as JSON instead of a table.
    #[arg(long)]
    pub json: bool,

    /// Write an HTML page with plots of queueing, time to first token, time per token, occupancy, batch, planning time,
    /// hit ratio, tokens saved and evictions; the file is opened before the replay begins.
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
}

/// Where the bytes of requests lie that move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Payloads {
    /// In memory of the host.
    Host,
    /// In memory of the device of their cache.
    Device,
}

/// What a step does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Execution {
    /// Allocator, planner, and the kernels of every layer.
    Full,
    /// Allocator and planner; no device is used.
    Bookkeeping,
}

#[cfg(test)]
impl ReplayArgs {
    /// The arguments of a command line, `replay` included.
    pub fn of_line(line: &str) -> Self {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            args: ReplayArgs,
        }

        <Line as clap::Parser>::parse_from(line.split(' ')).args
    }
}
