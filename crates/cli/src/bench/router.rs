//! The router: selection and hash lookup from logits, and decode batches from hidden states.
//!
//! Every node of a graph is a layer of its own, which shares no logits, gate or hidden states with other nodes.

use anyhow::Result;
use dsv4_kv::device::{Backend, Buffer, Device, Memory, Stream};
use dsv4_kv::kv_layout::router::DECODE_TOKENS;
use dsv4_kv_router::ops::{self, DecodeScratch, ExpertSelection, GateProduct, HashTable, Routing};
use dsv4_kv_router::{RouterError, Selection};
use half::bf16;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::inputs::{ensure_none_refused, part, repeated};
use super::timing::{Measurement, measurement, nodes_for};
use super::work::Work;

/// Experts per token, in both released models.
const SELECTED: u32 = 6;
/// Number of token ids of both released models.
const VOCABULARY: u32 = 129_280;
/// Number of random values; all inputs are slices of repetitions of them.
const PATTERN: usize = 1 << 22;

/// Pairs: experts of a layer, number of tokens.
const FROM_LOGITS: [(u32, u32); 6] =
    [(256, 32), (256, 256), (256, 4096), (384, 32), (384, 256), (384, 4096)];
/// Width of the hidden state, experts, and tokens of a batch that is larger than a decode batch.
const LOGITS: [(u32, u32, u32); 6] = [
    (4096, 256, 128),
    (4096, 256, 512),
    (4096, 256, 4096),
    (7168, 384, 128),
    (7168, 384, 512),
    (7168, 384, 4096),
];
/// Width of the hidden state, experts, and tokens of a decode batch.
const DECODE: [(u32, u32, u32); 8] = [
    (4096, 256, 1),
    (4096, 256, 32),
    (4096, 256, 33),
    (4096, 256, 64),
    (7168, 384, 1),
    (7168, 384, 32),
    (7168, 384, 33),
    (7168, 384, 64),
];

pub(super) fn works<B: Backend>(device: &Device<B>) -> Vec<Work<'_, Measurement>> {
    let mut works = Vec::new();
    for hash in [false, true] {
        for (experts, tokens) in FROM_LOGITS {
            let case = Case { hash, hidden: 0, experts, tokens };
            works.push(Work::row(case.name(), move || case.measure(device)));
        }
        for (hidden, experts, tokens) in DECODE {
            let case = Case { hash, hidden, experts, tokens };
            works.push(Work::row(case.name(), move || case.measure(device)));
        }
    }
    for (hidden, experts, tokens) in LOGITS {
        let case = Case { hash: false, hidden, experts, tokens };
        works.push(Work::row(case.name(), move || case.measure(device)));
    }
    works
}

/// One measurement.
#[derive(Clone, Copy)]
pub(super) struct Case {
    pub hash: bool,
    /// Width of the hidden state; 0 if the router starts from logits.
    pub hidden: u32,
    pub experts: u32,
    pub tokens: u32,
}

impl Case {
    fn name(self) -> String {
        let name = match (self.hash, self.hidden) {
            (false, 0) => "activation_topk",
            (true, 0) => "hash_router",
            _ if self.tokens > DECODE_TOKENS => "router_logits",
            (false, _) => "dense_router_decode",
            (true, _) => "hash_router_decode",
        };
        name.to_owned()
    }

    fn size(self) -> String {
        let Self { hidden, experts, tokens, .. } = self;
        if hidden == 0 {
            format!("{tokens} tokens, {experts} experts")
        } else {
            format!("{tokens} tokens, {hidden} x {experts}")
        }
    }

    /// Bytes that one launch must move: token ids, the logits or the inputs from which they are computed, and the
    /// result. A hash layer reads only the logits of the listed experts, and their row of the table.
    fn bytes(self) -> u64 {
        let [hidden, experts, tokens] = [self.hidden, self.experts, self.tokens].map(u64::from);
        let selected = u64::from(SELECTED);
        let lookup = if self.hash { tokens * selected * 4 } else { experts * 4 };
        let logits = match (self.hash, self.hidden) {
            (false, 0) => tokens * experts * 4,
            (true, 0) => tokens * selected * 4,
            _ => (tokens + experts) * hidden * 2,
        };
        if hidden > 0 && tokens > DECODE_TOKENS.into() {
            return logits + tokens * experts * 4;
        }
        tokens * 4 + lookup + logits + tokens * selected * 8
    }

