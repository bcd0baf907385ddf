//! The options of `dsv4-kv replay`.

use std::path::PathBuf;

use bytesize::ByteSize;
use clap::{Args, ValueEnum};
use dsv4_kv::CacheConfig;

use crate::device::DeviceChoice;

/// Replays a load of requests through the cache: continuous batching, chunked prefill.
///
/// Every step allocates for its requests and runs the cache's kernels of every layer on synthetic
/// KV rows and projections: windows are gathered, compressors write entries and indexer keys, the
/// new rows go to the window, and compressed entries are gathered: in a CSA layer the `index_topk`
/// that its indexer picks, in an HCA layer all that a query sees. On a GPU every query gathers
/// entries, on the CPU the last 16 of each request in the step.
///
/// The cache is made for the longest request of the load.
///
/// Time is virtual: a step takes `--step-ms`, or longer if it has more tokens than `--token-rate`
/// allows.
#[derive(Args, Debug)]
pub struct ReplayArgs {
    /// Mooncake-format JSONL: timestamp (ms), input_length, output_length, hash_ids.
    /// [default: a synthetic conversation-like load]
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,

    /// flash, pro, tiny, or the path of a checkpoint's config.json.
    /// [default: tiny on the CPU, else flash]
    #[arg(long, value_name = "NAME|FILE")]
    pub model: Option<String>,

    /// Where the kernels run.
    #[arg(long, value_enum, default_value_t = DeviceChoice::Auto)]
    pub device: DeviceChoice,

    /// Memory of the cache and the replay's buffers, as in 64GiB.
    /// [default: 90 % of what is free on a GPU, 8 GiB on the CPU, 64 GiB for bookkeeping]
    #[arg(long, value_name = "SIZE")]
    pub gpu_mem: Option<ByteSize>,

    /// Requests to replay: the first of the trace, or as many synthetic ones.
    /// [default: the whole trace; 128 synthetic ones, 1024 for bookkeeping, 16 on the CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub requests: Option<u32>,

    /// Requests arrive this many times faster.
    #[arg(long, value_name = "X", default_value_t = 1.0, value_parser = positive)]
    pub time_scale: f64,

    /// Lengths and times between arrivals are divided by this.
    /// [default: 64 for the synthetic load on the CPU, else 1]
    #[arg(long, value_name = "X", value_parser = positive)]
    pub shrink: Option<f64>,

    /// Run the kernels, or the allocator and planner alone.
    #[arg(long, value_enum, default_value_t = Execution::Full)]
    pub execute: Execution,

    /// Requests, sampled at random, that are compared with the reference: window rows, entries and
    /// indexer keys, recomputed from their tokens, and, of one query a step, what it gathers in every
    /// layer and, in one, the list that the indexer picks.
    /// [default: 4; 0 for bookkeeping]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=64))]
    pub verify: Option<u32>,

    /// Memory of the indexer's workspace; a chunk of queries that does not fit is taken in parts.
    #[arg(long, value_name = "SIZE", default_value_t = ByteSize::mib(16))]
    pub indexer_memory: ByteSize,

    /// Requests that run at once.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=i64::from(CacheConfig::MAX_REQUESTS)))]
    pub max_requests: u32,

    /// Most tokens of a step.
    /// [default: 8192, 256 on the CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub token_budget: Option<u32>,

    /// Least virtual time of a step, in milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 33.0, value_parser = positive)]
    pub step_ms: f64,

    /// Most tokens in a second of virtual time.
    #[arg(long, value_name = "N", default_value_t = 8192.0, value_parser = positive)]
    pub token_rate: f64,

    /// Seed of the synthetic load, of the cache's input and of the sample.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,

    /// Print the result as JSON and nothing else.
    #[arg(long)]
    pub json: bool,

    /// Write an HTML page with plots of occupancy and batch over time.
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
}

/// What a step does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Execution {
    /// Allocates, plans, and runs the kernels of every layer.
    Full,
    /// Allocates and plans; there is no device.
    Bookkeeping,
}

/// A number above zero.
fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value.is_finite() => Ok(value),
        Ok(_) => Err("it must be a finite number above 0".into()),
        Err(error) => Err(error.to_string()),
    }
}
