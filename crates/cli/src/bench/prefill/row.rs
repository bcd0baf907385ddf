//! The measurements of a chunk, and their tables.

use std::borrow::Cow;

use comfy_table::Table;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A kernel, for a chunk in one layer.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
pub struct Row {
    /// The model.
    pub model: String,
    /// The kernel, or what several do together.
    pub kernel: Cow<'static, str>,
    /// Tokens of the chunk.
    pub tokens: u32,
    /// Tokens of the request before it.
    pub past: u32,
    /// Microseconds of one layer.
    pub microseconds: f64,
    /// What bounds it.
    pub floor: String,
    /// Microseconds of that.
    pub floor_microseconds: f64,
    /// Layers of the model that have it; 0 for what only projections made by the caller need.
    pub layers: u32,
    /// Nanoseconds a token of all these layers.
    pub nanoseconds_per_token: f64,
}

fn new_table(head: Vec<String>) -> Table {
    let mut table = Table::new();
    table.load_preset(comfy_table::presets::ASCII_MARKDOWN);
    table.set_header(head);
    table
}

/// The rows as a table.
pub fn table(rows: &[Row]) -> Table {
    let head = ["model", "past", "tokens", "kernel", "us", "floor", "floor us", "of floor"];
    let head = head.into_iter().chain(["layers", "ns a token"]);
    let mut table = new_table(head.map(String::from).collect());
    for row in rows {
        table.add_row([
            row.model.clone(),
            row.past.to_string(),
            row.tokens.to_string(),
            row.kernel.to_string(),
            format!("{:.1}", row.microseconds),
            row.floor.clone(),
            format!("{:.1}", row.floor_microseconds),
            format!("{:.1} x", row.microseconds / row.floor_microseconds),
            row.layers.to_string(),
            format!("{:.1}", row.nanoseconds_per_token),
        ]);
    }
    table
}

/// Nanoseconds per token of each kernel, over all layers: one row per chunk.
pub fn summary(rows: &[Row]) -> Table {
    let mut kernels: Vec<&str> = Vec::new();
    for row in rows {
        if !kernels.contains(&&*row.kernel) {
            kernels.push(&row.kernel);
        }
    }
    let head = ["model", "past", "tokens"].into_iter().chain(kernels).chain(["all"]);
    let mut table = new_table(head.map(String::from).collect());
    for chunk in rows.chunk_by(|a, b| a.of_chunk() == b.of_chunk()) {
        let (model, past, tokens) = chunk[0].of_chunk();
        let each = chunk.iter().map(|row| row.nanoseconds_per_token);
        let all = each.clone().sum::<f64>();
        let times = each.chain([all]).map(|time| format!("{time:.1}"));
        let head = [model.to_owned(), past.to_string(), tokens.to_string()];
        table.add_row(head.into_iter().chain(times));
    }
    table
}

impl Row {
    fn of_chunk(&self) -> (&str, u32, u32) {
        (&self.model, self.past, self.tokens)
    }
}
