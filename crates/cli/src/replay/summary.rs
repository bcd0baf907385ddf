//! The result of a replay: one value, printed as a table or as JSON.

use std::time::Duration;

use comfy_table::{CellAlignment, Table, presets};
use schemars::JsonSchema;
use serde::Serialize;

use super::drive::Replayed;
use super::moves::Moves;
use super::reuse::Reuse;
use super::service::Service;
use super::setup::Setup;
use super::timeline::percentile;

/// The result of a replay.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Summary {
    /// Name of the model.
    pub model: String,
    /// Where the kernels ran.
    pub device: String,
    /// Whether SIGINT ended the replay before its load did: what follows is of the steps until then.
    pub interrupted: bool,
    /// Requests of the load.
    pub requests: u64,
    /// Requests that ran to their end.
    pub finished: u64,
    /// Requests that waited: for a slot, for blocks, or for tokens of a step.
    pub waited_admissions: u64,
    /// Requests that an empty cache does not hold.
    pub rejected: u64,
    /// Tokens written to the cache.
    pub tokens: u64,
    /// Those of them that are of prompts, or that were computed again after a request was preempted.
    pub prefill_tokens: u64,
    /// Tokens of prompts that were not computed, but reused.
    pub reused_tokens: u64,
    /// How often a request was preempted because blocks had run out.
    pub preempted: u64,
    /// What was reused, and why not more; none in a cache without checkpoints.
    pub reuse: Option<Reuse>,
    /// Requests that moved to other processes; none without `--peers`.
    pub moves: Option<Moves>,
    /// Compressed entries written to the cache, over all layers; 0 in bookkeeping.
    pub entries: u64,
    /// Steps.
    pub steps: u64,
    /// Throughput, waits, and what limited them.
    pub service: Service,
    /// Largest number of blocks that requests used at once.
    pub peak_blocks: u32,
    /// Blocks there are.
    pub blocks: u32,
    /// Largest number of request slots in use at once.
    pub peak_slots: u32,
    /// Slots there are.
    pub slots: u32,
    /// Median time of `begin_step`, in microseconds.
    pub prepare_us_p50: f32,
    /// The time of `begin_step` that one call in a hundred exceeds.
    pub prepare_us_p99: f32,
    /// Time of the steps' kernels, in milliseconds; none in bookkeeping.
    pub kernel_ms: Option<f64>,
    /// Virtual time of the replay, in seconds.
    pub virtual_s: f64,
    /// Real time of the replay, in seconds.
    pub wall_s: f64,
    /// Requests whose rows were all compared with the reference.
    pub verified_requests: u64,
    /// Rows of rings, gathered tiles and blocks that were compared.
    pub verified_rows: u64,
    /// Tokens that they reused, all of whose rows were compared.
    pub verified_reused: u64,
    /// Entries and indexer keys that were recomputed from their tokens.
    pub verified_entries: u64,
    /// Lists of the indexer that were compared, one of each verified request and step.
    pub verified_lists: u64,
    /// Those of them whose scores were recomputed, as the query sees more than `index_topk` entries.
    pub scored_lists: u64,
    /// Those of them that differ from the reference's, in entries whose scores are equal within f32
    /// rounding.
    pub near_lists: u64,
    /// Results of attention that were recomputed in f64: of heads of queries.
    pub verified_attended: u64,
    /// Rows, lengths, lists and results of attention that were not as expected.
    pub mismatches: u64,
    /// The first of them, in words.
    pub mismatch_examples: Vec<String>,
}

impl Summary {
    /// The result of the replay of `setup` on `device`, which took `wall`.
    pub fn new(setup: &Setup, device: String, replayed: &Replayed, wall: Duration) -> Self {
        let (config, timeline) = (&setup.config, &replayed.timeline);
        let (largest, prepare) = (timeline.largest(), timeline.sorted_times());
        let verification = &replayed.work.verification;
        let moves = replayed.work.moved.as_ref().map(|moved| moved.moves.clone());
        let elsewhere = moves.as_ref().map_or(0, |moves| moves.tokens);
        Self {
            model: config.model.name.clone(),
            device,
            interrupted: replayed.interrupted,
            requests: setup.load.len() as u64,
            finished: replayed.finished,
            waited_admissions: replayed.waited,
            rejected: replayed.rejected,
            tokens: timeline.prefill() + timeline.decode() + elsewhere,
            prefill_tokens: timeline.prefill(),
            reused_tokens: replayed.reuse.reused,
            preempted: replayed.preempted,
            reuse: (config.num_checkpoints > 0).then(|| {
                let tier = (config.host_bytes > 0).then_some(replayed.work.tier);
                let stats = (&replayed.reuse, replayed.too_long);
                Reuse::new(stats, config.num_checkpoints, &largest, tier)
            }),
            moves,
            entries: replayed.work.entries,
            steps: timeline.steps(),
            service: Service::new(replayed, setup.limits(), setup.balanced_slots),
            peak_blocks: largest.blocks,
            blocks: config.num_blocks,
            peak_slots: largest.requests,
            slots: config.max_requests,
            prepare_us_p50: percentile(&prepare, 50),
            prepare_us_p99: percentile(&prepare, 99),
            kernel_ms: replayed.work.kernel_ms,
            virtual_s: largest.at_ms / 1e3,
            wall_s: wall.as_secs_f64(),
            verified_requests: verification.requests,
            verified_rows: verification.rows,
            verified_reused: verification.reused,
            verified_entries: verification.entries,
            verified_lists: verification.lists,
            scored_lists: verification.scored,
            near_lists: verification.near,
            verified_attended: verification.attended,
            mismatches: verification.mismatches,
            mismatch_examples: verification.examples.clone(),
        }
    }

