//! The result of `inspect`: one value, printed as a map or as JSON.

use std::fmt;

use comfy_table::{CellAlignment, Table, presets};
use dsv4_kv::kv_layout::geometry::BLOCK_TOKENS;
use schemars::JsonSchema;
use serde::Serialize;

use super::rows::Row;

/// What the cache holds of a request.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The model.
    pub model: String,
    /// Steps until then.
    pub steps: u64,
    /// The request's place in the load.
    pub request: usize,
    /// Its slot.
    pub slot: u32,
    /// Its tokens.
    pub tokens: u32,
    /// Its block table.
    pub blocks: Vec<Block>,
    /// Its rings.
    pub rings: Vec<Ring>,
    /// What the whole cache has.
    pub kept: Kept,
    /// Rows, decoded.
    pub rows: Vec<Row>,
}

/// A block of a request.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Block {
    /// Its first token in the request.
    pub first_token: u32,
    /// Its number in the pool.
    pub block: u32,
    /// Whether the request alone has it; else it is the prefix tree's, or of several.
    pub is_own: bool,
    /// Requests that run and have it too, by their place in the load.
    pub shared_with: Vec<usize>,
}

/// Rings of one kind.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Ring {
    /// What they hold.
    pub what: String,
    /// Layers that have one.
    pub layers: Vec<u32>,
    /// Rows of a slot.
    pub rows: u32,
    /// Bytes of a row.
    pub row_bytes: u64,
    /// Positions of its rows, first and end; none of rings whose rows are sums. A draft layer may have no rows of
    /// reused tokens.
    pub positions: Option<(u32, u32)>,
    /// The row that the next token takes.
    pub next_row: Option<u32>,
}

/// What the whole cache has.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Kept {
    /// Blocks of the prefix tree.
    pub blocks: u32,
    /// Blocks of the prefix tree that no request uses.
    pub evictable_blocks: u32,
    /// Checkpoints of the prefix tree.
    pub checkpoints: u32,
    /// Blocks that are free.
    pub free_blocks: u32,
    /// Blocks there are.
    pub total_blocks: u32,
}

impl Report {
    fn block_lines(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Block { first_token, block, is_own, shared_with } in &self.blocks {
            let end = (first_token + BLOCK_TOKENS).min(self.tokens);
            write!(f, "  tokens {first_token:>6}..{end:<6} block {block:<6} ")?;
            let others: Vec<_> = shared_with.iter().map(usize::to_string).collect();
            match (is_own, others.is_empty()) {
                (true, _) => writeln!(f, "own")?,
                (false, true) => writeln!(f, "prefix tree")?,
                (false, false) => {
                    writeln!(f, "prefix tree, also of request {}", others.join(", "))?
                }
            }
        }
        Ok(())
    }

    fn ring_lines(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for ring in &self.rings {
            let layers: Vec<_> = ring.layers.iter().map(u32::to_string).collect();
            write!(
                f,
                "  {:<26} {} rows of {} bytes, layers {}",
                ring.what,
                ring.rows,
                ring.row_bytes,
                layers.join(", ")
            )?;
            if let (Some((first, end)), Some(next)) = (ring.positions, ring.next_row) {
                write!(f, "; tokens {first}..{end}, the next takes row {next}")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

/// Writes the errors by group, and the first channels.
fn row_lines(row: &Row, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    if !row.exists {
        let why = "a draft layer may have none of a token that the request reused";
        return writeln!(f, "{}: there is no such row, as {why}", row.what);
    }
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN);
    table.set_header(["channels", "largest", "largest error", "relative rms"]);
    for group in &row.groups {
        table.add_row([
            format!("{}..{}", group.first, group.first + group.channels),
            format!("{:.4}", group.largest),
            format!("{:.5}", group.largest_error),
            format!("{:.5}", group.relative_rms),
        ]);
    }
    table.column_iter_mut().for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    writeln!(f, "{}: {} bytes\n{table}", row.what, row.bytes)?;
    for channel in &row.channels {
        let (read, from) = (channel.read, channel.from);
        writeln!(
            f,
            "  channel {}: byte {:#04x} is read as {read:.5}, was {from:.5}, error {:+.5}",
            channel.channel,
            channel.byte,
            read - from
        )?;
    }
    Ok(())
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, steps, request, slot, tokens, kept, .. } = self;
        writeln!(
            f,
            "{model}, after {steps} steps: request {request} has slot {slot} and {tokens} tokens\n"
        )?;
        writeln!(f, "block table")?;
        self.block_lines(f)?;
        writeln!(f, "\nrings: a token's row is its position modulo the rows")?;
        self.ring_lines(f)?;
        let Kept { blocks, evictable_blocks, checkpoints, free_blocks, total_blocks } = kept;
        writeln!(
            f,
            "\nprefix tree: {blocks} blocks, {evictable_blocks} of them used by nobody, {checkpoints} checkpoints; \
             {free_blocks} of {total_blocks} blocks are free"
        )?;
        for row in &self.rows {
            writeln!(f)?;
            row_lines(row, f)?;
        }
        Ok(())
    }
}
