//! The result of a case, and its table.

use comfy_table::Table;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::super::timing::Measurement;

/// One case, measured.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Row {
    /// Its time, and that of a copy of its bytes.
    #[serde(flatten)]
    pub measured: Measurement,
    /// Operations of its products over its time, in TFLOP/s.
    pub teraflops: f64,
    /// Microseconds of its products at the rate of the tensor cores.
    pub products_microseconds: f64,
    /// Microseconds of the best peer, where one was measured.
    pub peer_microseconds: Option<f64>,
    /// Microseconds of a launch of 50 in a row over the same memory, not in a graph: the best of 5 runs. Not in results of
    /// before 2026-11-27.
    pub in_a_row_microseconds: Option<f64>,
    /// Microseconds of a launch, not in a graph, behind a fill that is larger than the L2 cache and a launch of another kernel
    /// with a block on each multiprocessor, so that data and code come from device memory: the median of 7 means of 5. Not in
    /// results of before 2026-11-27.
    pub behind_others_microseconds: Option<f64>,
}

/// The rows as a table.
pub fn table(rows: &[Row]) -> Table {
    let mut table = Table::new();
    table.load_preset(comfy_table::presets::ASCII_MARKDOWN);
    let head = ["kernel", "size", "MB", "us", "GB/s", "copy us", "TFLOP/s", "products us"];
    table.set_header(head.into_iter().chain(["best peer us", "in a row us", "behind others us"]));
    let optional = |us: Option<f64>| us.map_or("-".to_owned(), |us| format!("{us:.2}"));
    for row in rows {
        let Row { measured, teraflops, products_microseconds, peer_microseconds, .. } = row;
        table.add_row([
            measured.kernel.clone(),
            measured.size.clone(),
            format!("{:.2}", measured.bytes as f64 / 1e6),
            format!("{:.2}", measured.microseconds),
            format!("{:.0}", measured.gigabytes_per_second),
            format!("{:.2}", measured.copy_microseconds),
            format!("{teraflops:.0}"),
            format!("{products_microseconds:.2}"),
            peer_microseconds.map_or("-".to_owned(), |peer| peer.to_string()),
            optional(row.in_a_row_microseconds),
            optional(row.behind_others_microseconds),
        ]);
    }
    table
}
