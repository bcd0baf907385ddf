//! The bars on the page of `bench --report`: the speed of each row as a fraction of its roof.

use super::report::Report;
use super::step::{Case, Measured};
use super::timing::Measurement;

/// Rows with the same kind of roof.
#[derive(Debug)]
pub struct Bars {
    /// Title of the group.
    pub title: String,
    /// Explains the roof, and how to read a bar.
    pub about: &'static str,
    /// One bar per row.
    pub bars: Vec<Bar>,
}

/// The bar of a row.
#[derive(Debug)]
pub struct Bar {
    /// The kernel, or a group of kernels.
    pub name: String,
    /// Description of its size.
    pub size: String,
    /// Its time in microseconds.
    pub microseconds: f64,
    /// Description of its roof.
    pub roof: String,
    /// Fraction of the roof that it reaches: 1 at the roof, more above it.
    pub part: f64,
}

const KERNELS: &str = "The roof of a kernel is a copy: the driver's own, from device memory to device memory, of as many \
    bytes as the kernel must move, half of them read and half written, measured in the same run by the same method. The \
    copy is a yardstick, and not the most that the memory can do: kernels can be faster. A bar is the copy's time over the \
    kernel's.";
const ATTENTION: &str = "The roof is the longer of two times: the driver's copy of as many bytes, half of them read and \
    half written, and the products at the rate of the tensor cores. A bar is that time over the kernel's.";
const PREFILL: &str = "The roof is what its column names: a measured copy of as many bytes, or the products at the rate \
    of the tensor cores. A bar is the time of the roof over that of the kernel in one layer.";
const CHECKPOINTS: &str = "The roof is the same chunk without checkpoints. A bar is its time over that of the chunk \
    that saves them.";
const TIER: &str = "The roof is one copy of as many bytes between the device and one range of pinned memory, measured in \
    the same run. A bar is its time over that of the transfer.";
const STEP: &str = "In place of a roof stands the whole step as one graph. A bar is the time of one kind of launch, alone, \
    over that of the step; launches overlap in a step, so that kinds can add up to more than the step.";

/// All bars of a result, by group.
pub fn of(report: &Report) -> Vec<Bars> {
    let mut all = vec![kernels(report), attention(report), prefill(report)];
    all.extend([checkpoints(report), tier(report)]);
    for row in &report.steps {
        all.extend(row.measured.as_ref().ok().map(|measured| step(&row.case, measured)));
    }
    all.retain(|group| !group.bars.is_empty());
    all
}

fn group(title: &str, about: &'static str, bars: impl Iterator<Item = Bar>) -> Bars {
    Bars { title: title.into(), about, bars: bars.collect() }
}

fn kernels(report: &Report) -> Bars {
    let rows = report.measurements.iter();
    group("Kernels", KERNELS, rows.map(|row| bar(row, "copy", row.copy_microseconds)))
}

fn attention(report: &Report) -> Bars {
    let bars = report.attention.iter().map(|row| {
        let (copy, products) = (row.measured.copy_microseconds, row.products_microseconds);
        let roof = if copy < products { "products" } else { "copy" };
        bar(&row.measured, roof, copy.max(products))
    });
    group("Attention in place", ATTENTION, bars)
}

fn bar(of: &Measurement, roof: &str, roof_microseconds: f64) -> Bar {
    Bar {
        name: of.kernel.clone(),
        size: of.size.clone(),
        microseconds: of.microseconds,
        roof: roof.into(),
        part: roof_microseconds / of.microseconds,
    }
}

fn prefill(report: &Report) -> Bars {
    let bars = report.prefill.iter().map(|row| Bar {
        name: row.kernel.to_string(),
        size: format!("{}, {} tokens behind {}", row.model, row.tokens, row.past),
        microseconds: row.microseconds,
        roof: row.floor.clone(),
        part: row.floor_microseconds / row.microseconds,
    });
    group("A chunk in one layer", PREFILL, bars)
}

fn checkpoints(report: &Report) -> Bars {
    let bars = report.checkpoints.iter().map(|row| Bar {
        name: format!("{} checkpoints", row.checkpoints),
        size: format!("{}, {} tokens behind {}", row.model, row.tokens, row.past),
        microseconds: row.saving_microseconds,
        roof: "no checkpoints".into(),
        part: row.microseconds / row.saving_microseconds,
    });
    group("A chunk that saves checkpoints", CHECKPOINTS, bars)
}

fn tier(report: &Report) -> Bars {
    let bars = report.tier.iter().map(|row| Bar {
        name: row.direction.to_string(),
        size: format!("{}, {} tokens", row.model, row.prefix),
        microseconds: row.microseconds,
        roof: "one copy".into(),
        part: row.copy_microseconds / row.microseconds,
    });
    group("Prefixes to host memory and back", TIER, bars)
}

fn step(case: &Case, measured: &Measured) -> Bars {
    let Case { model, context, requests, .. } = case;
    let phase = measured.phase.name();
    let title = format!("A step of {model}: {requests} requests of {context} tokens, {phase}");
    let whole = measured.step.microseconds;
    let bars = measured.kinds.iter().map(|kind| Bar {
        name: kind.name.to_string(),
        size: format!("{} launches", kind.timed.nodes),
        microseconds: kind.timed.microseconds,
        roof: format!("step of {whole:.1} us"),
        part: kind.timed.microseconds / whole,
    });
    group(&title, STEP, bars)
}
