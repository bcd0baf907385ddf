//! One rank: a cache, and generated tensors in place of a model's.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::Result;
use dsv4_kv::device::{Backend, Buffer, Device, Stream, bf16};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::kv_layout::geometry::LayerKind;
use dsv4_kv::step::{
    AttentionTensors, CompressorInputs, CsaInputs, EntryLists, HcaInputs, QueryForm,
};
use dsv4_kv::{
    Accepted, BlockId, CacheConfig, KvCacheManager, KvError, Launches, LayerId, RequestId, Step,
    StepRequest,
};

/// Heads of the model.
pub const HEADS: u32 = 32;
/// A layer of each kind.
const LAYERS: [LayerKind; 3] = [LayerKind::Swa, LayerKind::Csa, LayerKind::Hca];
/// Most tokens of a request in a step.
const CHUNK: u32 = 64;
/// Tokens of the first prompt; each further one is longer.
const PROMPT: u32 = 130;
/// Tokens that are decoded after each prompt; only these attend.
const DECODED: u32 = 5;
/// Elements of a list of entries. No request has as many entries.
const LISTED: u32 = 128;

/// The work of a rank.
pub struct Work<'w> {
    /// Its requests, as numbers from which their tensors are generated.
    pub requests: &'w [u64],
    /// Its heads of attention.
    pub heads: Range<u32>,
}

/// A query: request, position and layer.
pub type Query = (u64, u32, u32);

/// The results of a rank.
#[derive(Debug, Default)]
pub struct Outcome {
    /// All bytes of each request.
    pub states: Vec<Vec<u8>>,
    /// The block table of each request after each step.
    pub tables: Vec<Vec<Vec<BlockId>>>,
    /// The attention of the rank's heads for each query, `[heads, 512]` BF16, as bits.
    pub attended: BTreeMap<Query, Vec<u16>>,
}

/// A pseudorandom number between -1 and 1, which depends on all elements of `what`.
fn noise(what: [u64; 4]) -> f32 {
    let mut mixed = 0x9E37_79B9_7F4A_7C15_u64;
    for number in what {
        mixed = (mixed ^ number).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed ^= mixed >> 29;
    }
    (mixed >> 40) as f32 / (1 << 23) as f32 - 1.0
}

/// A compressor's weights, and its projections of a step's tokens.
struct Compressor<B: Backend> {
    columns: u64,
    kv: Buffer<B, f32>,
    gate: Buffer<B, f32>,
    ape: Buffer<B, f32>,
    norm: Buffer<B, f32>,
}

impl<B: Backend> Compressor<B> {
    /// For windows of `ratio` tokens, with `columns` projected values per token and entries of `channels` channels.
    fn new(stream: &Stream<B>, (ratio, columns, channels): (u64, u64, u64)) -> Result<Self> {
        let (device, tokens) = (stream.device(), u64::from(max_step_tokens()));
        let [kv, gate] = ["keys", "gates"].map(|name| device.allocate(name, tokens * columns));
        let [ape, norm] = [("biases", ratio * columns), ("norm", channels)]
            .map(|(name, elements)| device.allocate::<f32>(name, elements));
        let (ape, norm) = (ape?, norm?);
        for (weights, number) in [(&ape, 1), (&norm, 2)] {
            let values: Vec<_> =
                (0..weights.len()).map(|at| noise([number, at, columns, ratio])).collect();
            stream.upload(&values, weights, 0)?;
        }
        Ok(Self { columns, kv: kv?, gate: gate?, ape, norm })
    }

    /// Uploads the projections of a step's tokens.
    fn load(&self, stream: &Stream<B>, tokens: &[(u64, u32)], layer: u64) -> Result<(), KvError> {
        for (to, number) in [(&self.kv, 3), (&self.gate, 4)] {
            let of = |&(request, position): &(u64, u32)| {
                let what = [request, position.into(), layer * 8 + number];
                let at = |column| noise([what[0], what[1], what[2], column]);
                (0..self.columns).map(at).collect::<Vec<_>>()
            };
            stream.upload(&tokens.iter().flat_map(of).collect::<Vec<_>>(), to, 0)?;
        }
        Ok(())
    }

    fn inputs(&self) -> CompressorInputs<'_, B> {
        let Self { kv, gate, ape, norm, .. } = self;
        CompressorInputs { kv, gate, ape, norm }
    }
}

/// A rank.
struct Rank<B: Backend> {
    cache: KvCacheManager<B>,
    stream: Stream<B>,
    tensors: Tensors<B>,
}

