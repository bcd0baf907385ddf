//! Whole decode steps: the cache's part of a step, for all layers, as one captured graph; and the time of each of its
//! parts.
//!
//! The graph contains the updates with their appends, the indexer from activations to lists, and the gathers of every
//! layer, made by the library's own calls. On request, a second graph has attention in place instead of the gathers,
//! with the same queries in all layers. A further graph for each kind of launch contains the launches of that kind in
//! all layers. Two kinds have no graph of their own: the indexer's queries are `select` less `select_projected`, plus
//! `index_query`; scores and lists are `select_projected` less `index_query`.
//!
//! | file | what it holds |
//! |---|---|
//! | `mod.rs` | the measurements |
//! | `case.rs` | a cache and its load |
//! | `routers.rs` | the routers of its layers |
//! | `row.rs` | the result of a step, and its table |

mod case;
mod routers;
mod row;

use std::time::Instant;

use anyhow::{Error, Result};
use dsv4_kv::device::{Backend, Device, DeviceError, Graph, Memory, NullDevice};
use dsv4_kv::kv_layout::geometry::{BLOCK_TOKENS, LayerKind};
use dsv4_kv::{Bucket, CapturedStep, KvError, Launches, StepRequest};

use super::load::LoadArgs;
use super::timing::{ColdTimer, HOST_RUNS, REPLAYS, median};
use super::trunk::{Filled, Part, Size, queue, queue_layer};
pub use case::{Case, Phase};
use routers::Routers;
pub use row::{Host, Hosts, Kind, Measured, Row, Timed, table};

/// Memory of the device that does nothing: more than any cache needs.
const NULL_BYTES: u64 = 1 << 42;
/// Longest context of the caches, unless a longer one is measured.
const MAX_CONTEXT: u32 = 131_072;

/// All loads of all models.
pub(super) fn cases(load: &LoadArgs) -> Vec<Case> {
    let loads = load
        .context
        .iter()
        .flat_map(|&context| load.batch.iter().map(move |&requests| (context, requests)));
    let case = |model: &String, (context, requests)| Case {
        model: model.clone(),
        context,
        max_context: MAX_CONTEXT,
        requests,
        weight: load.index_weight,
        attention: load.attention,
        attention_cluster: load.attention_cluster,
    };
    let of = |model| loads.clone().map(move |load| case(model, load));
    load.model.iter().flat_map(of).collect()
}

/// Measures both phases of a case, or reports that it does not fit into the memory.
pub(super) fn measure_case<B: Backend>(device: &Device<B>, case: &Case) -> Result<Vec<Row>> {
    match measure_phases(device, case) {
        Err(error) if is_out_of_memory(&error) => {
            Ok(vec![Row { case: case.clone(), measured: Err(format!("does not fit: {error}")) }])
        }
        rows => rows,
    }
}

fn measure_phases<B: Backend>(device: &Device<B>, case: &Case) -> Result<Vec<Row>> {
    let mut setup = Setup::new(device, case)?;
    let mut alone = Setup::new(&NullDevice::null(NULL_BYTES), case)?;
    let mut rows = Vec::new();
    for phase in [Phase::MidWindow, Phase::Boundary] {
        let start = phase.start(case.context);
        setup.filled.advance(start)?;
        alone.filled.advance(start)?;
        let host = Hosts { device: setup.time_host(start)?, own: alone.time_host(start)? };
        let measured = setup.measure(phase, start, host)?;
        rows.push(Row { case: case.clone(), measured: Ok(measured) });
    }
    Ok(rows)
}

/// Whether the device ran out of memory.
fn is_out_of_memory(error: &Error) -> bool {
    let of_device = |error: &DeviceError| matches!(error, DeviceError::OutOfMemory { .. });
    match error.downcast_ref::<KvError>() {
        Some(KvError::Device(error)) => of_device(error),
        _ => error.downcast_ref::<DeviceError>().is_some_and(of_device),
    }
}

