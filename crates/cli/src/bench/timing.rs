//! Times a kernel by graph replay, beside a copy of as many bytes.

use std::ops::RangeInclusive;

use anyhow::Result;
use comfy_table::Table;
use dsv4_kv::device::{Backend, Buffer, Device, Event, Graph, Stream};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Whether this is a test, whose launches are emulated: it makes the same calls, but few of them.
pub const SMALL: bool = cfg!(test);
/// Bytes that the nodes of a graph touch together: several times the size of an H200's L2 cache.
const ROTATION_BYTES: u64 = if SMALL { 1 << 10 } else { 400 << 20 };
/// Bytes that are written before each replay of a graph that touches less than `ROTATION_BYTES`, to evict the graph's
/// memory from the L2 cache. They are written back during the replay, which costs half a microsecond per node in graphs
/// with few nodes.
const FLUSH_BYTES: u64 = if SMALL { 1 << 10 } else { 256 << 20 };
/// Number of flushes before a graph of hundreds of nodes. They hide the time that the host takes to launch it.
const COLD_FLUSHES: u8 = 4;
/// Fewest and most nodes of a graph.
const NODES: RangeInclusive<u64> = if SMALL { 2..=3 } else { 20..=200 };
/// Number of timed replays, after as many for warm-up.
pub const REPLAYS: usize = if SMALL { 1 } else { 50 };

/// Number of runs for warm-up before `runs` timed ones.
const fn warm_up(runs: usize) -> usize {
    if SMALL { 0 } else { runs }
}

/// One measured case.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Measurement {
    /// The kernel.
    pub kernel: String,
    /// Its size, in words.
    pub size: String,
    /// Bytes one launch must move: every input read once, every output written once.
    pub bytes: u64,
    /// Nodes of the graph.
    pub nodes: u64,
    /// Median microseconds of a launch, as a graph node.
    pub microseconds: f64,
    /// `bytes` over that time, in GB/s.
    pub gigabytes_per_second: f64,
    /// Median microseconds of a device-to-device copy of the same bytes, as a graph node.
    pub copy_microseconds: f64,
}

/// The rows as a table.
pub fn table(rows: &[Measurement]) -> Table {
    let mut table = Table::new();
    table.load_preset(comfy_table::presets::ASCII_MARKDOWN);
    table.set_header(["kernel", "size", "MB", "us", "GB/s", "copy us", "of copy"]);
    for case in rows {
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
    table
}

/// Number of nodes of a graph whose launches move `bytes` bytes each.
pub fn nodes_for(bytes: u64) -> u64 {
    ROTATION_BYTES.div_ceil(bytes).clamp(*NODES.start(), *NODES.end())
}

/// Measures one row of the result: `graph` has `nodes` launches of `kernel` that move `bytes` bytes each.
pub fn measurement<B: Backend>(
    device: &Device<B>,
    name: (String, String),
    sizes: (u64, u64),
    graph: &Graph<B>,
) -> Result<Measurement> {
    let stream = device.stream()?;
    measure_replay(&stream, name, sizes, || Ok(stream.replay(graph)?))
}

/// As [`measurement`], for the graph that `replay` queues in `stream`.
pub fn measure_replay<B: Backend>(
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

/// Median microseconds of a launch in the graph that `replay` queues in `stream`. The graph has `nodes` launches that
/// touch `bytes` bytes each.
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
    for number in 0..warm_up(REPLAYS) + REPLAYS {
        // Either of these hides the time that the host takes to launch a graph.
        match &flush {
            Some(flush) => stream.fill(flush, number as u8)?,
            None => replay()?,
        }
        stream.record(&from)?;
        replay()?;
        stream.record(&to)?;
        let milliseconds = to.milliseconds_since(&from)?;
        if number >= warm_up(REPLAYS) {
            times.push(f64::from(milliseconds) * 1e3 / nodes as f64);
        }
    }
    stream.synchronize()?;
    Ok(median(times))
}

/// The median.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

/// Runs of a kernel that takes milliseconds, after as many for warm-up.
pub const LONG_RUNS: usize = if SMALL { 1 } else { 6 };
/// Timed runs of the host's work, after as many for warm-up.
pub const HOST_RUNS: usize = if SMALL { 1 } else { 30 };

/// Times work with a cold L2 cache.
pub struct ColdTimer<B: Backend> {
    flush: Buffer<B, u8>,
    from: Event<B>,
    to: Event<B>,
}

impl<B: Backend> ColdTimer<B> {
    /// A timer for work on `device`.
    pub fn new(device: &Device<B>) -> Result<Self> {
        let flush = device.allocate("cache flush", FLUSH_BYTES)?;
        Ok(Self { flush, from: device.event()?, to: device.event()? })
    }

    /// Microseconds of the work that `launch` queues in `stream`.
    pub fn time(&self, stream: &Stream<B>, launch: impl FnOnce() -> Result<()>) -> Result<f64> {
        self.time_behind(stream, || Ok(()), launch)
    }

    /// As `Self::time`, after the work that `before` queues, which is not timed.
    pub fn time_behind(
        &self,
        stream: &Stream<B>,
        before: impl FnOnce() -> Result<()>,
        launch: impl FnOnce() -> Result<()>,
    ) -> Result<f64> {
        for byte in 0..COLD_FLUSHES {
            stream.fill(&self.flush, byte)?;
        }
        before()?;
        stream.record(&self.from)?;
        launch()?;
        stream.record(&self.to)?;
        Ok(f64::from(self.to.milliseconds_since(&self.from)?) * 1e3)
    }

    /// The median of `runs` runs, after as many for warm-up.
    pub fn median(
        &self,
        stream: &Stream<B>,
        runs: usize,
        mut replay: impl FnMut() -> Result<()>,
    ) -> Result<f64> {
        let first = warm_up(runs);
        let mut times = Vec::with_capacity(first + runs);
        for _ in 0..first + runs {
            times.push(self.time(stream, &mut replay)?);
        }
        Ok(median(times.split_off(first)))
    }
}

/// As [`time_node`], for copies that move `bytes` bytes each, every copy between its own buffers.
pub fn time_copy<B: Backend>(stream: &Stream<B>, (bytes, nodes): (u64, u64)) -> Result<f64> {
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
