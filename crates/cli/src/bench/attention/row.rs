//! A measured case, and as a table.

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
}

/// The rows as a table.
pub fn table(rows: &[Row]) -> Table {
    let mut table = Table::new();
    table.load_preset(comfy_table::presets::ASCII_MARKDOWN);
    let head = ["kernel", "size", "MB", "us", "GB/s", "copy us", "TFLOP/s", "products us"];
    table.set_header(head.into_iter().chain(["best peer us"]));
    for Row { measured, teraflops, products_microseconds, peer_microseconds } in rows {
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
        ]);
    }
    table
}
