//! `bench`: kernels by graph replay over rotated buffers, beside a copy of the same bytes.
//!
//! A graph holds one launch per layer of a model with many layers, so every node works on memory of
//! its own and none is still in the L2 cache when its turn comes: replays follow each other in pairs, of
//! which the second is timed. Where the nodes touch too little for that, the cache is flushed before each
//! replay. The time of a node is the median replay over the number of nodes, by device
//! events. The copy is measured the same way and moves the same bytes: half read, half written.

mod decode;
mod gather;
mod indexer;
mod inputs;
mod router;
mod swa;

use std::fmt;
use std::ops::RangeInclusive;
use std::time::{Duration, SystemTime};

use anyhow::Result;
use clap::{Args, ValueEnum};
use comfy_table::Table;
use dsv4_kv::device::{Backend, Buffer, CudaOptions, Device, Graph, Stream};
use indicatif::ProgressBar;
use serde::Serialize;

use crate::error::InputError;
use crate::outcome::{EXIT_CODES, Outcome};
use crate::output;

/// Bytes that the nodes of a graph touch together: several times the L2 of an H200.
const ROTATION_BYTES: u64 = 400 << 20;
/// Bytes written before a replay of a graph that touches less, to push its own out of the L2 cache. They
/// are written back while the replay runs: half a microsecond a node where nodes are few.
const FLUSH_BYTES: u64 = 256 << 20;
/// Fewest and most nodes of a graph.
const NODES: RangeInclusive<u64> = 20..=200;
/// Replays that are timed, after as many that warm up.
const REPLAYS: usize = 50;

/// Measures kernels on a GPU, each beside a device-to-device copy of the same bytes.
///
/// A row is one kernel at one size. A CUDA graph holds 20 to 200 of its launches, each on memory of its
/// own, 400 MiB together where 200 launches touch as much, so that none finds its data in the L2 cache;
/// where they touch less, the cache is flushed before each replay. `us` is the median of 50 replays,
/// after 50 to warm up, by CUDA events, over the number of launches. `MB` is what a launch must move:
/// every input read once, every output written once. `copy us` is a copy that moves as many bytes, half
/// read and half written, measured the same way; `of copy` is its time over the kernel's.
#[derive(Args, Debug)]
#[command(after_help = EXIT_CODES)]
pub struct BenchArgs {
    /// What to measure.
    #[arg(value_enum, default_value_t = Suite::All)]
    suite: Suite,

    /// Print device, date (UTC) and rows as JSON instead of a table.
    #[arg(long)]
    json: bool,
}

/// A group of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Suite {
    /// The sliding window: append and gather.
    Swa,
    /// Compressed entries: gathers by top-k list and of all.
    Gather,
    /// One-token decode of a CSA or HCA layer.
    Decode,
    /// The router, from logits and from hidden states.
    Router,
    /// The indexer: scores, selection of the largest, both.
    Indexer,
    /// All of these.
    All,
}

/// What was measured where.
#[derive(Debug, Serialize)]
struct Report {
    /// The GPU.
    device: String,
    /// When it was measured: UTC, as in `2026-01-31T12:00:00Z`.
    date: String,
    /// The command's cases.
    measurements: Vec<Measurement>,
}

/// One measured case.
#[derive(Clone, Debug, Serialize)]
struct Measurement {
    /// The kernel.
    kernel: String,
    /// Its size, in words.
    size: String,
    /// Bytes one launch must move: every input read once, every output written once.
    bytes: u64,
    /// Nodes of the graph.
    nodes: u64,
    /// Median microseconds of a launch, as a graph node.
    microseconds: f64,
    /// `bytes` over that time, in GB/s.
    gigabytes_per_second: f64,
    /// Median microseconds of a device-to-device copy of the same bytes, as a graph node.
    copy_microseconds: f64,
}

