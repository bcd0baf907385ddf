//! The options of `dsv4-kv soak`.

use std::path::PathBuf;

use bytesize::ByteSize;
use clap::Args;
use dsv4_kv::CacheConfig;
use dsv4_kv_trace::MAX_REQUESTS;

use crate::options::{integer, number, seed, size};
use crate::outcome::{Exit, after_help};

/// Examples for `--help`: the purpose of each, and the command.
const EXAMPLES: [(&str, &str); 2] = [
    (
        "the synthetic load once, disturbed, in pools of three sizes",
        "cargo kv soak --requests 200 --rounds 1",
    ),
    ("a trace, a hundred times", "cargo kv soak --trace trace.jsonl --rounds 100"),
];

/// Exit codes.
const EXITS: [Exit; 4] = [
    (0, "nothing was lost, and the cache matched the reference model"),
    (
        1,
        "something was lost, the process has grown, the cache did not match the reference model, or no request ran; or the result could not be written",
    ),
    (2, "an option, a file or a model was refused, or the cache does not fit"),
    (
        130,
        "SIGINT (Ctrl-C) ended it early; the result is of what has run until then. A second SIGINT ends it at once",
    ),
];

/// Runs a load through the allocator, the planner and the prefix tree for a long time, in a pool that is too small,
/// while requests are aborted, forked, suspended and preempted, and checks that nothing is lost.
///
/// For each --fill the load is replayed --rounds times through one cache, in which running requests may hold that
/// part of all blocks. Checked are, after each round, that every block, checkpoint and slot is free or the prefix
/// tree's; that the process has not grown in the second half of the rounds; and, after each operation, that the cache
/// has reused and holds as much as a model of it that shares no code with it. No device is used.
#[derive(Args, Debug)]
#[command(after_help = after_help(&EXAMPLES, &EXITS))]
pub struct SoakArgs {
    /// Trace in Mooncake format, with hash_ids in every line. [default: the synthetic load of `replay`]
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,

    /// flash, pro, tiny, or the path of a model's config.json.
    #[arg(long, value_name = "NAME|FILE", default_value = "flash")]
    pub model: String,

    /// Memory of the cache, as in 16GiB, at most 1PiB; a third of what slots leave is for checkpoints.
    #[arg(long, value_name = "SIZE", default_value = "16GiB", value_parser = size)]
    pub gpu_mem: ByteSize,

    /// Requests of a round, 1 to 1000000: the first of the trace, or as many synthetic ones.
    /// [default: the whole trace, or 2048 synthetic ones]
    #[arg(long, value_name = "N", value_parser = integer(1..=MAX_REQUESTS))]
    pub requests: Option<u32>,

    /// Rounds, 1 to 1000.
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = integer(1..=1000))]
    pub rounds: u32,

    /// Speed-up of the arrivals, 0.000001 to 1000000.
    #[arg(long, value_name = "X", default_value_t = 10.0, value_parser = number(1e-6..=1e6))]
    pub time_scale: f64,

    /// Percent of the blocks that requests may hold at their full length, 1 to 100, one run each.
    #[arg(long, value_name = "PERCENT", value_delimiter = ',', default_values_t = [80, 95, 100], value_parser = integer(1..=100))]
    pub fill: Vec<u32>,

    /// Percent of the requests that end early, at a random position, 0 to 100.
    #[arg(long, value_name = "PERCENT", default_value_t = 1.0, value_parser = number(0.0..=100.0))]
    pub aborts: f64,

    /// Percent of the requests of which a copy begins, 0 to 100.
    #[arg(long, value_name = "PERCENT", default_value_t = 1.0, value_parser = number(0.0..=100.0))]
    pub forks: f64,

    /// Percent of the requests that give their slot up for up to 64 steps, 0 to 100; as many lose all that they have
    /// and are computed again.
    #[arg(long, value_name = "PERCENT", default_value_t = 1.0, value_parser = number(0.0..=100.0))]
    pub preemptions: f64,

    /// Request slots, 1 to 65535.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = integer(1..=CacheConfig::MAX_REQUESTS))]
    pub max_requests: u32,

    /// Maximum number of tokens of a step, 1 to 1048576.
    #[arg(long, value_name = "TOKENS", default_value_t = 8192, value_parser = integer(1..=1 << 20))]
    pub max_step_tokens: u32,

    /// Seed of the synthetic load, and of what happens to which request, 0 to 2^64 - 1.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = seed)]
    pub seed: u64,

    /// Print the result as JSON instead of a table.
    #[arg(long)]
    pub json: bool,
}
