//! The HTML page of `bench --report`: a bar for each row as a fraction of its roof, then the tables as on the terminal.

use maud::{Markup, html};

use super::bars::{self, Bar, Bars};
use super::report::Report;
use crate::page;

/// The page.
pub fn page(report: &Report) -> String {
    let title = format!("dsv4-kv bench: {}, {}", report.device, report.date);
    let body = html! {
        @for group in bars::of(report) { (section(&group)) }
        h2 { "As on the terminal" }
        div class="wide" { pre { (report.to_string()) } }
    };
    page::page(&title, &body)
}

/// A table with a bar in each row. All bars have the same scale, which ends at the longest bar or at the roof.
fn section(Bars { title, about, bars }: &Bars) -> Markup {
    let parts = bars.iter().map(|bar| bar.part).filter(|part| part.is_finite());
    let end = parts.fold(1.0, f64::max);
    let above = bars.iter().filter(|bar| bar.part > 1.0).count();
    html! {
        h2 { (title) }
        p {
            (about)
            " The line in each bar is the roof, 100 %."
            @if above > 0 {
                " Green: above the roof, " (above) " of " (bars.len()) "."
            }
        }
        table class="bars" {
            tr {
                th { "what" } th { "size" } th { "time" } th { "roof" } th { "of roof" }
                th class="bar" { "0 to " (percent(end)) }
            }
            @for bar in bars { (row(bar, end)) }
        }
    }
}

fn row(Bar { name, size, microseconds, roof, part }: &Bar, end: f64) -> Markup {
    let long = if part.is_finite() { part.max(0.0) } else { 0.0 };
    let width = format!("width:{:.1}%", 100.0 * long / end);
    let line = format!("left:{:.1}%", 100.0 / end);
    let kind = if *part > 1.0 { "value above" } else { "value" };
    html! {
        tr {
            td { (name) }
            td { (size) }
            td class="number" { (format!("{microseconds:.2} us")) }
            td { (roof) }
            td class="number" { (percent(*part)) }
            td class="bar" {
                div class="scale" { div class=(kind) style=(width) {} div class="roof" style=(line) {} }
            }
        }
    }
}

/// Formats a fraction; `-` if it has no value, for example where a time is 0.
fn percent(part: f64) -> String {
    if part.is_finite() { format!("{:.0} %", 100.0 * part) } else { "-".into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A made-up result with rows of every suite, some above their roofs.
    const RESULT: &str = include_str!("../../tests/bench/result.json");

    fn page_of(change: impl FnOnce(&mut Report)) -> String {
        let mut report: Report = serde_json::from_str(RESULT).expect("a result");
        change(&mut report);
        page(&report)
    }

    #[test]
    fn a_bar_above_the_roof_is_as_long_as_it_is_and_the_roof_is_marked() {
        let page = page_of(|report| {
            report.measurements[0].microseconds = 4.0;
            report.measurements[0].copy_microseconds = 2.0;
            report.measurements[1].microseconds = 1.0;
            report.measurements[1].copy_microseconds = 1.6;
            report.measurements.truncate(2);
            report.measurements[0].size = "1 < 2".into();
        });
        for part in [
            "50 %",
            "160 %",
            "0 to 160 %",
            "width:31.2%",
            "width:100.0%",
            "left:62.5%",
            "above the roof, 1 of 2",
            "1 &lt; 2",
        ] {
            assert!(page.contains(part), "{part}: {page}");
        }
        assert!(!page.contains("src=") && !page.contains("<script"));
    }

    #[test]
    fn below_the_roof_the_scale_ends_there() {
        let page = page_of(|report| {
            report.measurements.truncate(1);
            report.measurements[0].microseconds = 4.0;
            report.measurements[0].copy_microseconds = 2.0;
            let Report { attention, steps, prefill, checkpoints, tier, .. } = report;
            attention.clear();
            steps.clear();
            prefill.clear();
            checkpoints.clear();
            tier.clear();
        });
        assert!(page.contains("0 to 100 %") && page.contains("width:50.0%"), "{page}");
        assert!(page.contains("left:100.0%") && !page.contains("value above"), "{page}");
    }

    #[test]
    fn what_took_no_time_has_no_bar() {
        let page = page_of(|report| report.measurements[0].microseconds = 0.0);
        assert!(page.contains(">-</td>") && page.contains("width:0.0%"), "{page}");
        assert!(!page.contains("NaN") && !page.contains("width:inf"), "{page}");
    }

    #[test]
    fn every_suite_says_what_its_roof_is() {
        let page = page_of(|_| {});
        let roofs = ["is a copy", "the longer of two times", "what its column names"];
        let more = ["without checkpoints", "pinned memory", "the whole step"];
        for roof in roofs.into_iter().chain(more) {
            assert!(page.contains(roof), "{roof}: {page}");
        }
    }

    #[test]
    fn a_result_is_read_as_it_was_written() {
        let report: Report = serde_json::from_str(RESULT).expect("a result");
        let written = serde_json::to_value(&report).expect("numbers and words");
        let read: serde_json::Value = serde_json::from_str(RESULT).expect("JSON");
        assert_eq!(written, read);
    }

    #[test]
    fn a_result_from_before_launches_were_eager_is_read() {
        let mut before: serde_json::Value = serde_json::from_str(RESULT).expect("JSON");
        let row = before["attention"][0].as_object_mut().expect("a row");
        for time in ["in_a_row_microseconds", "behind_others_microseconds"] {
            assert!(row.remove(time).is_some(), "{time}");
        }
        let report: Report = serde_json::from_value(before).expect("a result");
        assert_eq!(report.attention[0].in_a_row_microseconds, None);
        assert!(page(&report).contains("<td"));
    }

    #[test]
    fn a_result_from_before_steps_had_a_cluster_is_read() {
        const CLUSTER: &str = "\"attention_cluster\": \"two-blocks\"";
        assert!(RESULT.contains(CLUSTER));
        let before = RESULT.replace(CLUSTER, "\"of an older version\": 0");
        let [before, now] = [&before, RESULT].map(|result| {
            serde_json::to_value(serde_json::from_str::<Report>(result).expect("a result"))
                .expect("numbers and words")
        });
        assert_eq!(before, now);
        let renamed = CLUSTER
            .replace("attention_cluster", "attention_split")
            .replace("two-blocks", "one-block");
        let [renamed, now] = [renamed, CLUSTER.replace("two-blocks", "one-block")].map(|cluster| {
            let result = RESULT.replace(CLUSTER, &cluster);
            serde_json::to_value(serde_json::from_str::<Report>(&result).expect("a result"))
                .expect("numbers and words")
        });
        assert!(renamed == now && now != before);
    }
}
