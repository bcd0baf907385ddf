//! A cache of all kinds of layers fed with token histories, and what it must hold afterwards.

use std::ops::Range;

use dsv4_kv::device::{Backend, Buffer, Device, Memory, Stream};
use dsv4_kv::handle::Projected;
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::schema::PoolKind;
use dsv4_kv::{
    CacheConfig, IndexerWorkspace, KvCacheManager, KvError, LayerCacheHandle, LayerId, RequestId,
    StepRequest,
};
use dsv4_kv_oracle::hadamard::hadamard;
use dsv4_kv_oracle::index::{EncodedKey, KeyFormat};
use dsv4_kv_oracle::number::{bf16_nearest, bf16_value};
use dsv4_kv_oracle::row::EncodedRow;
use kv_layout::geometry::{INDEX_DIM, LayerKind, StateStream};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::{DATA_BYTES, MainFormat};

use crate::inputs::{assert_same, download, oracle, plane_row, rows, upload};
use crate::model::{History, OnDevice, assert_rounds, shape, window};
use crate::rings::assert_ring;

/// What an element of a step's tensors is where there is no token: NaN in every format.
const PADDING: u8 = 0xFF;
/// Most tokens of a step of [`config`].
pub const STEP_TOKENS: u32 = 512;

/// The layers of the preset `tiny`.
#[must_use]
pub fn tiny() -> Vec<LayerKind> {
    ModelConfig::preset("tiny").unwrap().layers
}

/// Formats of a cache.
pub type Formats = (MainFormat, IndexFormat);

/// A small cache of a model with these kinds of layers.
pub fn config(layers: &[LayerKind], formats: Formats, max_requests: u32) -> CacheConfig {
    let tiny = ModelConfig::preset("tiny").unwrap();
    CacheConfig {
        main_format: formats.0,
        index_format: formats.1,
        max_requests,
        num_blocks: 5 * max_requests,
        max_context: 640,
        max_step_tokens: STEP_TOKENS,
        ..CacheConfig::smallest(ModelConfig { layers: layers.to_vec(), ..tiny })
    }
}

/// The compressors of a layer.
pub fn compressors(kind: LayerKind) -> &'static [StateStream] {
    match kind {
        LayerKind::Swa => &[],
        LayerKind::Csa => &[StateStream::CsaMain, StateStream::CsaIndex],
        LayerKind::Hca => &[StateStream::Hca],
    }
}

/// One request's tokens as one layer sees them.
struct Seen {
    kind: LayerKind,
    /// `[tokens]` of `[512]`: keys of the sliding window.
    rows: Vec<Vec<u16>>,
    /// One per compressor; the weights are those of every story.
    histories: Vec<History>,
}

/// What a request's blocks hold in one layer.
pub struct Stored {
    /// The compressed entries, oldest first.
    pub entries: Vec<EncodedRow>,
    /// The indexer keys, oldest first.
    pub keys: Vec<EncodedKey>,
}

/// The tokens of one request, as each layer sees them.
pub struct Story {
    layers: Vec<Seen>,
    tokens: usize,
}

impl Story {
    /// A story of random tokens; stories of different seeds share nothing but the weights.
    pub fn random(layers: &[LayerKind], tokens: usize, seed: u64) -> Self {
        let layers = layers.iter().zip(1000..).map(|(&kind, layer)| {
            let history = |(&stream, at): (&StateStream, u64)| {
                let History { ape, norm, .. } = History::random(stream, 1, 10 * layer + at);
                let own = History::random(stream, tokens, 10 * (1000 * seed + layer) + at);
                History { ape, norm, ..own }
            };
            let histories = compressors(kind).iter().zip(0..).map(history).collect();
            Seen { kind, rows: rows(tokens, 1000 * seed + layer), histories }
        });
        Self { layers: layers.collect(), tokens }
    }

    /// Tokens of the story.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The sliding-window keys of a layer, `[tokens]` of `[512]` BF16.
    #[must_use]
    pub fn window_rows(&self, layer: LayerId) -> &[Vec<u16>] {
        &self.layers[layer.0 as usize].rows
    }

