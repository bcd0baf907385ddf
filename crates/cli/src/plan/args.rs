//! The options of `dsv4-kv plan`.

use bytesize::ByteSize;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use dsv4_kv::CacheConfig;
use dsv4_kv::kv_layout::index_row::IndexFormat;
use dsv4_kv::kv_layout::main_row::MainFormat;

use crate::options::{integer, size};
use crate::outcome::{Exit, after_help};

/// Examples for `--help`: the purpose of each, and the command.
const EXAMPLES: [(&str, &str); 2] = [
    (
        "how many requests of 131072 tokens fit, four drafts each",
        "cargo kv plan --model pro --gpu-mem 180GiB --context 131072 --max-draft 4",
    ),
    ("the same for a program to read", "cargo kv plan --model flash --gpu-mem 64GiB --json"),
];

/// Exit codes.
const EXITS: [Exit; 3] = [
    (0, "planned"),
    (1, "the result could not be written"),
    (2, "an option, a file or a model was refused, or the cache does not fit"),
];

/// Plans a cache: what its slots, blocks and tokens cost, and how many requests fit at once.
///
/// Slots, blocks and checkpoints share the memory. Without `--max-requests` they are chosen so that the most
/// requests of `--context` tokens fit. The numbers are exact: as many requests are admitted, and the
/// next is refused.
#[derive(Args, Debug)]
#[command(after_help = after_help(&EXAMPLES, &EXITS))]
pub struct PlanArgs {
    /// flash, pro, tiny, or the path of a model's config.json.
    #[arg(long, value_name = "NAME|FILE")]
    pub model: String,

    /// Memory of the cache, as in 180GiB, at most 1PiB: what weights, activations and graphs leave of
    /// the GPU's.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub gpu_mem: ByteSize,

    /// Longest request, in tokens, 1 to the model's longest context: prompt, output, and drafts past
    /// its end if there are any. [default: the model's longest context]
    #[arg(long, value_name = "TOKENS", value_parser = integer(1..=1 << 20))]
    pub context: Option<u32>,

    /// Draft tokens a request that one step verifies and may reject, 0 to 127.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = integer(0..=127))]
    pub max_draft: u32,

    /// Format of window rows and compressed entries: E4M3 with one scale a group of 64 channels (ue8m0),
    /// or with one a row (f32).
    #[arg(long, value_name = "FORMAT", default_value = MainFormat::default().name(), value_parser = named(MainFormat::ALL.map(|format| (format.name(), format))))]
    pub main_format: MainFormat,

    /// Format of the indexer keys.
    #[arg(long, value_name = "FORMAT", default_value = IndexFormat::default().name(), value_parser = named(IndexFormat::ALL.map(|format| (format.name(), format))))]
    pub index_format: IndexFormat,

    /// Request slots, 1 to 65535: how many requests run at once. Blocks take the memory that is left.
    /// [default: as many as let most requests of --context tokens fit]
    #[arg(long, value_name = "N", value_parser = integer(1..=CacheConfig::MAX_REQUESTS))]
    pub max_requests: Option<u32>,

    /// Checkpoints, at most 8388608, by which requests share prefixes: each is the state that a request needs to go
    /// on at the end of a block. With 0 no prefix is shared. [default: as many as a third of what slots leave of
    /// the memory holds]
    #[arg(long, value_name = "N", value_parser = integer(0..=CacheConfig::MAX_CHECKPOINTS))]
    pub checkpoints: Option<u32>,

    /// Pinned host memory for prefixes that do not fit on the device, as in 512GiB; needs checkpoints. The buffers
    /// for the copies are taken from --gpu-mem.
    #[arg(long, value_name = "SIZE", default_value = "0B", value_parser = size)]
    pub host_cache: ByteSize,

    /// Requests that can be suspended at once, 0 to 65535: each takes the memory of a slot.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = integer(0..=CacheConfig::MAX_REQUESTS))]
    pub suspended: u32,

    /// Queries that the CSA layers' indexer scores at once, 1 to 65535; more are scored in several
    /// batches. Its workspace is taken from --gpu-mem.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = integer(1..=u32::from(u16::MAX)))]
    pub indexer_queries: u32,

    /// Print the result as JSON instead of tables.
    #[arg(long)]
    pub json: bool,
}

/// A parser of names, each of which stands for a value.
fn named<T, const N: usize>(values: [(&'static str, T); N]) -> impl TypedValueParser<Value = T>
where
    T: Copy + Send + Sync + 'static,
{
    PossibleValuesParser::new(values.map(|(name, _)| name)).try_map(move |text| {
        let found = values.iter().find(|(name, _)| *name == text);
        found.map(|&(_, value)| value).ok_or("not a name of the list")
    })
}
