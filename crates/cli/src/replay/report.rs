//! The HTML page: the table, and plots as inline SVG. It loads nothing else.

use std::fmt::Display;

use anyhow::Result;
use maud::{Markup, PreEscaped, html};
use plotters::prelude::*;

use super::histogram::Histogram;
use super::latency::{Latency, Waits};
use super::quantiles::Quantiles;
use super::service::Unit;
use super::summary::Summary;
use super::timeline::{Sample, Timeline};
use crate::page;

/// Width and height of a plot over time, in pixels.
const SIZE: (u32, u32) = (900, 300);
/// Size of a plot that a phone shows without scrolling.
const SMALL: (u32, u32) = (420, 280);

/// The page.
pub fn page(summary: &Summary, timeline: &Timeline, latency: &Latency) -> Result<String> {
    let points = timeline.points();
    let title = format!("dsv4-kv replay: {} on {}", summary.model, summary.device);
    let mut plots = vec![occupancy(summary, points)?, batch(points)?];
    if summary.reuse.is_some() {
        plots.extend([hit_ratio(points)?, saved(points)?, evictions(points)?]);
    }
    if summary.reuse.as_ref().is_some_and(|reuse| reuse.tier.is_some()) {
        plots.push(traffic(points)?);
    }
    let prepare = histogram("begin_step (steps)", "microseconds", &timeline.sorted_times())?;
    let body = html! {
        table {
            @for (what, value) in summary.rows() {
                tr { td { (what) } td { (value) } }
            }
        }
        (waits(summary.service.unit, latency)?)
        h2 { "Over time" }
        @for plot in plots { div class="wide" { (PreEscaped(plot)) } }
        p {
            "Time is virtual. Each point of the plots over time shows the largest values of "
            (timeline.steps_per_point()) " steps in a row."
        }
        h2 { "The host's part of a step" }
        div class="plots" { div { (PreEscaped(prepare)) } }
    };
    Ok(page::page(&title, &body))
}

/// Histograms of the waiting times, if there are any.
fn waits(unit: Unit, latency: &Latency) -> Result<Markup> {
    let (name, what) = match unit {
        Unit::Steps => ("steps", "In steps: where no kernels run there is no other time."),
        Unit::Ms => (
            "milliseconds",
            "In milliseconds of begin_step on the host and of the cache's kernels on the device: the model's own come \
             on top.",
        ),
    };
    let sorted = |waits: &Waits| if unit == Unit::Ms { waits.in_ms() } else { waits.in_steps() };
    let all = [
        ("Queueing (requests)", &latency.queueing),
        ("Time to first token (requests)", &latency.first_token),
        ("Time per token (requests)", &latency.per_token),
    ];
    let all = all.map(|(title, waits)| (title, sorted(waits)));
    let drawn = all.iter().filter(|(_, waits)| !waits.is_empty());
    let plots = drawn.map(|(title, waits)| histogram(title, name, waits));
    let plots = plots.collect::<Result<Vec<_>>>()?;
    Ok(html! {
        @if !plots.is_empty() {
            h2 { "Waits" }
            div class="plots" { @for plot in plots { div { (PreEscaped(plot)) } } }
            p {
                "From the arrival of a request to its slot; from its arrival to the end of the step that has computed \
                 its prompt; from a token to the next, the mean of each request. "
                (what) " Lines mark the median (p50) and what 99 of 100 do not exceed (p99)."
            }
        }
    })
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

/// The share of prompt tokens that were reused: cumulative, and over the last hundredth of the points.
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

/// Prompt tokens, and those of them that were reused.
fn saved(points: &[Sample]) -> Result<String> {
    let millions = |value: fn(&Sample) -> u64| {
        points.iter().map(|p| (p.at_ms / 1e3, value(p) as f64 / 1e6)).collect()
    };
    let series = vec![("prompts", millions(|p| p.prompts)), ("saved", millions(|p| p.reused))];
    lines("Prompt tokens saved (millions)", series)
}

/// Evicted blocks and checkpoints.
fn evictions(points: &[Sample]) -> Result<String> {
    let counted = |value: fn(&Sample) -> u64| {
        points.iter().map(|p| (p.at_ms / 1e3, value(p) as f64)).collect()
    };
    let (blocks, checkpoints) = (counted(|p| p.evicted_blocks), counted(|p| p.evicted_checkpoints));
    lines("Evictions (since the start)", vec![("blocks", blocks), ("checkpoints", checkpoints)])
}

/// Traffic between the device and host memory.
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
    let top = if top > 0.0 { top } else { 1.0 };
    draw(SIZE, |area| {
        let mut chart = chart(title, &area, (0.0..right, 0.0..top))?;
        mesh(&mut chart, "virtual time (s)")?;
        for ((label, points), colour) in series.into_iter().zip([BLUE, RED, GREEN]) {
            line(&mut chart, label.to_string(), points, colour)?;
        }
        legend(&mut chart)
    })
}

