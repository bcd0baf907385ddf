//! `bench`: times kernels by replaying graphs over different memory per node, beside a copy of the same number of
//! bytes.
//!
//! A graph holds one launch per layer of a model with many layers, so that every node works on its own memory and finds
//! none of it in the L2 cache. Replays run in pairs, of which the second is timed. If the nodes together touch too
//! little memory for that, the cache is flushed before each replay. The time of a node is the median time of a replay,
//! measured by device events, divided by the number of nodes. The copy is measured in the same way and moves as many
//! bytes: half of them are read, half are written.

mod attention;
mod bars;
mod bookkeeping;
mod checkpoints;
mod decode;
mod from;
mod gather;
mod indexer;
mod inputs;
mod linear;
mod load;
mod page;
mod prefill;
mod projections;
mod report;
mod router;
mod state;
mod step;
mod suite;
mod swa;
#[cfg(test)]
mod tests;
mod tier;
mod timing;
mod trunk;
mod work;

use std::path::PathBuf;
use std::time::SystemTime;

use anyhow::Result;
use clap::{ArgMatches, Args};
use dsv4_kv::device::{CudaDevice, CudaOptions};

use crate::error::InputError;
use crate::outcome::{Exit, Outcome, after_help};
use crate::output::{self, ReportFile};
pub use bookkeeping::Report as BookkeepingReport;
pub use report::Report;
use suite::Suite;
use timing::Measurement;
use work::Work;

/// Examples for `--help`: the purpose of each, and the command.
const EXAMPLES: [(&str, &str); 4] = [
    ("all kernels, each beside a copy of the same bytes", "cargo kv bench"),
    ("decode steps of a whole model, as JSON", "cargo kv bench step --json"),
    ("what a step costs the host; needs no GPU", "cargo kv bench bookkeeping"),
    (
        "a page of an earlier result; needs no GPU",
        "cargo kv bench --from result.json --report bench.html",
    ),
];

/// Exit codes.
const EXITS: [Exit; 3] = [
    (0, "measured"),
    (1, "the device failed, or a result could not be written"),
    (2, "an option or a file was refused, or there is no GPU"),
];

/// Measures kernels on a GPU, each beside a device-to-device copy of the same bytes.
///
/// A row is one kernel at one size. A CUDA graph holds 20 to 200 of its launches, each on its own memory. Together
/// they touch 400 MiB if 200 launches are enough for that, so that no data is in the L2 cache; if not, the cache is
/// flushed before each replay. `us` is the median of 50 replays, timed by CUDA events after 50 warm-up replays,
/// divided by the number of launches. `MB` is what a launch must move: every input read once, every output written
/// once. `copy us` is the time of a copy that moves as many bytes, half read and half written, measured the same
/// way; `of copy` is that time divided by the kernel's.
///
/// `attention` also has the time of its products at the peak rate of the tensor cores (`products us`), the rate
/// that was reached (`TFLOP/s`), and the best peer's time on an H200 (FlashMLA as vLLM 0.33 and SGLang ship it,
/// 2026-11-21; chunks there read rows that were converted to BF16 before). Graphs captured for more or longer
/// requests than are live are rows of their own. Two columns are of launches without a graph. `in a row us`: 50 launches over the
/// same memory, per launch, the best of 5 runs. `behind others us`: one launch behind a fill that is larger than the L2
/// cache and a launch of another kernel, so that data and code come from device memory; the median of 7 means of 5.
///
/// `step`, `prefill`, `checkpoints` and `tier` are measured only on request. A row of `step` is one decode step of
/// a model: medians of 50 replays with the cache flushed before each, of the whole step and of each kind of launch
/// alone. `queries` is the indexer's `select` less `select_projected`, with `index_query` added; `scores + lists`
/// is `select_projected` less `index_query`; every other kind has a graph of its own. `begin us` and `host us` are
/// the host's, launch by launch; `own` is the same on a device that does nothing, so without the driver.
///
/// A row of `checkpoints` is a chunk in all layers as one graph, updates, indexer, gathers of windows and appends: the
/// median of 6 requests of a cache without checkpoints, and of as many, in turn, of one that saves a checkpoint every
/// 2,048 tokens.
///
/// A row of `tier` is a prefix of --past tokens (the largest) on its way to host memory or back, from the call that
/// begins it until the host has waited for it; `one copy us` is one copy of as many bytes between the device and one
/// range of pinned memory, in the same run. `step us` is a decode step of 32 requests of 8,192 tokens just before the
/// prefix goes, and `beside us` one while it is on its way: medians of 5 runs of `steps` steps, by the device's
/// events. `beside a copy` is how much slower steps are beside that one copy.
///
/// `bookkeeping` needs no GPU: what a step costs the host, on a device that does nothing, so without the driver. A row is
/// the median, and what 99 of 100 take at most, of 2,000 steps, or of a launch in them.
///
/// A row of `prefill` is one layer's part of a chunk: the median of 6 replays of several layers. `floor` is a
/// measured copy of the bytes, or the products at the rate of the tensor cores. `queries` is `select` less
/// `select_projected`, with `index_query` added, which is part of the product's launch; alone, for projections that the
/// caller has made, it counts no layer.
#[derive(Args, Debug)]
#[command(after_help = after_help(&EXAMPLES, &EXITS))]
pub struct BenchArgs {
    /// What to measure.
    #[arg(value_enum, default_value_t = Suite::All)]
    suite: Suite,

