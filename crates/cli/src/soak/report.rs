//! The result of `soak`: one value, printed as a table or as JSON.

use std::fmt;

use comfy_table::{CellAlignment, Table, presets};
use schemars::JsonSchema;
use serde::Serialize;

use super::disturb::Done;

/// All runs.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The model.
    pub model: String,
    /// Blocks of the cache.
    pub blocks: u32,
    /// Checkpoints of the cache.
    pub checkpoints: u32,
    /// Requests of a round.
    pub requests: u64,
    /// One for each share of the blocks that requests may hold.
    pub runs: Vec<Row>,
}

/// One run.
#[derive(Debug, Default, Serialize, JsonSchema)]
pub struct Row {
    /// Percent of the blocks that requests may hold.
    pub fill: u32,
    /// Rounds that were run.
    pub rounds: u32,
    /// Whether SIGINT ended it early.
    pub interrupted: bool,
    /// Requests that ran to their end, copies included.
    pub finished: u64,
    /// Requests that can never fit: they are longer than the cache, or than the blocks that requests may hold.
    pub rejected: u64,
    /// What happened to requests.
    #[serde(flatten)]
    pub done: Done,
    /// Requests that were preempted because no blocks were left.
    pub starved: u64,
    /// Requests that were admitted, again if they were preempted.
    pub admissions: u64,
    /// Tokens of their prompts.
    pub prompt_tokens: u64,
    /// Those of them that were reused.
    pub reused: u64,
    /// Those of them that the model reused.
    pub expected: u64,
    /// How far the two are apart, as percent of the model's.
    pub off_percent: f64,
    /// Admissions that reused other tokens than in the model.
    pub differing: u64,
    /// Blocks that were evicted.
    pub evicted_blocks: u64,
    /// Checkpoints that were evicted.
    pub evicted_checkpoints: u64,
    /// Memory of the process after each round; empty where the system does not tell.
    pub resident_bytes: Vec<u64>,
    /// How much it has grown since half of the rounds, in percent; none after one round.
    pub drift_percent: Option<f64>,
    /// Real time, in seconds.
    pub wall_s: f64,
    /// What was wrong, in words.
    pub faults: Vec<String>,
}

impl Row {
    fn values(&self) -> [(&'static str, String); 17] {
        let Done { aborted, forked, suspended, preempted } = self.done;
        let drift = self.drift_percent.map_or("unknown".into(), |drift| format!("{drift:+.2} %"));
        [
            ("requests may hold", format!("{} % of the blocks", self.fill)),
            ("rounds", self.rounds.to_string()),
            ("finished", self.finished.to_string()),
            ("rejected", self.rejected.to_string()),
            ("aborted", aborted.to_string()),
            ("forked", forked.to_string()),
            ("suspended", suspended.to_string()),
            ("preempted", preempted.to_string()),
            ("out of blocks", self.starved.to_string()),
            ("prompt tokens", self.prompt_tokens.to_string()),
            ("reused", self.reused.to_string()),
            ("in the model", format!("{} ({:.4} % off)", self.expected, self.off_percent)),
            ("admissions", format!("{} ({} differ)", self.admissions, self.differing)),
            (
                "evicted",
                format!("{} blocks, {} checkpoints", self.evicted_blocks, self.evicted_checkpoints),
            ),
            ("memory", format!("{drift} in the second half")),
            ("wall time", format!("{:.1} s", self.wall_s)),
            ("faults", self.faults.len().to_string()),
        ]
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, blocks, checkpoints, requests, runs } = self;
        writeln!(f, "{model}: {blocks} blocks, {checkpoints} checkpoints, {requests} requests\n")?;
        let mut table = Table::new();
        table.load_preset(presets::ASCII_MARKDOWN);
        let columns: Vec<_> = runs.iter().map(Row::values).collect();
        let names = Row::default().values().map(|(name, _)| name);
        for (line, name) in names.into_iter().enumerate() {
            let values = columns.iter().map(|values| values[line].1.clone());
            let cells = std::iter::once(name.to_owned()).chain(values).collect::<Vec<_>>();
            if line == 0 {
                table.set_header(cells)
            } else {
                table.add_row(cells)
            };
        }
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        write!(f, "{table}")?;
        for row in runs {
            row.faults.iter().try_for_each(|fault| write!(f, "\n{} %: {fault}", row.fill))?;
        }
        Ok(())
    }
}