/// Graphs of whole layers, which the cache captures.
struct Graphs<B: Backend> {
    step: CapturedStep<B>,
    routed: CapturedStep<B>,
    updates: CapturedStep<B>,
    /// The step with attention in place of the gathers, if it is measured.
    attended: Option<CapturedStep<B>>,
    kinds: Vec<(&'static str, CapturedStep<B>)>,
}

/// The updates of each kind of layer.
const UPDATES: [(&str, [Part; 2]); 3] = [
    ("swa append", [Part::Update(LayerKind::Swa), Part::Append(LayerKind::Swa)]),
    ("csa update", [Part::Update(LayerKind::Csa), Part::Append(LayerKind::Csa)]),
    ("hca update", [Part::Update(LayerKind::Hca), Part::Append(LayerKind::Hca)]),
];
/// The reads of a step after its updates.
const GATHERS: [Part; 4] = [Part::Windows, Part::Select, Part::Entries, Part::All];
/// The reads of layers that are updated.
const READS: [(&str, Part); 6] = [
    ("windows", Part::Windows),
    ("csa gather", Part::Entries),
    ("hca gather", Part::All),
    ("select", Part::Select),
    ("select projected", Part::SelectProjected),
    ("index query", Part::Quantise),
];

/// Attention in place, for the layers of each kind.
const ATTENDS: [(&str, Part); 3] = [
    ("swa attend", Part::Attend(LayerKind::Swa)),
    ("csa attend", Part::Attend(LayerKind::Csa)),
    ("hca attend", Part::Attend(LayerKind::Hca)),
];

/// A cache with its requests, and the routers.
struct Setup<B: Backend> {
    context: u32,
    attention: bool,
    filled: Filled<B>,
    routers: Routers<B>,
}

/// The updates of all layers.
fn updates() -> Vec<Part> {
    UPDATES.iter().flat_map(|(_, parts)| parts).copied().collect()
}

/// All parts of a step except the routers.
pub(super) fn step() -> Vec<Part> {
    updates().into_iter().chain(GATHERS).collect()
}

/// As `step`, with attention in place of the gathers.
fn attended_step() -> Vec<Part> {
    let attends = ATTENDS.map(|(_, part)| part);
    updates().into_iter().chain([Part::Select]).chain(attends).collect()
}

impl<B: Backend> Setup<B> {
    fn new(device: &Device<B>, case: &Case) -> Result<Self> {
        let config = case.config()?;
        let all = case.context / BLOCK_TOKENS;
        let size = Size {
            tokens: case.requests,
            all,
            entry_rows: all.max(config.model.index_topk),
            workspace_bytes: u64::MAX,
            weight: case.weight,
            query_heads: case.query_heads()?,
        };
        let layers = config.model.layers.len();
        let filled = Filled::new(device, config, size)?;
        let routers = Routers::new(&filled.stream, &case.model, layers, case.requests)?;
        Ok(Self { context: case.context, attention: case.attention, filled, routers })
    }

    /// Measures everything of a step in which each request has `start` tokens.
    fn measure(&mut self, phase: Phase, start: u32, host: Hosts) -> Result<Measured> {
        let requests = self.requests(start);
        let bucket = self.bucket();
        let graphs = self.capture(&bucket)?;
        let router = self.capture_router()?;
        let memory = self.memory();
        let reads = READS.into_iter().chain(ATTENDS.into_iter().filter(|_| self.attention));
        let Self { filled: Filled { stream, cache, tensors, .. }, routers, .. } = self;
        let timer = ColdTimer::new(stream.device())?;
        let mut step = cache.begin_step(stream, Launches::Bucket(&bucket), &requests)?;
        step.replay(&graphs.step)?;
        let timed = |nodes: u64, replay: &mut dyn FnMut() -> Result<()>| -> Result<Timed> {
            Ok(Timed { nodes, microseconds: timer.median(stream, REPLAYS, replay)? })
        };
        let mut time =
            |graph: &CapturedStep<B>| timed(graph.nodes(), &mut || Ok(step.repeat(graph)?));
        let whole = time(&graphs.step)?;
        let routed = time(&graphs.routed)?;
        let updates = time(&graphs.updates)?;
        let attended = graphs.attended.as_ref().map(&mut time).transpose()?;
        let mut kinds = Vec::new();
        for (name, graph) in &graphs.kinds {
            kinds.push(Kind { name: (*name).into(), timed: time(graph)? });
        }
        for (name, part) in reads {
            let graph = step.record_reads(memory.clone(), |step| queue(tensors, step, &[part]))?;
            let timed = timed(graph.nodes(), &mut || Ok(graph.replay()?))?;
            kinds.push(Kind { name: name.into(), timed });
        }
        let timed = timed(router.nodes(), &mut || Ok(stream.replay(&router)?))?;
        kinds.push(Kind { name: "router".into(), timed });
        drop(step);
        cache.check_faults(stream)?;
        routers.check(stream)?;
        let kinds = row::alone(&kinds);
        Ok(Measured { phase, step: whole, routed, updates, attended, kinds, host })
    }