/// The tensors that a model would give the cache, and those of attention.
struct Tensors<B: Backend> {
    /// Window rows of a step; every layer reuses them.
    rows: Buffer<B, bf16>,
    csa: [Compressor<B>; 2],
    hca: Compressor<B>,
    heads: Range<u32>,
    query: Buffer<B, bf16>,
    sinks: Buffer<B, f32>,
    list: Buffer<B, i32>,
    out: Buffer<B, bf16>,
}

fn max_step_tokens() -> u32 {
    4 * CHUNK
}

impl<B: Backend> Rank<B> {
    fn new(device: &Device<B>, heads: Range<u32>) -> Result<Self> {
        let tiny = ModelConfig::preset("tiny").expect("a preset");
        let model = ModelConfig { layers: LAYERS.to_vec(), mtp_layers: 0, ..tiny };
        let config = CacheConfig {
            max_requests: 4,
            num_blocks: 16,
            max_context: 512,
            max_step_tokens: max_step_tokens(),
            ..CacheConfig::new(model)
        };
        let stream = device.stream()?;
        let count = u64::from(heads.end - heads.start);
        let sinks = device.allocate("sinks", count)?;
        let values: Vec<_> = heads.clone().map(|head| noise([5, head.into(), 0, 0])).collect();
        stream.upload(&values, &sinks, 0)?;
        let tensors = Tensors {
            rows: device.allocate("rows", u64::from(max_step_tokens()) * 512)?,
            csa: [
                Compressor::new(&stream, (4, 1024, 512))?,
                Compressor::new(&stream, (4, 256, 128))?,
            ],
            hca: Compressor::new(&stream, (128, 512, 512))?,
            query: device.allocate("query", count * 512)?,
            list: device.allocate("list", LISTED.into())?,
            out: device.allocate("results", count * 512)?,
            heads,
            sinks,
        };
        Ok(Self { cache: KvCacheManager::new(device.clone(), config)?, stream, tensors })
    }

    /// Runs a step of `requests`. `tokens`: request and position of each token; `attending`: indices of those that
    /// attend.
    fn step(
        &mut self,
        requests: &[StepRequest],
        tokens: &[(u64, u32)],
        attending: &[usize],
        outcome: &mut Outcome,
    ) -> Result<()> {
        let Self { cache, stream, tensors } = self;
        let mut step = cache.begin_step(stream, Launches::Eager, requests)?;
        for (layer, kind) in step.layer_kinds() {
            tensors.load(stream, (layer, kind), tokens)?;
            tensors.run(&mut step, (layer, kind), (tokens, attending), outcome)?;
        }
        let accepted: Vec<_> =
            requests.iter().map(|request| Accepted::count(request.id, request.tokens)).collect();
        step.commit(&accepted)?;
        Ok(())
    }

    /// All bytes of a request.
    fn state(&mut self, id: RequestId) -> Result<Vec<u8>> {
        let Self { cache, stream, .. } = self;
        let mut staging = cache.new_transfer_staging()?;
        let mut export = cache.export(stream, &mut staging, id)?;
        let mut bytes = vec![0; export.layout().bytes(export.positions()) as usize];
        export.all(&mut bytes)?;
        Ok(bytes)
    }
}

impl<B: Backend> Tensors<B> {
    /// Uploads the window rows and projections of a step's tokens in one layer.
    fn load(
        &self,
        stream: &Stream<B>,
        (layer, kind): (LayerId, LayerKind),
        tokens: &[(u64, u32)],
    ) -> Result<(), KvError> {
        let number = layer.0.into();
        let row = |&(request, position): &(u64, u32)| {
            let at = |channel| noise([request, position.into(), number, channel]);
            (0..512).map(at).map(bf16::from_f32).collect::<Vec<_>>()
        };
        stream.upload(&tokens.iter().flat_map(row).collect::<Vec<_>>(), &self.rows, 0)?;
        match kind {
            LayerKind::Swa => Ok(()),
            LayerKind::Csa => self.csa.iter().try_for_each(|of| of.load(stream, tokens, number)),
            LayerKind::Hca => self.hca.load(stream, tokens, number),
        }
    }