/// Runs the command.
pub fn run(args: &BenchArgs) -> Result<Outcome> {
    let device = dsv4_kv::open_cuda(CudaOptions::default()).map_err(InputError::NoCuda)?;
    let progress = ProgressBar::new_spinner();
    progress.enable_steady_tick(Duration::from_millis(100));
    let wanted = |suite| args.suite == suite || args.suite == Suite::All;
    let mut measurements = Vec::new();
    if wanted(Suite::Swa) {
        measurements.extend(swa::measure(&device, &progress)?);
    }
    if wanted(Suite::Gather) {
        measurements.extend(gather::measure(&device, &progress)?);
    }
    if wanted(Suite::Decode) {
        measurements.extend(decode::measure(&device, &progress)?);
    }
    if wanted(Suite::Router) {
        measurements.extend(router::measure(&device, &progress)?);
    }
    if wanted(Suite::Indexer) {
        measurements.extend(indexer::measure(&device, &progress)?);
    }
    progress.finish_and_clear();
    let date = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    let report = Report { device: device.info().name.clone(), date, measurements };
    if args.json {
        output::print(serde_json::to_string_pretty(&report)?)?;
    } else {
        output::print(report)?;
    }
    Ok(Outcome::Passed)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_preset(comfy_table::presets::ASCII_MARKDOWN);
        table.set_header(["kernel", "size", "MB", "us", "GB/s", "copy us", "of copy"]);
        for case in &self.measurements {
            table.add_row([
                case.kernel.clone(),
                case.size.clone(),
                format!("{:.2}", case.bytes as f64 / 1e6),
                format!("{:.2}", case.microseconds),
                format!("{:.0}", case.gigabytes_per_second),
                format!("{:.2}", case.copy_microseconds),
                format!("{:.0} %", 100.0 * case.copy_microseconds / case.microseconds),
            ]);
        }
        write!(f, "{}, {}, graph replay over rotated buffers\n{table}", self.device, self.date)
    }
}

/// Nodes of a graph whose launches move `bytes` each.
fn nodes_for(bytes: u64) -> u64 {
    ROTATION_BYTES.div_ceil(bytes).clamp(*NODES.start(), *NODES.end())
}

/// One line of the result: `graph` has `nodes` launches of `kernel` that move `bytes` each.
fn measurement<B: Backend>(
    device: &Device<B>,
    name: (String, String),
    sizes: (u64, u64),
    graph: &Graph<B>,
) -> Result<Measurement> {
    let stream = device.stream()?;
    measure_replay(&stream, name, sizes, || Ok(stream.replay(graph)?))
}

/// As [`measurement`], of the graph that `replay` queues in `stream`.
fn measure_replay<B: Backend>(
    stream: &Stream<B>,
    (kernel, size): (String, String),
    (bytes, nodes): (u64, u64),
    replay: impl FnMut() -> Result<()>,
) -> Result<Measurement> {
    let microseconds = time_node(stream, (bytes, nodes), replay)?;
    let copy_microseconds = time_copy(stream, (bytes, nodes))?;
    let gigabytes_per_second = bytes as f64 / microseconds / 1e3;
    Ok(Measurement {
        kernel,
        size,
        bytes,
        nodes,
        microseconds,
        gigabytes_per_second,
        copy_microseconds,
    })
}

/// Median microseconds of one of the `nodes` launches of the graph that `replay` queues in `stream`,
/// which touch `bytes` each.
fn time_node<B: Backend>(
    stream: &Stream<B>,
    (bytes, nodes): (u64, u64),
    mut replay: impl FnMut() -> Result<()>,
) -> Result<f64> {
    let device = stream.device();
    let flush = if bytes * nodes < ROTATION_BYTES {
        Some(device.allocate::<u8>("cache flush", FLUSH_BYTES)?)
    } else {
        None
    };
    let (from, to) = (device.event()?, device.event()?);
    let mut times = Vec::with_capacity(REPLAYS);
    for number in 0..2 * REPLAYS {
        // Either hides that it takes the host some time to launch a graph.
        match &flush {
            Some(flush) => stream.fill(flush, number as u8)?,
            None => replay()?,
        }
        stream.record(&from)?;
        replay()?;
        stream.record(&to)?;
        let milliseconds = to.milliseconds_since(&from)?;
        if number >= REPLAYS {
            times.push(f64::from(milliseconds) * 1e3 / nodes as f64);
        }
    }
    stream.synchronize()?;
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// As [`time_node`], for copies that move `bytes` each between buffers of their own.
fn time_copy<B: Backend>(stream: &Stream<B>, (bytes, nodes): (u64, u64)) -> Result<f64> {
    let device = stream.device();
    let pair = |_| -> Result<[Buffer<B, u8>; 2]> {
        Ok([device.allocate("copy source", bytes / 2)?, device.allocate("copy target", bytes / 2)?])
    };
    let pairs = (0..nodes).map(pair).collect::<Result<Vec<_>>>()?;
    let retained = pairs.iter().flatten().map(Buffer::memory).collect();
    let graph = stream
        .capture(retained, || pairs.iter().try_for_each(|[from, to]| stream.copy(from, to)))?;
    time_node(stream, (bytes, nodes), || Ok(stream.replay(&graph)?))
}