    /// What the compressors of a layer read.
    #[must_use]
    pub fn histories(&self, layer: LayerId) -> &[History] {
        &self.layers[layer.0 as usize].histories
    }

    /// What each layer stores of the story: its compressors run alone over all of it in one chunk,
    /// their entries are explained by the oracle's, and the oracle encodes them.
    pub fn stored<B: Backend>(&self, device: &Device<B>, formats: Formats) -> Vec<Stored> {
        let (main, index) = (oracle(formats.0), KeyFormat::from_name(formats.1.name()).unwrap());
        let of_layer = |seen: &Seen| {
            let mut stored = Stored { entries: Vec::new(), keys: Vec::new() };
            for history in &seen.histories {
                let entries = entries_alone(device, history);
                if history.stream == StateStream::CsaIndex {
                    stored.keys = entries.iter().map(|key| index.encode(&rotated(key))).collect();
                } else {
                    stored.entries = entries.iter().map(|entry| main.encode(entry)).collect();
                }
            }
            stored
        };
        self.layers.iter().map(of_layer).collect()
    }
}

/// The entries of a history fed in one chunk to a compressor of its own.
pub fn entries_alone<B: Backend>(device: &Device<B>, history: &History) -> Vec<Vec<u16>> {
    let compressor = OnDevice::new(device, history, 1, window(history.stream));
    let entries = compressor.feed(history, [history.tokens()]);
    assert_eq!(entries.len(), history.tokens() / shape(history.stream).ratio);
    for (i, entry) in entries.iter().enumerate() {
        let want: Vec<f32> = history.oracle().entry(i).iter().map(|&x| x as f32).collect();
        assert_rounds(entry, &want, 5e-6, &format!("{:?} entry {i}", history.stream));
    }
    entries
}

/// An indexer key after the Hadamard rotation: by f32 additions of neighbours at distance 1, 2, .. 64, as
/// kernels do it, which is explained by the exact rotation but may round to the other of two values.
pub fn rotated(key: &[u16]) -> Vec<u16> {
    const SCALE: f32 = 0.088_388_35; // 1 / sqrt(128)
    let exact: Vec<f64> = key.iter().map(|&bits| bf16_value(bits)).collect();
    let mut values: Vec<f32> = exact.iter().map(|&value| value as f32).collect();
    for distance in [1, 2, 4, 8, 16, 32, 64] {
        for low in (0..key.len()).filter(|low| low & distance == 0) {
            let (a, b) = (values[low], values[low + distance]);
            (values[low], values[low + distance]) = (a + b, a - b);
        }
    }
    let rotated: Vec<u16> = values.iter().map(|value| bf16_nearest(value * SCALE)).collect();
    let exact: Vec<f32> = hadamard(&exact).iter().map(|&value| value as f32).collect();
    assert_rounds(&rotated, &exact, 2e-6, "the rotation of an indexer key");
    rotated
}

/// What one request does in a step: tokens `start..` of its story, then, if the step drafts, tokens
/// of another story at the positions that follow.
pub struct Part<'a> {
    /// The request.
    pub id: RequestId,
    /// What its tokens are, in order: ranges of stories.
    pub pieces: Vec<(&'a Story, Range<usize>)>,
}

impl<'a> Part<'a> {
    /// Tokens of one story.
    #[must_use]
    pub fn new(id: RequestId, story: &'a Story, tokens: Range<usize>) -> Self {
        Self { id, pieces: vec![(story, tokens)] }
    }

    /// What the cache is told.
    ///
    /// # Panics
    /// If there are no pieces.
    #[must_use]
    pub fn request(&self) -> StepRequest {
        let (start, end) = (self.pieces[0].1.start, self.pieces.last().unwrap().1.end);
        StepRequest { id: self.id, start: start as u32, tokens: (end - start) as u32 }
    }
}

/// A compressor's weights, and its projections of the tokens of a step.
struct ProjectedInputs<B: Backend> {
    kv: Buffer<B, f32>,
    gate: Buffer<B, f32>,
    ape: Buffer<B, f32>,
    norm: Buffer<B, f32>,
}

