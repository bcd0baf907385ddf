//! The options of `dsv4-kv reuse`.

use std::path::PathBuf;

use bytesize::ByteSize;
use clap::Args;
use dsv4_kv_trace::MAX_REQUESTS;

use crate::options::{integer, size};
use crate::outcome::{Exit, after_help};

/// Examples for `--help`: the purpose of each, and the command.
const EXAMPLES: [(&str, &str); 1] = [(
    "hits of a trace in two pools, with host memory behind them",
    "cargo kv reuse --trace trace.jsonl --pool 64GiB --pool 140GiB --host-cache 512GiB",
)];

/// Exit codes.
const EXITS: [Exit; 3] = [
    (0, "simulated"),
    (1, "the result could not be written"),
    (2, "an option, a file or a model was refused"),
];

/// Simulates prefix reuse on a trace: how many prompt tokens are cache hits, by checkpoint placement, eviction
/// order and memory.
///
/// The prompts go through the cache's prefix tree one after the other: each is matched, inserted and released, then
/// blocks and checkpoints are evicted until the tree fits the pool, which they share. Running requests take no room
/// in it, and transfers to and from host memory take no time. Token ids are made from the trace's hash_ids.
#[derive(Args, Debug)]
#[command(after_help = after_help(&EXAMPLES, &EXITS))]
pub struct ReuseArgs {
    /// Trace in Mooncake format with hash_ids. At most 1 MiB a line and 1000000 requests.
    #[arg(long, value_name = "FILE")]
    pub trace: PathBuf,

    /// flash, pro, tiny, or the path of a model's config.json.
    #[arg(long, value_name = "NAME|FILE", default_value = "flash")]
    pub model: String,

    /// Memory for blocks and checkpoints, as in 64GiB; at most 1PiB. Several are compared.
    #[arg(long, value_name = "SIZE", value_parser = size, default_values = ["16GiB", "64GiB", "140GiB", "1PiB"])]
    pub pool: Vec<ByteSize>,

    /// Host memory behind each pool, as in 512GiB, at most 1PiB: checkpoints go there with their blocks when they are
    /// taken, and come back when a prompt needs them.
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "0B")]
    pub host_cache: ByteSize,

    /// Tokens between the checkpoints of an interval: a multiple of 128.
    #[arg(long, value_name = "TOKENS", default_value_t = 2048, value_parser = blocks)]
    pub interval: u32,

    /// Only the first requests of the trace.
    #[arg(long, value_name = "N", value_parser = integer(1..=MAX_REQUESTS))]
    pub requests: Option<u32>,

    /// Print the result as JSON.
    #[arg(long)]
    pub json: bool,
}

/// Parses a number of tokens that is a multiple of the block size.
fn blocks(text: &str) -> Result<u32, String> {
    match text.parse::<u32>() {
        Ok(tokens) if tokens > 0 && tokens % 128 == 0 => Ok(tokens),
        _ => Err("it must be a multiple of 128, and not 0".to_owned()),
    }
}
