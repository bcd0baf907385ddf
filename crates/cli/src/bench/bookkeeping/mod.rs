//! `bench bookkeeping`: the host's cost of a step. A device that does nothing replaces the GPU, so that all times are
//! those of this library's own work, on one core of any machine.

mod copies;
mod inputs;
mod launches;
#[cfg(test)]
mod no_allocation;
mod row;
mod samples;
mod setup;
#[cfg(test)]
mod shared_steps;
mod steps;

use std::fmt;
use std::fs;
use std::time::SystemTime;

use anyhow::Result;
use comfy_table::Table;
use schemars::JsonSchema;
use serde::Serialize;

use crate::output;
use row::Row;

/// What was measured where.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The processor.
    processor: String,
    /// When it was measured: UTC, as in `2026-01-31T12:00:00Z`.
    date: String,
    /// The parts.
    rows: Vec<Row>,
}

/// Measures all parts and prints them.
///
/// # Errors
/// If a step was refused, or the result cannot be written.
pub(super) fn run(json: bool) -> Result<()> {
    let rows = [steps::measure()?, launches::measure()?, copies::measure()?].concat();
    let date = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    let report = Report { processor: processor(), date, rows };
    if json {
        output::print(serde_json::to_string_pretty(&report)?)?;
    } else {
        output::print(report)?;
    }
    Ok(())
}

/// The processor's name, as Linux reports it.
fn processor() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = info.lines().find_map(|line| line.strip_prefix("model name"));
    let name = line.and_then(|line| line.split_once(": ")).map(|(_, name)| name.trim());
    name.unwrap_or("unknown processor").to_owned()
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_preset(comfy_table::presets::ASCII_MARKDOWN);
        table.set_header(["host work", "of", "p50 us", "p99 us"]);
        for row in &self.rows {
            let [p50, p99] = [row.p50_us, row.p99_us].map(|time| format!("{time:.3}"));
            table.add_row([row.what.clone(), row.size.clone(), p50, p99]);
        }
        write!(f, "{}, one core, {}, device calls left out\n{table}", self.processor, self.date)
    }
}