impl<B: Backend> ProjectedInputs<B> {
    fn new(stream: &Stream<B>, of: StateStream, seed: u64) -> Self {
        let History { ape, norm, .. } = History::random(of, 1, seed);
        let elements = u64::from(STEP_TOKENS) * shape(of).columns() as u64;
        Self {
            kv: stream.device().allocate("key projections", elements).unwrap(),
            gate: stream.device().allocate("gate projections", elements).unwrap(),
            ape: upload(stream, &ape),
            norm: upload(stream, &norm),
        }
    }

    fn projected(&self) -> Projected<'_, B> {
        let Self { kv, gate, ape, norm } = self;
        Projected { kv, gate, ape, norm }
    }
}

/// One layer's tensors of a step, at fixed addresses.
struct LayerInputs<B: Backend> {
    kind: LayerKind,
    rows: Buffer<B, u16>,
    compressors: Vec<ProjectedInputs<B>>,
}

/// A cache, and the tensors of its steps.
pub struct Fed<B: Backend> {
    /// The cache.
    pub manager: KvCacheManager<B>,
    /// The stream of its steps.
    pub stream: Stream<B>,
    layers: Vec<LayerInputs<B>>,
}

impl<B: Backend> Fed<B> {
    /// An empty cache whose pools are poisoned.
    pub fn new(device: &Device<B>, config: CacheConfig) -> Self {
        let stream = device.stream().unwrap();
        let layers = config.model.layers.iter().zip(1000..).map(|(&kind, layer)| {
            let streams = compressors(kind).iter().zip(0..);
            LayerInputs {
                kind,
                rows: device.allocate("kv", u64::from(STEP_TOKENS) * 512).unwrap(),
                compressors: streams
                    .map(|(&of, at)| ProjectedInputs::new(&stream, of, 10 * layer + at))
                    .collect(),
            }
        });
        let layers = layers.collect();
        let manager = KvCacheManager::new(device.clone(), config).unwrap();
        let fed = Self { manager, stream, layers };
        fed.poison();
        fed
    }

    /// Overwrites every pool, states with NaN: what nobody wrote since cannot go unnoticed.
    pub fn poison(&self) {
        for (_, pool) in self.pools() {
            self.stream.fill(&pool, 0xFF).unwrap();
        }
    }

    /// All layers.
    pub fn layer_ids(&self) -> impl Iterator<Item = LayerId> + use<B> {
        (0..self.layers.len() as u32).map(LayerId)
    }

