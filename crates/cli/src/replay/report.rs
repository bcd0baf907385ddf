//! The HTML page: the table and plots as inline SVG. It loads nothing.

use std::fmt::Display;

use anyhow::Result;
use maud::{PreEscaped, html};
use plotters::prelude::*;

use super::summary::Summary;
use super::timeline::{Sample, Timeline};
use crate::page;

/// Bars of the histogram.
const BARS: usize = 40;
/// Width and height of a plot, in pixels.
const SIZE: (u32, u32) = (900, 300);

/// The page.
pub fn page(summary: &Summary, timeline: &Timeline) -> Result<String> {
    let points = timeline.points();
    let title = format!("dsv4-kv replay: {} on {}", summary.model, summary.device);
    let mut plots = vec![occupancy(summary, points)?, batch(points)?];
    if summary.reuse.is_some() {
        plots.extend([hit_ratio(points)?, saved(points)?, evictions(points)?]);
    }
    if summary.reuse.as_ref().is_some_and(|reuse| reuse.tier.is_some()) {
        plots.push(traffic(points)?);
    }
    plots.push(prepare(&timeline.sorted_times())?);
    let body = html! {
        table {
            @for (what, value) in summary.rows() {
                tr { td { (what) } td { (value) } }
            }
        }
        @for plot in plots { div class="wide" { (PreEscaped(plot)) } }
        p {
            "Time is virtual. Each point of the plots over time shows the largest values of "
            (timeline.steps_per_point()) " steps in a row."
        }
    };
    Ok(page::page(&title, &body))
}

/// Blocks and slots in use over time, in percent.
fn occupancy(summary: &Summary, points: &[Sample]) -> Result<String> {
    let percent = |used: u32, total: u32| 100.0 * f64::from(used) / f64::from(total.max(1));
    let blocks = points.iter().map(|p| (p.at_ms / 1e3, percent(p.blocks, summary.blocks)));
    let slots = points.iter().map(|p| (p.at_ms / 1e3, percent(p.requests, summary.slots)));
    let cached = points.iter().map(|p| (p.at_ms / 1e3, percent(p.cached, summary.blocks)));
    let blocks_of = format!("blocks (of {})", summary.blocks);
    let slots_of = format!("slots (of {})", summary.slots);
    let mut series = vec![(blocks_of, blocks.collect()), (slots_of, slots.collect())];
    if summary.reuse.is_some() {
        series.push(("blocks that are kept".into(), cached.collect()));
    }
    lines("Occupancy (%)", series)
}

/// Tokens of each step over time.
fn batch(points: &[Sample]) -> Result<String> {
    let prefill = points.iter().map(|p| (p.at_ms / 1e3, f64::from(p.prefill))).collect();
    let decode = points.iter().map(|p| (p.at_ms / 1e3, f64::from(p.decode))).collect();
    lines("Batch (tokens per step)", vec![("prefill", prefill), ("decode", decode)])
}

/// Share of the prompt tokens that were reused: of all until then, and of those of the last hundredth of the points.
fn hit_ratio(points: &[Sample]) -> Result<String> {
    let ratio = |from: &Sample, to: &Sample| {
        let prompts = to.prompts.saturating_sub(from.prompts);
        let reused = to.reused.saturating_sub(from.reused);
        (prompts > 0).then(|| (to.at_ms / 1e3, 100.0 * reused as f64 / prompts as f64))
    };
    let start = Sample::default();
    let all = points.iter().filter_map(|to| ratio(&start, to)).collect();
    let width = (points.len() / 100).max(1);
    let ends = points.iter().step_by(width);
    let recent = ends.clone().zip(ends.skip(1)).filter_map(|(from, to)| ratio(from, to)).collect();
    lines("Hit ratio (% of prompt tokens)", vec![("since the start", all), ("recent", recent)])
}

/// Prompt tokens, and those of them that were not computed.
fn saved(points: &[Sample]) -> Result<String> {
    let millions = |value: fn(&Sample) -> u64| {
        points.iter().map(|p| (p.at_ms / 1e3, value(p) as f64 / 1e6)).collect()
    };
    let series = vec![("prompts", millions(|p| p.prompts)), ("saved", millions(|p| p.reused))];
    lines("Prompt tokens saved (millions)", series)
}

