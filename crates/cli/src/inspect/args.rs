//! The options of `dsv4-kv inspect`.

use std::path::PathBuf;

use bytesize::ByteSize;
use clap::Args;

use crate::device::DeviceChoice;
use crate::options::{ClusterChoice, integer, number, seed};
use crate::outcome::{Exit, after_help};
use crate::replay::args::{Execution, INDEXER_MEMORY, Payloads, ReplayArgs};

/// Memory of the cache: enough for the small load.
const MEMORY: ByteSize = ByteSize::mib(512);
/// Request slots.
const SLOTS: u32 = 8;
/// Most requests of the load.
const MAX_REQUESTS: u32 = 64;

/// Examples for `--help`: the purpose of each, and the command.
const EXAMPLES: [(&str, &str); 2] = [
    ("a request of a small load", "cargo kv inspect"),
    (
        "the first request, and its row of token 100 in layer 2",
        "cargo kv inspect --request 0 --layer 2 --position 100",
    ),
];

/// Exit codes.
const EXITS: [Exit; 3] = [
    (0, "shown"),
    (1, "a step failed, or the result could not be written"),
    (2, "an option, a file or a model was refused, or the cache does not fit"),
];

/// Shows what the cache holds of a request: its block table, its rings, which blocks it shares with which requests, and
/// a stored row beside what it was made from, with the error of quantisation.
///
/// A small synthetic load of the model `tiny` runs on the emulated device until the request's prompt is computed.
/// Then the device's memory is read. Values are random, as in `replay`.
#[derive(Args, Debug)]
#[command(after_help = after_help(&EXAMPLES, &EXITS))]
pub struct InspectArgs {
    /// Trace in Mooncake format. [default: a synthetic conversation-like load]
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,

    /// Requests of the load, 1 to 64.
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = integer(1..=MAX_REQUESTS))]
    requests: u32,

    /// Divisor of lengths and of times between arrivals, 0.001 to 1000000.
    #[arg(long, value_name = "X", default_value_t = 64.0, value_parser = number(1e-3..=1e6))]
    shrink: f64,

    /// Its place in the load, from 0. [default: the last one that fits and has more than one token of its own]
    #[arg(long, value_name = "N", value_parser = integer(0..=u32::MAX))]
    pub request: Option<u32>,

    /// The layer whose rows are shown. [default: the first CSA layer]
    #[arg(long, value_name = "N", value_parser = integer(0..=u32::MAX))]
    pub layer: Option<u32>,

    /// The token whose row is shown; one of the last 128. [default: the last one]
    #[arg(long, value_name = "N", value_parser = integer(0..=u32::MAX))]
    pub position: Option<u32>,

    /// Seed of the load and of the values.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = seed)]
    seed: u64,

    /// Print the result as JSON instead of a map.
    #[arg(long)]
    pub json: bool,
}

impl InspectArgs {
    /// The options of the replay that is inspected.
    pub fn replay(&self) -> ReplayArgs {
        ReplayArgs {
            trace: self.trace.clone(),
            model: None,
            device: DeviceChoice::Cpu,
            gpu_mem: Some(MEMORY),
            requests: Some(self.requests),
            time_scale: 1.0,
            shrink: Some(self.shrink),
            execute: Execution::Full,
            verify: Some(0),
            attend: Some(false),
            attention_cluster: ClusterChoice::TwoBlocks,
            indexer_memory: INDEXER_MEMORY,
            no_reuse: false,
            checkpoints: None,
            host_cache: None,
            peers: None,
            payloads: Payloads::Host,
            arrival_memory: ByteSize::gib(1),
            peer: None,
            peer_memory: None,
            max_requests: Some(SLOTS),
            max_step_tokens: None,
            step_ms: 33.0,
            token_rate: 8192.0,
            seed: self.seed,
            json: self.json,
            report: None,
        }
    }
}