/// A line with its name in the legend.
fn line(
    chart: &mut Chart<'_, '_>,
    label: String,
    points: Vec<(f64, f64)>,
    colour: RGBColor,
) -> Result<()> {
    let drawn = chart.draw_series(LineSeries::new(points, colour))?;
    drawn.label(label).legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour));
    Ok(())
}

fn legend<'a, 'b: 'a>(chart: &mut Chart<'a, 'b>) -> Result<()> {
    let mut labels = chart.configure_series_labels();
    labels.position(SeriesLabelPosition::UpperRight).background_style(WHITE.mix(0.8)).draw()?;
    Ok(())
}

/// A histogram of `sorted`, with the median and the 99th percentile.
fn histogram(title: &str, unit: &str, sorted: &[f32]) -> Result<String> {
    let of = Histogram::new(sorted);
    // Leaves room for the legend above all bars.
    let top = f64::from(of.top().max(1)) * 1.4;
    let Quantiles { p50, p99 } = Quantiles::of(sorted);
    draw(SMALL, |area| {
        let mut chart = chart(title, &area, (0.0..of.end(), 0.0..top))?;
        mesh(&mut chart, unit)?;
        chart.draw_series(of.bars().map(|(left, right, count)| {
            Rectangle::new([(left, 0.0), (right, f64::from(count))], BLUE.mix(0.5).filled())
        }))?;
        for (name, mark, colour) in [("p50", p50, BLACK), ("p99", p99, RED)] {
            let Some(at) = mark.map(f64::from) else { continue };
            line(&mut chart, format!("{name} {}", short(at)), vec![(at, 0.0), (at, top)], colour)?;
        }
        legend(&mut chart)
    })
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
type Chart<'a, 'b> = ChartContext<
    'a,
    SVGBackend<'b>,
    Cartesian2d<plotters::coord::types::RangedCoordf64, plotters::coord::types::RangedCoordf64>,
>;

/// Draws `plot` as an SVG element.
fn draw(size: (u32, u32), plot: impl FnOnce(Area<'_>) -> Result<()>) -> Result<String> {
    let mut svg = String::new();
    plot(SVGBackend::with_string(&mut svg, size).into_drawing_area())?;
    Ok(svg)
}

fn chart<'a, 'b>(
    title: &str,
    area: &'a Area<'b>,
    (x, y): (std::ops::Range<f64>, std::ops::Range<f64>),
) -> Result<Chart<'a, 'b>> {
    let mut builder = ChartBuilder::on(area);
    builder.caption(title, ("sans-serif", 16)).margin(8);
    builder.x_label_area_size(36).y_label_area_size(56);
    Ok(builder.build_cartesian_2d(x, y)?)
}

/// Axes with short labels, and grid lines only at labels.
fn mesh(chart: &mut Chart<'_, '_>, x: &str) -> Result<()> {
    let number = |value: &f64| short(*value);
    let (x_labels, y_labels) = (number, number);
    let mut mesh = chart.configure_mesh();
    mesh.x_label_formatter(&x_labels).y_label_formatter(&y_labels);
    mesh.light_line_style(TRANSPARENT).x_desc(x).draw()?;
    Ok(())
}

/// Formats with at most three decimal places.
fn short(value: f64) -> String {
    ((value * 1e3).round() / 1e3).to_string()
}