    /// The tensors of a layer's update: of its main compressor, and of its indexer's.
    pub fn projected(&self, layer: LayerId) -> Vec<Projected<'_, B>> {
        let compressors = &self.layers[layer.0 as usize].compressors;
        compressors.iter().map(ProjectedInputs::projected).collect()
    }

    /// The step's sliding-window keys of a layer.
    pub fn rows(&self, layer: LayerId) -> &Buffer<B, u16> {
        &self.layers[layer.0 as usize].rows
    }

    /// Memory of all tensors of a step, for a graph to retain.
    pub fn inputs(&self) -> Vec<Memory<B>> {
        let of_layer = |layer: &LayerInputs<B>| {
            let projected = layer.compressors.iter().flat_map(|inputs| {
                let ProjectedInputs { kv, gate, ape, norm } = inputs;
                [kv, gate, ape, norm].map(Buffer::memory)
            });
            projected.chain([layer.rows.memory()]).collect::<Vec<_>>()
        };
        self.layers.iter().flat_map(of_layer).collect()
    }

    /// Prepares a step and brings its tensors in place, with padding up to `bucket` tokens.
    pub fn prepare(&mut self, parts: &[Part<'_>], bucket: u32) {
        let step: Vec<_> = parts.iter().map(Part::request).collect();
        let plan = self.manager.prepare_forward(&self.stream, &step).unwrap();
        assert!(plan.tokens <= bucket);
        self.load(parts, bucket);
    }

    /// Brings the tensors of a prepared step in place, with padding up to `bucket` tokens.
    pub fn load(&self, parts: &[Part<'_>], bucket: u32) {
        let stream = &self.stream;
        let pieces = || parts.iter().flat_map(|part| part.pieces.iter().cloned());
        for (layer, inputs) in self.layers.iter().enumerate() {
            let of_layer = |(story, range): (&_, Range<usize>)| {
                let story: &Story = story;
                story.layers[layer].rows[range].concat()
            };
            let mut kv: Vec<u16> = pieces().flat_map(of_layer).collect();
            kv.resize(bucket as usize * 512, u16::from_le_bytes([PADDING; 2]));
            stream.upload(&kv, &inputs.rows, 0).unwrap();
            for (compressor, to) in inputs.compressors.iter().enumerate() {
                let (mut kv, mut gate) = (Vec::new(), Vec::new());
                for (story, range) in pieces() {
                    let history = &story.layers[layer].histories[compressor];
                    let projections = history.projections(range);
                    kv.extend(projections.0);
                    gate.extend(projections.1);
                }
                let columns = shape(compressors(inputs.kind)[compressor]).columns();
                for (mut values, to) in [(kv, &to.kv), (gate, &to.gate)] {
                    values.resize(bucket as usize * columns, f32::from_le_bytes([PADDING; 4]));
                    stream.upload(&values, to, 0).unwrap();
                }
            }
        }
    }

    /// Queues the work lists and every layer's update, in launches of `bucket` tokens.
    pub fn update(&self, bucket: u32) -> Result<(), KvError> {
        self.manager.build_plan_for(&self.stream, bucket)?;
        for (layer, inputs) in self.layer_ids().zip(&self.layers) {
            let handle = self.manager.layer_for(layer, bucket)?;
            handle.append_swa(&self.stream, &inputs.rows)?;
            match self.projected(layer).as_slice() {
                [] => {}
                [hca] => handle.update_hca(&self.stream, hca)?,
                [main, index, ..] => handle.update_csa(&self.stream, main, index)?,
            }
        }
        Ok(())
    }

    /// Queues every layer's update of a step of one token a request, in one launch a layer.
    pub fn update_fused(&self, bucket: u32) -> Result<(), KvError> {
        for (layer, inputs) in self.layer_ids().zip(&self.layers) {
            let handle = self.manager.layer_for(layer, bucket)?;
            match self.projected(layer).as_slice() {
                [] => handle.append_swa(&self.stream, &inputs.rows)?,
                [hca] => handle.decode_hca(&self.stream, &inputs.rows, hca)?,
                [main, index, ..] => {
                    handle.decode_csa(&self.stream, &inputs.rows, main, index)?;
                }
            }
        }
        Ok(())
    }

    /// Queues the scores of `queries` of the step in a CSA layer, of some query or other, and their
    /// lists of `k` entries.
    pub fn score(&self, layer: LayerId, queries: Range<u32>, k: u32) -> Result<(), KvError> {
        let Self { manager, stream, .. } = self;
        let (device, CacheConfig { model, max_context, .. }) = (manager.device(), manager.config());
        let (count, heads) = (queries.len() as u32, model.index_heads);
        let workspace = IndexerWorkspace::new(device, model, *max_context, count, u64::MAX)?;
        let ones = |elements: u32| upload(stream, &vec![1.0_f32; elements as usize]);
        let (projected, weights) = (ones(count * heads * INDEX_DIM), ones(count * heads));
        let lists = device.allocate("lists", u64::from(count * k))?;
        let select = LayerCacheHandle::select_entries;
        let handle = manager.layer(layer)?;
        select(&handle, stream, &workspace, queries, &projected, &weights, k, &lists)
    }

    /// A whole step of which everything is accepted.
    pub fn step(&mut self, parts: &[Part<'_>], bucket: u32) {
        self.prepare(parts, bucket);
        self.update(bucket).unwrap();
        for part in parts {
            self.manager.commit(part.id, part.request().tokens).unwrap();
        }
    }

    /// Every pool of every layer.
    pub fn pools(&self) -> Vec<(String, Buffer<B, u8>)> {
        let of_layer = |layer| {
            let handle = self.manager.layer(layer).unwrap();
            let pools = pools_of(&handle);
            assert_eq!(pools.len(), handle.schema().pools.len(), "all pools of the layer");
            pools.into_iter().map(move |(kind, pool)| (format!("{layer:?} {kind:?}"), pool))
        };
        self.layer_ids().flat_map(of_layer).collect()
    }

    /// The bytes of every pool of every layer.
    pub fn pool_bytes(&self) -> Vec<(String, Vec<u8>)> {
        let bytes = |pool| download(&self.stream, pool);
        self.pools().iter().map(|(name, pool)| (name.clone(), bytes(pool))).collect()
    }

    /// In every layer the request holds its first `tokens` tokens: the window, and each closed entry
    /// and indexer key at the place that the block table names.
    pub fn assert_holds(&self, id: RequestId, story: &Story, stored: &[Stored], tokens: usize) {
        let Self { manager, stream, .. } = self;
        let blocks: Vec<usize> =
            manager.block_table(id).unwrap().map(|block| block.0 as usize).collect();
        for (layer, (seen, stored)) in self.layer_ids().zip(story.layers.iter().zip(stored)) {
            assert_ring(manager, stream, layer, id, &seen.rows[..tokens]);
            let Some(ratio) = seen.kind.ratio() else { continue };
            let handle = manager.layer(layer).unwrap();
            let per_block = seen.kind.entries_per_block() as usize;
            let closed = tokens / ratio as usize;
            let row = |i: usize| blocks[i / per_block] * per_block + i % per_block;
            let what = format!("{layer:?} of {id} at {tokens} tokens");
            let plane = |plane: &Buffer<B, u8>| download(stream, plane);
            let entries = handle.entries().unwrap();
            let (data, scale) = (plane(entries.data), plane(entries.scale));
            for (i, entry) in stored.entries[..closed].iter().enumerate() {
                let scale = plane_row(&scale, row(i), entries.format.scale_bytes());
                let what = format!("entry {i}, {what}");
                assert_same(plane_row(&data, row(i), DATA_BYTES), &entry.data, &what);
                assert_same(scale, &entry.scale, &what);
            }
            if seen.kind == LayerKind::Csa {
                let keys = handle.index_keys().unwrap();
                let (code, scale) = (plane(keys.code), plane(keys.scale));
                for (i, key) in stored.keys[..closed].iter().enumerate() {
                    let code = plane_row(&code, row(i), keys.format.code_bytes());
                    let what = format!("key {i}, {what}");
                    assert_same(code, &key.codes, &what);
                    let scale = plane_row(&scale, row(i), keys.format.scale_bytes());
                    assert_same(scale, &key.scale, &what);
                }
            }
        }
    }
}

/// The pools that a handle shows.
pub fn pools_of<B: Backend>(handle: &LayerCacheHandle<'_, B>) -> Vec<(PoolKind, Buffer<B, u8>)> {
    let swa = handle.swa();
    let mut pools =
        vec![(PoolKind::SwaData, swa.data.clone()), (PoolKind::SwaScale, swa.scale.clone())];
    if let Ok(entries) = handle.entries() {
        pools.push((PoolKind::EntryData, entries.data.clone()));
        pools.push((PoolKind::EntryScale, entries.scale.clone()));
    }
    if let Ok(keys) = handle.index_keys() {
        pools.push((PoolKind::IndexCode, keys.code.clone()));
        pools.push((PoolKind::IndexScale, keys.scale.clone()));
    }
    for kind in [PoolKind::MainState, PoolKind::IndexState] {
        pools.extend(handle.state(kind).ok().map(|state| (kind, state.rows.cast().unwrap())));
    }
    pools
}

/// Every pool holds the bytes that it should.
pub fn assert_pools<B: Backend>(fed: &Fed<B>, want: &[(String, Vec<u8>)], what: &str) {
    for ((name, got), (_, want)) in fed.pool_bytes().iter().zip(want) {
        assert_same(got, want, &format!("{name}, {what}"));
    }
}
