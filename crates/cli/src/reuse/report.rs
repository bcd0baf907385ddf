//! The result of `reuse`: one value, printed as a table or as JSON.

use std::fmt;

use bytesize::ByteSize;
use comfy_table::{CellAlignment, Table, presets};
use dsv4_kv_prefix::ReuseStats;
use schemars::JsonSchema;
use serde::Serialize;

use super::simulate::{Simulated, Sizes};

/// What was simulated.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The model.
    pub model: String,
    /// Bytes of a block in all layers.
    pub block_bytes: u64,
    /// Bytes of a checkpoint.
    pub checkpoint_bytes: u64,
    /// One per pool and case.
    pub rows: Vec<Row>,
}

/// One placement and order in one pool.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Row {
    /// Bytes of the pool.
    pool: u64,
    /// Bytes of host memory behind it.
    host_cache: u64,
    /// Placement and order.
    case: &'static str,
    /// Prompts.
    prompts: u64,
    /// Tokens of all prompts.
    prompt_tokens: u64,
    /// Of those, reused.
    reused: u64,
    /// Of those, had come back from host memory.
    from_host: u64,
    /// Behind the last checkpoint of what matched.
    no_checkpoint: u64,
    /// Evicted, as far as that is remembered.
    missed_by_eviction: u64,
    /// Never there, or behind the last boundary of their prompt.
    new: u64,
    /// Evicted blocks of the pool.
    evicted_blocks: u64,
    /// Bytes that went to host memory.
    bytes_to_host: u64,
    /// Bytes that came from there.
    bytes_from_host: u64,
}

impl Row {
    /// The result of one simulation.
    pub fn new(case: &'static str, sizes: Sizes, simulated: Simulated) -> Self {
        let Simulated { stats, from_host, traffic: [bytes_to_host, bytes_from_host] } = simulated;
        let ReuseStats { prompts, prompt_tokens, reused, no_checkpoint, .. } = stats;
        let ReuseStats { missed_by_eviction, evicted_blocks, never_seen, tail, other_root, .. } =
            stats;
        Self {
            pool: sizes.pool,
            host_cache: sizes.host,
            case,
            prompts,
            prompt_tokens,
            reused,
            from_host,
            no_checkpoint,
            missed_by_eviction,
            new: never_seen + tail + other_root,
            evicted_blocks,
            bytes_to_host,
            bytes_from_host,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_preset(presets::ASCII_MARKDOWN);
        table.set_header([
            "pool",
            "checkpoints, eviction",
            "reused",
            "from host",
            "no checkpoint",
            "evicted",
            "new",
        ]);
        for column in table.column_iter_mut().skip(2) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        for row in &self.rows {
            let share = |tokens: u64| format!("{:.4}", tokens as f64 / row.prompt_tokens as f64);
            table.add_row([
                match row.host_cache {
                    0 => ByteSize(row.pool).to_string(),
                    host => format!("{} + {}", ByteSize(row.pool), ByteSize(host)),
                },
                row.case.to_owned(),
                share(row.reused),
                share(row.from_host),
                share(row.no_checkpoint),
                share(row.missed_by_eviction),
                share(row.new),
            ]);
        }
        let Self { model, block_bytes, checkpoint_bytes, rows } = self;
        let first = rows.first();
        let (prompts, tokens) = first.map_or((0, 0), |row| (row.prompts, row.prompt_tokens));
        writeln!(f, "{model}: blocks of {block_bytes} bytes, checkpoints of {checkpoint_bytes}")?;
        writeln!(f, "{prompts} prompts of {tokens} tokens; shares of those tokens:\n")?;
        write!(f, "{table}")
    }
}
