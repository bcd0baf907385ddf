//! The result of `reuse`: one value, printed as a table or as JSON.

use std::fmt;

use bytesize::ByteSize;
use comfy_table::{CellAlignment, Table, presets};
use dsv4_kv_prefix::ReuseStats;
use serde::Serialize;

/// What was simulated.
#[derive(Debug, Serialize)]
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
#[derive(Debug, Serialize)]
pub struct Row {
    /// Bytes of the pool.
    pool: u64,
    /// Placement and order.
    case: &'static str,
    /// Prompts.
    prompts: u64,
    /// Tokens of all prompts.
    prompt_tokens: u64,
    /// Of those, reused.
    reused: u64,
    /// Behind the last checkpoint of what matched.
    no_checkpoint: u64,
    /// Evicted, as far as that is remembered.
    evicted: u64,
    /// Never there, or behind the last boundary of their prompt.
    new: u64,
    /// Evicted blocks.
    evicted_blocks: u64,
}

impl Row {
    /// The result of one simulation.
    pub fn new(case: &'static str, pool: u64, stats: ReuseStats) -> Self {
        let ReuseStats { prompts, prompt_tokens, reused, no_checkpoint, .. } = stats;
        let ReuseStats { evicted, evicted_blocks, diverged, partial, other_root, .. } = stats;
        let new = diverged + partial + other_root;
        Self {
            pool,
            case,
            prompts,
            prompt_tokens,
            reused,
            no_checkpoint,
            evicted,
            new,
            evicted_blocks,
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
                ByteSize(row.pool).to_string(),
                row.case.to_owned(),
                share(row.reused),
                share(row.no_checkpoint),
                share(row.evicted),
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