    /// Runs a layer: update, attention of the tokens in `attending`, append.
    fn run(
        &self,
        step: &mut Step<'_, B>,
        (layer, kind): (LayerId, LayerKind),
        (tokens, attending): (&[(u64, u32)], &[usize]),
        outcome: &mut Outcome,
    ) -> Result<()> {
        let Self { rows, csa, hca, list, out, .. } = self;
        let stream = step.stream().clone();
        let mut each = |attend: &mut dyn FnMut(Range<u32>) -> Result<(), KvError>| -> Result<()> {
            for &at in attending {
                let (request, position) = tokens[at];
                self.ask(&stream, (request, position, layer.0))?;
                attend(at as u32..at as u32 + 1)?;
                let mut heads = vec![bf16::ZERO; out.len() as usize];
                stream.download(out, 0, &mut heads)?;
                let bits = heads.into_iter().map(bf16::to_bits).collect();
                outcome.attended.insert((request, position, layer.0), bits);
            }
            Ok(())
        };
        let heads = self.heads();
        match kind {
            LayerKind::Swa => {
                let updated = step.swa(layer)?.update(rows)?;
                each(&mut |queries| updated.attend(queries, &heads))?;
                updated.append()?;
            }
            LayerKind::Csa => {
                let [main, index] = csa.each_ref().map(Compressor::inputs);
                let updated = step.csa(layer)?.update(&CsaInputs { kv: rows, main, index })?;
                each(&mut |queries| {
                    let lists = EntryLists { queries: queries.clone(), k: LISTED, indices: list };
                    updated.attend(queries, &lists, &heads)
                })?;
                updated.append()?;
            }
            LayerKind::Hca => {
                let updated =
                    step.hca(layer)?.update(&HcaInputs { kv: rows, main: hca.inputs() })?;
                each(&mut |queries| updated.attend(queries, &heads))?;
                updated.append()?;
            }
        }
        Ok(())
    }

    /// Uploads a query's heads, and a list of all entries that it sees, the latest first.
    fn ask(&self, stream: &Stream<B>, (request, position, layer): Query) -> Result<(), KvError> {
        let channels = self.heads.clone().flat_map(|head| (0..512).map(move |at| (head, at)));
        let value = |(head, channel): (u32, u32)| {
            let place = (u64::from(layer) << 32) + u64::from(head) * 512 + u64::from(channel);
            bf16::from_f32(noise([request, position.into(), 6, place]))
        };
        stream.upload(&channels.map(value).collect::<Vec<_>>(), &self.query, 0)?;
        let mut list: Vec<_> = (0..(position + 1) as i32 / 4).rev().collect();
        list.resize(LISTED as usize, -1);
        Ok(stream.upload(&list, &self.list, 0)?)
    }

    fn heads(&self) -> AttentionTensors<'_, B> {
        let Self { heads, query, sinks, out, .. } = self;
        let heads = heads.end - heads.start;
        AttentionTensors { heads, query, form: QueryForm::Raw, sinks, out, lse: None }
    }
}

/// Computes the prompts in chunks, then decodes one token of each request per step.
pub fn run<B: Backend>(device: &Device<B>, work: &Work<'_>) -> Result<Outcome> {
    let mut rank = Rank::new(device, work.heads.clone())?;
    let mut outcome = Outcome::default();
    let ids: Vec<_> = work.requests.iter().map(|_| rank.cache.admit()).collect::<Result<_, _>>()?;
    // The length depends on the request alone, so that it is the same on every rank.
    let prompt = |request: u64| PROMPT + 3 * request as u32;
    let mut done = vec![0; ids.len()];
    loop {
        let (mut requests, mut tokens, mut attending) = (Vec::new(), Vec::new(), Vec::new());
        for ((&id, &request), done) in ids.iter().zip(work.requests).zip(&mut done) {
            let left = (prompt(request) + DECODED).saturating_sub(*done);
            let in_prompt = prompt(request).saturating_sub(*done);
            let count = if in_prompt > 0 { in_prompt.min(CHUNK) } else { left.min(1) };
            if in_prompt == 0 && count > 0 {
                attending.push(tokens.len());
            }
            if count > 0 {
                requests.push(StepRequest { id, start: *done, tokens: count });
                tokens.extend((*done..*done + count).map(|position| (request, position)));
                *done += count;
            }
        }
        if requests.is_empty() {
            break;
        }
        rank.step(&requests, &tokens, &attending, &mut outcome)?;
        let tables = ids.iter().map(|&id| rank.cache.block_table(id));
        outcome.tables.push(tables.collect::<Result<_, _>>()?);
    }
    rank.cache.check_faults(&rank.stream)?;
    outcome.states = ids.into_iter().map(|id| rank.state(id)).collect::<Result<_>>()?;
    Ok(outcome)
}