    /// Why a replay that was not interrupted has shown nothing, with `to_verify` requests to verify: no request ran, or
    /// none was verified. `None` if it has shown something.
    pub fn nothing_shown(&self, to_verify: usize) -> Option<String> {
        match (self.interrupted, self.finished, self.verified_requests) {
            (true, ..) => None,
            (false, 0, _) => Some(format!("no request ran, and {} were rejected", self.rejected)),
            (false, _, 0) if to_verify > 0 => {
                Some(format!("none of the {to_verify} requests to verify ended"))
            }
            (false, ..) => None,
        }
    }

    /// The rows of the table: name and value.
    pub fn rows(&self) -> Vec<(&'static str, String)> {
        let kernel = self.kernel_ms.map_or("none ran".into(), |ms| format!("{ms:.1} ms"));
        let mut rows = vec![
            ("model", self.model.clone()),
            ("device", self.device.clone()),
            ("requests", format!("{} ({} finished)", self.requests, self.finished)),
            (
                "waited",
                format!(
                    "{} requests, for a slot, blocks or tokens of a step",
                    self.waited_admissions
                ),
            ),
            ("rejected", format!("{} requests, longer than the cache holds", self.rejected)),
            ("tokens", format!("{} ({} prefill)", self.tokens, self.prefill_tokens)),
            ("reused", format!("{} tokens of prompts", self.reused_tokens)),
            ("preempted", format!("{} requests, as no blocks were left", self.preempted)),
            ("entries written", self.entries.to_string()),
            ("steps", self.steps.to_string()),
            ("peak blocks", format!("{} of {}", self.peak_blocks, self.blocks)),
            ("peak slots", format!("{} of {}", self.peak_slots, self.slots)),
            ("begin_step p50", format!("{:.1} us", self.prepare_us_p50)),
            ("begin_step p99", format!("{:.1} us", self.prepare_us_p99)),
            ("kernel time", kernel),
            ("virtual time", format!("{:.1} s", self.virtual_s)),
            ("wall time", format!("{:.1} s", self.wall_s)),
            (
                "verified",
                format!(
                    "{} requests, {} rows, {} reused tokens",
                    self.verified_requests, self.verified_rows, self.verified_reused
                ),
            ),
            ("", format!("{} entries and indexer keys", self.verified_entries)),
            (
                "",
                format!(
                    "{} top-k lists, {} by recomputed scores, {} within f32 rounding",
                    self.verified_lists, self.scored_lists, self.near_lists
                ),
            ),
            ("mismatches", self.mismatches.to_string()),
        ];
        let place = rows.iter().position(|(what, _)| *what == "steps").map_or(0, |at| at + 1);
        rows.splice(place..place, self.service.rows());
        if let Some(moves) = &self.moves {
            let place = rows.iter().position(|(what, _)| *what == "first token");
            let place = place.map_or(rows.len(), |at| at + 1);
            rows.splice(place..place, moves.rows());
        }
        if self.verified_attended > 0 {
            let attended = format!("{} heads' attention, in f64", self.verified_attended);
            rows.insert(rows.len() - 1, ("", attended));
        }
        if let Some(reuse) = &self.reuse {
            let place = rows.iter().position(|(what, _)| *what == "reused").map_or(0, |at| at + 1);
            rows.splice(place..place, reuse.rows());
        }
        if self.interrupted {
            rows.push(("interrupted", format!("after {} steps, the rest was not run", self.steps)));
        }
        rows
    }

    /// The result as a table.
    pub fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_preset(presets::NOTHING);
        for (what, value) in self.rows() {
            table.add_row([what, &value]);
        }
        if let Some(values) = table.column_mut(1) {
            values.set_cell_alignment(CellAlignment::Left);
        }
        table
    }
}