    /// Print device, date (UTC) and rows as JSON instead of a table.
    #[arg(long)]
    json: bool,

    /// Write an HTML page with the rows and the fraction of its roofline that each reaches; the file is opened
    /// before anything is measured. Not for `bookkeeping`.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,

    /// Measure nothing: show the result that `bench --json` has written to FILE. Not for `bookkeeping`.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["suite", "LoadArgs"])]
    from: Option<PathBuf>,

    #[command(flatten)]
    load: load::LoadArgs,
}

/// The kernels of a suite, each measured beside a copy.
type Kernels = fn(&CudaDevice) -> Vec<Work<'_, Measurement>>;

/// The suites whose rows are kernels beside a copy.
const KERNELS: [(Suite, Kernels); 7] = [
    (Suite::Swa, swa::works),
    (Suite::Gather, gather::works),
    (Suite::Decode, decode::works),
    (Suite::Router, router::works),
    (Suite::Indexer, indexer::works),
    (Suite::Linear, linear::works),
    (Suite::State, state::works),
];

/// Runs the command. `given` has the options of its command line.
pub fn run(args: &BenchArgs, given: &ArgMatches) -> Result<Outcome> {
    suite::check_options(args.suite, given)?;
    if args.suite == Suite::Bookkeeping && args.report.is_some() {
        return Err(InputError::NoReportOfBookkeeping.into());
    }
    let written = args.from.as_deref().map(from::read).transpose()?;
    let attended = attention::chosen(args.load.only.as_deref().unwrap_or_default())?;
    if args.suite == Suite::Bookkeeping {
        return bookkeeping::run(args.json).map(|()| Outcome::Passed);
    }
    let inputs: Vec<_> = args.from.iter().map(|path| ("--from", path.as_path())).collect();
    let open = |path| ReportFile::open(path, &inputs);
    let file = args.report.as_deref().map(open).transpose()?;
    let report = match written {
        Some(report) => report,
        None => {
            let device =
                dsv4_kv::open_cuda(CudaOptions::default()).map_err(InputError::NothingToMeasure)?;
            measure(&device, args, attended)?
        }
    };
    // If one of the two outputs cannot be written, the other still is.
    let printed = if args.json {
        output::print(serde_json::to_string_pretty(&report)?)
    } else {
        output::print(&report)
    };
    file.map_or(Ok(()), |file| file.write(&page::page(&report)))?;
    printed?;
    Ok(Outcome::Passed)
}

/// Measures the rows of the chosen suite, or of all suites that `all` includes; of attention the cases `attended`.
fn measure(
    device: &CudaDevice,
    args: &BenchArgs,
    attended: Vec<attention::Case>,
) -> Result<Report> {
    let BenchArgs { suite, load, .. } = args;
    let is_wanted = |of| [of, Suite::All].contains(suite);
    let kernels = KERNELS.into_iter().filter(|(of, _)| is_wanted(*of));
    let kernels: Vec<_> = kernels.flat_map(|(_, works)| works(device)).collect();
    let (mut attention, mut steps, mut prefill, mut saves, mut tier) =
        <(Vec<_>, Vec<_>, Vec<_>, Vec<_>, Vec<_>)>::default();
    if is_wanted(Suite::Attention) {
        attention = Work::each(attended, |of| Ok(vec![attention::measure_case(device, of)?]));
    }
    match suite {
        Suite::Step => steps = Work::each(step::cases(load), |of| step::measure_case(device, of)),
        Suite::Prefill => {
            prefill = Work::each(prefill::cases(load), |of| prefill::measure_chunk(device, of));
        }
        Suite::Checkpoints => {
            saves =
                Work::each(checkpoints::cases(load), |of| checkpoints::measure_case(device, of));
        }
        Suite::Tier => tier = Work::each(tier::cases(load), |of| tier::measure_case(device, of)),
        _ => {}
    }
    let works =
        [kernels.len(), attention.len(), steps.len(), prefill.len(), saves.len(), tier.len()];
    let bar = work::bar(works.iter().sum());
    let report = Report {
        device: device.info().name.clone(),
        measurements: work::run(kernels, &bar)?,
        attention: work::run(attention, &bar)?,
        steps: work::run(steps, &bar)?,
        prefill: work::run(prefill, &bar)?,
        checkpoints: work::run(saves, &bar)?,
        tier: work::run(tier, &bar)?,
        date: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
    };
    bar.finish_and_clear();
    Ok(report)
}