/// What was evicted.
fn evictions(points: &[Sample]) -> Result<String> {
    let counted = |value: fn(&Sample) -> u64| {
        points.iter().map(|p| (p.at_ms / 1e3, value(p) as f64)).collect()
    };
    let (blocks, checkpoints) = (counted(|p| p.evicted_blocks), counted(|p| p.evicted_checkpoints));
    lines("Evictions (since the start)", vec![("blocks", blocks), ("checkpoints", checkpoints)])
}

/// What moved between the device and host memory.
fn traffic(points: &[Sample]) -> Result<String> {
    let gigabytes = |value: fn(&Sample) -> u64| {
        points.iter().map(|p| (p.at_ms / 1e3, value(p) as f64 / 1e9)).collect()
    };
    let (there, back) = (gigabytes(|p| p.to_host), gigabytes(|p| p.from_host));
    lines("Host tier (GB since the start)", vec![("to host memory", there), ("back", back)])
}

/// Lines over virtual time in seconds.
fn lines<L: Display>(title: &str, series: Vec<(L, Vec<(f64, f64)>)>) -> Result<String> {
    let all = || series.iter().flat_map(|(_, points)| points);
    let right = all().map(|point| point.0).fold(1e-3, f64::max);
    let top = all().map(|point| point.1).fold(0.0, f64::max) * 1.05;
    draw(|area| {
        let mut chart = chart(title, &area, (0.0..right, 0.0..top.max(1e-9)))?;
        mesh(&mut chart, "virtual time (s)")?;
        for ((label, points), colour) in series.into_iter().zip([BLUE, RED, GREEN]) {
            chart
                .draw_series(LineSeries::new(points, colour))?
                .label(label.to_string())
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .background_style(WHITE.mix(0.8))
            .draw()?;
        Ok(())
    })
}

/// How often `begin_step` took how long, up to the 99.9th percentile.
fn prepare(sorted_times: &[f32]) -> Result<String> {
    let last = sorted_times.len().saturating_sub(1);
    let right = sorted_times.get(last * 999 / 1000).map_or(1.0, |&time| f64::from(time));
    let width = right.max(1e-3) / BARS as f64;
    let mut counts = [0u32; BARS];
    for &time in sorted_times {
        if let Some(count) = counts.get_mut((f64::from(time) / width) as usize) {
            *count += 1;
        }
    }
    let top = f64::from(counts.into_iter().max().unwrap_or(0)) * 1.05;
    draw(|area| {
        let ranges = (0.0..width * BARS as f64, 0.0..top.max(1.0));
        let mut chart = chart("begin_step (steps by time)", &area, ranges)?;
        mesh(&mut chart, "microseconds")?;
        chart.draw_series(counts.into_iter().enumerate().map(|(bar, count)| {
            let left = bar as f64 * width;
            Rectangle::new([(left, 0.0), (left + width, f64::from(count))], BLUE.filled())
        }))?;
        Ok(())
    })
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
type Chart<'a, 'b> = ChartContext<
    'a,
    SVGBackend<'b>,
    Cartesian2d<plotters::coord::types::RangedCoordf64, plotters::coord::types::RangedCoordf64>,
>;

/// An SVG element with what `plot` draws.
fn draw(plot: impl FnOnce(Area<'_>) -> Result<()>) -> Result<String> {
    let mut svg = String::new();
    plot(SVGBackend::with_string(&mut svg, SIZE).into_drawing_area())?;
    Ok(svg)
}

fn chart<'a, 'b>(
    title: &str,
    area: &'a Area<'b>,
    (x, y): (std::ops::Range<f64>, std::ops::Range<f64>),
) -> Result<Chart<'a, 'b>> {
    let mut builder = ChartBuilder::on(area);
    builder.caption(title, ("sans-serif", 16)).margin(8);
    builder.x_label_area_size(36).y_label_area_size(64);
    Ok(builder.build_cartesian_2d(x, y)?)
}

/// Axes with labels as short as they can be, and lines only where there is a label.
fn mesh(chart: &mut Chart<'_, '_>, x: &str) -> Result<()> {
    let number = |value: &f64| ((value * 1e3).round() / 1e3).to_string();
    let (x_labels, y_labels) = (number, number);
    let mut mesh = chart.configure_mesh();
    mesh.x_label_formatter(&x_labels).y_label_formatter(&y_labels);
    mesh.light_line_style(TRANSPARENT).x_desc(x).draw()?;
    Ok(())
}
