//! The result of `bench`: one value, printed as tables or as JSON.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::timing::{self, Measurement};
use super::{attention, checkpoints, prefill, step, tier};

/// What was measured where.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
pub struct Report {
    /// The GPU.
    pub device: String,
    /// When it was measured: UTC, as in `2026-01-31T12:00:00Z`.
    pub date: String,
    /// The command's cases.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub measurements: Vec<Measurement>,
    /// Attention in place.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attention: Vec<attention::Row>,
    /// Whole steps.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<step::Row>,
    /// Chunks of prompts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prefill: Vec<prefill::Row>,
    /// Chunks of prompts without checkpoints and with them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub checkpoints: Vec<checkpoints::Row>,
    /// Prefixes that went to host memory and came back.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tier: Vec<tier::Row>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}, ", self.device, self.date)?;
        if !self.steps.is_empty() {
            return write!(f, "graph replay, caches flushed\n{}", step::table(&self.steps));
        }
        if !self.prefill.is_empty() {
            let (table, summary) = (prefill::table(&self.prefill), prefill::summary(&self.prefill));
            writeln!(f, "a chunk in one layer\n{table}\n")?;
            return write!(f, "nanoseconds a token, all layers of the model\n{summary}");
        }
        if !self.checkpoints.is_empty() {
            let table = checkpoints::table(&self.checkpoints);
            return write!(f, "a chunk in all layers, graph replay, caches flushed\n{table}");
        }
        if !self.tier.is_empty() {
            let table = tier::table(&self.tier);
            return write!(f, "medians: transfers by the host's clock, steps by events\n{table}");
        }
        write!(f, "graph replay over rotated buffers")?;
        if !self.measurements.is_empty() {
            write!(f, "\n{}", timing::table(&self.measurements))?;
        }
        if !self.attention.is_empty() {
            write!(f, "\n{}", attention::table(&self.attention))?;
        }
        Ok(())
    }
}
