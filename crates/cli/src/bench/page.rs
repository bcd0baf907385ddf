//! The HTML page of `bench --report`: each kernel beside the copy that is its roof.

use maud::html;

use super::report::Report;
use super::timing::Measurement;
use crate::page;

/// The page.
pub fn page(report: &Report) -> String {
    let title = format!("dsv4-kv bench: {}, {}", report.device, report.date);
    let attention = report.attention.iter().map(|row| &row.measured);
    let rows: Vec<_> = report.measurements.iter().chain(attention).collect();
    let body = html! {
        @if !rows.is_empty() {
            h2 { "Kernels" }
            p { "A bar is the kernel's bandwidth as a part of that of a copy of the same bytes; a full one is as fast." }
            div class="wide" {
                table {
                    tr { th { "kernel" } th { "size" } th { "us" } th { "GB/s" } th { "of copy" } th {} }
                    @for row in rows { (bar(row)) }
                }
            }
        }
        h2 { "As on the terminal" }
        div class="wide" { pre { (report.to_string()) } }
    };
    page::page(&title, &body)
}

fn bar(row: &Measurement) -> maud::Markup {
    let Measurement { kernel, size, microseconds, gigabytes_per_second, copy_microseconds, .. } =
        row;
    let of_copy = copy_microseconds / microseconds;
    let width = format!("width:{:.1}%", (100.0 * of_copy).clamp(0.0, 100.0));
    html! {
        tr {
            td { (kernel) }
            td { (size) }
            td { (format!("{microseconds:.2}")) }
            td { (format!("{gigabytes_per_second:.0}")) }
            td { (format!("{:.2}", of_copy)) }
            td class="bar" { div style=(width) {} }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_as_long_as_the_copy_is_faster() {
        let row = |kernel: &str, microseconds, copy_microseconds| Measurement {
            kernel: kernel.into(),
            size: "1 < 2".into(),
            bytes: 1000,
            nodes: 20,
            microseconds,
            gigabytes_per_second: 1e-3 * 1000.0 / microseconds,
            copy_microseconds,
        };
        let report = Report {
            device: "a device".into(),
            date: "a date".into(),
            measurements: vec![row("append", 4.0, 2.0), row("gather", 1.0, 2.0)],
            attention: vec![],
            steps: vec![],
            prefill: vec![],
            checkpoints: vec![],
            tier: vec![],
        };
        let page = page(&report);
        for part in ["a device, a date", "width:50.0%", "width:100.0%", "1 &lt; 2", "append"] {
            assert!(page.contains(part), "{part}: {page}");
        }
        assert!(!page.contains("src=") && !page.contains("<script"));
    }
}