    /// One token for each request, which has `start` tokens.
    fn requests(&self, start: u32) -> Vec<StepRequest> {
        let ids = self.filled.ids.iter();
        ids.map(|&id| StepRequest { id, start, tokens: 1 }).collect()
    }

    fn bucket(&self) -> Bucket {
        let (requests, context) = (self.filled.ids.len() as u32, self.context);
        Bucket { tokens: requests, tokens_per_request: 1, requests, context }
    }

    /// All memory that launches of a step touch.
    fn memory(&self) -> Vec<Memory<B>> {
        self.filled.memory().into_iter().chain(self.routers.memory()).collect()
    }

    /// Captures whole layers.
    fn capture(&mut self, bucket: &Bucket) -> Result<Graphs<B>> {
        let (all, step) = (updates(), step());
        let mut kinds = Vec::new();
        for (name, parts) in UPDATES {
            kinds.push((name, self.capture_parts(bucket, &parts, false)?));
        }
        let attended = self.attention.then(|| self.capture_parts(bucket, &attended_step(), false));
        Ok(Graphs {
            attended: attended.transpose()?,
            step: self.capture_parts(bucket, &step, false)?,
            routed: self.capture_parts(bucket, &step, true)?,
            updates: self.capture_parts(bucket, &all, false)?,
            kinds,
        })
    }

    fn capture_parts(
        &mut self,
        bucket: &Bucket,
        parts: &[Part],
        routed: bool,
    ) -> Result<CapturedStep<B>> {
        let Self { filled, routers, .. } = self;
        filled.capture(bucket, routers.memory(), |tensors, layers, (layer, kind)| {
            queue_layer(tensors, layers, (layer, kind), parts)?;
            if routed { routers.queue(layers.stream(), tensors, layer) } else { Ok(()) }
        })
    }

    /// Captures the routers of all layers.
    fn capture_router(&mut self) -> Result<Graph<B>> {
        let memory = self.memory();
        let Self { filled: Filled { stream, cache, tensors, .. }, routers, .. } = self;
        let layers = cache.schema().layers.iter();
        stream.capture(memory, || {
            layers.clone().try_for_each(|of| routers.queue(stream, tensors, of.layer))
        })
    }

    /// The host's time for the eager step, without waiting for the device.
    fn time_host(&mut self, start: u32) -> Result<Host> {
        let requests = self.requests(start);
        let Filled { stream, cache, tensors, .. } = &mut self.filled;
        let step_parts = step();
        let (mut begin, mut launches) = (Vec::new(), Vec::new());
        for number in 0..2 * HOST_RUNS {
            stream.synchronize()?;
            let started = Instant::now();
            let mut step = cache.begin_step(stream, Launches::Eager, &requests)?;
            let begun = Instant::now();
            queue(tensors, &mut step, &step_parts)?;
            let queued = Instant::now();
            if number >= HOST_RUNS {
                begin.push((begun - started).as_secs_f64() * 1e6);
                launches.push((queued - begun).as_secs_f64() * 1e6);
            }
        }
        Ok(Host { begin_microseconds: median(begin), microseconds: median(launches) })
    }
}