    pub fn measure<B: Backend>(self, device: &Device<B>) -> Result<Measurement> {
        let (nodes, bytes) = (nodes_for(self.bytes()), self.bytes());
        let inputs = Inputs::new(device, self, nodes)?;
        let record = || (0..nodes).try_for_each(|node| inputs.launch(self, node));
        let graph = inputs.stream.capture(inputs.memory(), record)?;
        let result = measurement(device, (self.name(), self.size()), (bytes, nodes), &graph)?;
        ensure_none_refused(&inputs.stream, &inputs.faults)?;
        Ok(result)
    }
}

/// The inputs of the nodes of a graph.
struct Inputs<B: Backend> {
    stream: Stream<B>,
    nodes: u64,
    logits: Buffer<B, f32>,
    x: Buffer<B, bf16>,
    gate: Buffer<B, bf16>,
    bias: Buffer<B, f32>,
    table: Buffer<B, i32>,
    token: Buffer<B, i32>,
    activations: Buffer<B, f32>,
    arrivals: Buffer<B, u32>,
    ids: Buffer<B, i32>,
    weights: Buffer<B, f32>,
    faults: Buffer<B, u32>,
}

impl<B: Backend> Inputs<B> {
    fn new(device: &Device<B>, case: Case, nodes: u64) -> Result<Self> {
        let [hidden, experts, tokens] = [case.hidden, case.experts, case.tokens].map(u64::from);
        let stream = device.stream()?;
        let mut random = SmallRng::seed_from_u64(1);
        let logits: Vec<f32> = (0..PATTERN).map(|_| random.random_range(-4.0..4.0)).collect();
        let halves: Vec<bf16> = logits.iter().map(|&x| bf16::from_f32(x / 64.0)).collect();
        let mut integers = |count: u64, most: u32| -> Vec<i32> {
            (0..count).map(|_| random.random_range(0..most as i32)).collect()
        };
        let table = integers(u64::from(VOCABULARY * SELECTED), case.experts);
        let token = integers(nodes * tokens, VOCABULARY);
        // A case does not read the inputs that it does not need, but every buffer must exist.
        let width = hidden.max(1);
        let rows = if hidden == 0 || tokens > DECODE_TOKENS.into() {
            nodes * tokens * experts
        } else {
            nodes
        };
        let selected = nodes * tokens * u64::from(SELECTED);
        Ok(Self {
            nodes,
            logits: repeated(&stream, "logits", rows, &logits)?,
            x: repeated(&stream, "hidden states", nodes * tokens * width, &halves)?,
            gate: repeated(&stream, "gates", nodes * experts * width, &halves)?,
            bias: repeated(&stream, "biases", nodes * experts, &logits)?,
            table: stream.upload_new("table", &table)?,
            token: stream.upload_new("tokens", &token)?,
            activations: device.allocate("activations", nodes * 64 * experts)?,
            arrivals: device.allocate("arrivals", 8)?,
            ids: device.allocate("ids", selected)?,
            weights: device.allocate("weights", selected)?,
            faults: device.allocate("faults", 1)?,
            stream,
        })
    }

    fn memory(&self) -> Vec<Memory<B>> {
        let mut all = [&self.logits, &self.bias, &self.activations, &self.weights]
            .map(Buffer::memory)
            .to_vec();
        all.extend([&self.x, &self.gate].map(Buffer::memory));
        all.extend([&self.table, &self.token, &self.ids].map(Buffer::memory));
        all.extend([&self.arrivals, &self.faults].map(Buffer::memory));
        all
    }

    fn launch(&self, case: Case, node: u64) -> Result<(), RouterError> {
        let Case { hash, hidden, experts, tokens } = case;
        let (stream, nodes) = (&self.stream, self.nodes);
        let selection = Selection::new(experts, SELECTED, 1.5)?;
        let choice = if hash {
            ExpertSelection::Table(HashTable { table: self.table.view(), vocabulary: VOCABULARY })
        } else {
            ExpertSelection::Bias(part(&self.bias, node, nodes).into())
        };
        let routing = Routing {
            selection,
            choice: &choice,
            tokens,
            token: &part(&self.token, node, nodes),
            ids: &part(&self.ids, node, nodes),
            weights: &part(&self.weights, node, nodes),
            faults: &self.faults,
        };
        let logits = || part(&self.logits, node, nodes);
        if hidden == 0 {
            return ops::route_logits(stream, &routing, &logits());
        }
        let (x, gate) = (&part(&self.x, node, nodes), &part(&self.gate, node, nodes));
        let product = GateProduct { x, gate, hidden };
        if tokens > DECODE_TOKENS {
            return ops::gate_logits(stream, selection, tokens, &product, &logits());
        }
        let activations = part(&self.activations, node, nodes);
        let scratch = DecodeScratch { activations, arrivals: self.arrivals.clone() };
        ops::route_decode(stream, &routing, &product, &scratch)
    }
}
