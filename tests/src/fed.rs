//! A cache with layers of every kind, and steps that feed it with the tokens of stories.

use std::ops::Range;

use dsv4_kv::device::{Backend, Buffer, Device, Memory, Stream, View, bf16};
use dsv4_kv::step::{CompressorInputs, Group};
use dsv4_kv::{
    Accepted, Bucket, CacheConfig, CapturedStep, Groups, KvCacheManager, KvError, Launches,
    LayerId, Layers, PoolKind, RequestId, Step, StepRequest,
};
use kv_layout::geometry::{CompressorKind, LayerKind};

use crate::history::{History, shape};
use crate::inputs::{assert_same, download, plane_row, upload};
use crate::rings::{assert_ring, pool};
use crate::stories::{STEP_TOKENS, Stored, Story, compressors};
pub use crate::updated::{Updated, resume, update};

/// Byte that fills the tensors of a step at padding tokens: NaN in every format.
const PADDING: u8 = 0xFF;

/// The tokens of one request in a step: a range of its own story; if the step drafts, tokens of another story follow,
/// at the next positions.
pub struct Part<'a> {
    /// The request.
    pub id: RequestId,
    /// Its tokens, in order: ranges of stories.
    pub pieces: Vec<(&'a Story, Range<usize>)>,
}

impl<'a> Part<'a> {
    /// Tokens of one story.
    #[must_use]
    pub fn new(id: RequestId, story: &'a Story, tokens: Range<usize>) -> Self {
        Self { id, pieces: vec![(story, tokens)] }
    }

    /// The request as [`KvCacheManager`] takes it.
    ///
    /// # Panics
    /// If `pieces` is empty.
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
    fn new(stream: &Stream<B>, of: CompressorKind, seed: u64) -> Self {
        let History { ape, norm, .. } = History::random(of, 1, seed);
        let elements = u64::from(STEP_TOKENS) * shape(of).columns() as u64;
        let device = stream.device();
        Self {
            kv: device.allocate("key projections", elements).unwrap(),
            gate: device.allocate("gate projections", elements).unwrap(),
            ape: upload(stream, &ape),
            norm: upload(stream, &norm),
        }
    }

    fn inputs(&self) -> CompressorInputs<'_, B> {
        let Self { kv, gate, ape, norm } = self;
        CompressorInputs { kv, gate, ape, norm }
    }
}

/// The tensors of one layer in a step. Their addresses stay the same in all steps.
struct LayerInputs<B: Backend> {
    kind: LayerKind,
    rows: Buffer<B, bf16>,
    compressors: Vec<ProjectedInputs<B>>,
}

/// The tensors of all layers.
pub struct Inputs<B: Backend> {
    layers: Vec<LayerInputs<B>>,
}

/// A callback that a test runs in each layer between its update and its append.
pub type Between<'t, B> = &'t mut dyn FnMut(LayerId, &Updated<'_, B>) -> Result<(), KvError>;

impl<B: Backend> Inputs<B> {
    fn new(stream: &Stream<B>, config: &CacheConfig) -> Self {
        let layers = config.model.layers.iter().zip(1000..).map(|(&kind, layer)| {
            let streams = compressors(kind).iter().zip(0..);
            let elements = u64::from(STEP_TOKENS) * 512;
            LayerInputs {
                kind,
                rows: stream.device().allocate("kv", elements).unwrap(),
                compressors: streams
                    .map(|(&of, at)| ProjectedInputs::new(stream, of, 10 * layer + at))
                    .collect(),
            }
        });
        Self { layers: layers.collect() }
    }

    /// The sliding-window keys of the step in a layer.
    #[must_use]
    pub fn rows(&self, layer: LayerId) -> &Buffer<B, bf16> {
        &self.layers[layer.0 as usize].rows
    }

    /// The tensors of a layer's compressors: the main compressor first, then that of the indexer.
    #[must_use]
    pub fn compressors(&self, layer: LayerId) -> Vec<CompressorInputs<'_, B>> {
        self.layers[layer.0 as usize].compressors.iter().map(ProjectedInputs::inputs).collect()
    }

    /// The memory of all tensors, for a graph to retain.
    #[must_use]
    pub fn memory(&self) -> Vec<Memory<B>> {
        let of_layer = |layer: &LayerInputs<B>| {
            let projected = layer.compressors.iter().flat_map(|inputs| {
                let ProjectedInputs { kv, gate, ape, norm } = inputs;
                [kv, gate, ape, norm].map(|tensor| tensor.memory())
            });
            projected.chain([layer.rows.memory()]).collect::<Vec<_>>()
        };
        self.layers.iter().flat_map(of_layer).collect()
    }

    /// Uploads the tensors of a step. Elements of padding tokens, up to `bucket` tokens, are NaN.
    pub fn load(&self, stream: &Stream<B>, parts: &[Part<'_>], bucket: u32) {
        let pieces = || parts.iter().flat_map(|part| part.pieces.iter().cloned());
        for (layer, inputs) in self.layers.iter().enumerate() {
            let of_layer = |(story, range): (&_, Range<usize>)| {
                let story: &Story = story;
                story.window_rows(LayerId(layer as u32))[range].concat()
            };
            let mut kv: Vec<u16> = pieces().flat_map(of_layer).collect();
            kv.resize(bucket as usize * 512, u16::from_le_bytes([PADDING; 2]));
            stream.upload(bytemuck::cast_slice(&kv), &inputs.rows, 0).unwrap();
            for (compressor, to) in inputs.compressors.iter().enumerate() {
                let (mut kv, mut gate) = (Vec::new(), Vec::new());
                for (story, range) in pieces() {
                    let history = &story.histories(LayerId(layer as u32))[compressor];
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

    /// Queues a layer's update.
    ///
    /// # Errors
    /// If the cache refuses the update.
    pub fn update<'s>(
        &self,
        layers: &'s mut Layers<'_, B>,
        layer: LayerId,
    ) -> Result<Updated<'s, B>, KvError> {
        update(layers, layer, self.rows(layer), &self.compressors(layer))
    }

    /// Takes a layer that the step has already updated.
    ///
    /// # Errors
    /// If the cache refuses.
    pub fn resume<'s>(
        &self,
        layers: &'s mut Layers<'_, B>,
        layer: LayerId,
    ) -> Result<Updated<'s, B>, KvError> {
        let LayerInputs { kind, rows, .. } = &self.layers[layer.0 as usize];
        resume(layers, layer, *kind, rows)
    }

    /// Queues the update and the append of every layer of a group, and calls `between` between the two.
    ///
    /// # Errors
    /// If the cache or `between` refuses.
    pub fn run(&self, layers: &mut Layers<'_, B>, between: Between<'_, B>) -> Result<(), KvError> {
        for (layer, _) in layers.layer_kinds() {
            let updated = self.update(layers, layer)?;
            between(layer, &updated)?;
            updated.append()?;
        }
        Ok(())
    }
}

/// How many tokens the launches of a step of [`Fed`] cover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Padding {
    /// Exactly the tokens of the step.
    None,
    /// The tokens of a bucket.
    Bucket(Bucket),
}

impl Padding {
    /// Number of tokens that the launches of a step of `parts` cover.
    fn tokens(self, parts: &[Part<'_>]) -> u32 {
        match self {
            Self::None => parts.iter().map(|part| part.request().tokens).sum(),
            Self::Bucket(bucket) => bucket.tokens,
        }
    }

    fn launches(&self) -> Launches<'_> {
        match self {
            Self::None => Launches::Eager,
            Self::Bucket(bucket) => Launches::Bucket(bucket),
        }
    }
}

/// A cache, and the tensors of its steps.
pub struct Fed<B: Backend> {
    /// The cache.
    pub manager: KvCacheManager<B>,
    /// The stream of its steps.
    pub stream: Stream<B>,
    /// The tensors.
    pub inputs: Inputs<B>,
}

impl<B: Backend> Fed<B> {
    /// An empty cache whose pools are poisoned, so that a read of a row that no kernel wrote shows in the result.
    pub fn new(device: &Device<B>, config: CacheConfig) -> Self {
        let stream = device.stream().unwrap();
        let inputs = Inputs::new(&stream, &config);
        let manager = KvCacheManager::new(device.clone(), config).unwrap();
        let fed = Self { manager, stream, inputs };
        fed.poison();
        fed
    }

    /// Fills every pool with bytes 0xFF; compressor state is NaN then.
    pub fn poison(&self) {
        for (layer, schema) in self.layer_ids().zip(&self.manager.schema().layers) {
            for pool in &schema.pools {
                let pool = self.manager.writable_pool(layer, pool.kind).unwrap();
                self.stream.fill(&pool, 0xFF).unwrap();
            }
        }
    }

    /// The ids of all layers.
    pub fn layer_ids(&self) -> impl Iterator<Item = LayerId> + use<B> {
        (0..self.inputs.layers.len() as u32).map(LayerId)
    }

    /// The kind of a layer.
    #[must_use]
    pub fn kind(&self, layer: LayerId) -> LayerKind {
        self.manager.config().model.layers[layer.0 as usize]
    }

    /// A bucket of `tokens` tokens and `tokens_per_request` tokens per request. With one token per request the update
    /// of a layer is one launch.
    #[must_use]
    pub fn bucket(&self, tokens: u32, tokens_per_request: u32) -> Padding {
        let CacheConfig { max_requests: requests, max_context: context, .. } =
            *self.manager.config();
        Padding::Bucket(Bucket { tokens, tokens_per_request, requests, context })
    }

    /// Runs a step in all layers, draft layers included, and commits the first `accepted[i]` tokens of part `i`. The
    /// steps of both layer groups are open at the same time.
    ///
    /// # Panics
    /// If the cache refuses the step.
    pub fn run(
        &mut self,
        parts: &[Part<'_>],
        padding: Padding,
        accepted: &[u32],
        between: Between<'_, B>,
    ) {
        self.inputs.load(&self.stream, parts, padding.tokens(parts));
        let accepted = accepted_of(parts, accepted);
        let mut steps = begin(&mut self.manager, &self.stream, parts, padding).unwrap();
        for step in &mut steps {
            self.inputs.run(step, between).unwrap();
        }
        for step in steps {
            step.commit(&accepted).unwrap();
        }
    }

    /// Runs a step without its kernels, and commits all of its tokens.
    ///
    /// # Panics
    /// As [`Self::run`].
    pub fn lose(&mut self, parts: &[Part<'_>]) {
        let all: Vec<_> = parts.iter().map(|part| part.request().tokens).collect();
        let accepted = accepted_of(parts, &all);
        for mut step in begin(&mut self.manager, &self.stream, parts, Padding::None).unwrap() {
            step.skip_kernels();
            step.commit(&accepted).unwrap();
        }
    }

    /// Runs a step and commits all of its tokens.
    ///
    /// # Panics
    /// As [`Self::run`].
    pub fn step(&mut self, parts: &[Part<'_>], padding: Padding) {
        let all: Vec<_> = parts.iter().map(|part| part.request().tokens).collect();
        self.run(parts, padding, &all, &mut |_, _| Ok(()));
    }

    /// Captures every layer of each group for a bucket, with `between` called between update and append. The graphs
    /// also keep `retained` alive.
    ///
    /// # Panics
    /// If the cache refuses the capture.
    pub fn capture(
        &mut self,
        padding: Padding,
        retained: &[Memory<B>],
        between: Between<'_, B>,
    ) -> Vec<CapturedStep<B>> {
        let Padding::Bucket(bucket) = padding else { panic!("a graph is captured for a bucket") };
        let Self { manager, stream, inputs } = self;
        let retained = [inputs.memory(), retained.to_vec()].concat();
        let Groups { trunk, draft } = manager.groups();
        let mut capture = |mut group: Group<'_, B>| {
            let record = |layers: &mut Layers<'_, B>| inputs.run(layers, between);
            group.capture(stream, &bucket, retained.clone(), record).unwrap()
        };
        std::iter::once(trunk).chain(draft).map(&mut capture).collect()
    }

    /// Runs a step by the graphs of [`Self::capture`], and commits the first `accepted[i]` tokens of part `i`.
    ///
    /// # Panics
    /// If the cache refuses the step.
    pub fn replay(
        &mut self,
        parts: &[Part<'_>],
        padding: Padding,
        graphs: &[CapturedStep<B>],
        accepted: &[u32],
    ) {
        self.inputs.load(&self.stream, parts, padding.tokens(parts));
        let accepted = accepted_of(parts, accepted);
        let steps = begin(&mut self.manager, &self.stream, parts, padding).unwrap();
        for (mut step, graph) in steps.into_iter().zip(graphs) {
            step.replay(graph).unwrap();
            step.commit(&accepted).unwrap();
        }
    }

    /// All pools of all layers, with their names.
    pub fn pools(&self) -> Vec<(String, View<B, u8>)> {
        let of_layer = |layer| {
            let pools = self.manager.pools(layer).unwrap();
            pools.map(move |(kind, pool)| (format!("{layer:?} {kind:?}"), pool))
        };
        self.layer_ids().flat_map(of_layer).collect()
    }

    /// The bytes of every pool of every layer.
    pub fn pool_bytes(&self) -> Vec<(String, Vec<u8>)> {
        let bytes = |pool| download(&self.stream, pool);
        self.pools().iter().map(|(name, pool)| (name.clone(), bytes(pool))).collect()
    }

    /// Asserts that in every layer the request holds its first `tokens` tokens: the window, and each closed entry and
    /// indexer key at the place that the block table names.
    ///
    /// # Panics
    /// If a byte differs.
    pub fn assert_holds(&self, id: RequestId, story: &Story, stored: &[Stored], tokens: usize) {
        for (layer, stored) in self.layer_ids().zip(stored) {
            let (kind, rows) = (self.kind(layer), &story.window_rows(layer)[..tokens]);
            assert_ring(&self.manager, &self.stream, layer, id, rows);
            self.assert_entries(id, layer, (kind, stored), tokens);
        }
    }

    /// As [`Self::assert_holds`], for the entries and indexer keys of one layer.
    fn assert_entries(
        &self,
        id: RequestId,
        layer: LayerId,
        (kind, stored): (LayerKind, &Stored),
        tokens: usize,
    ) {
        let Some(ratio) = kind.ratio() else { return };
        let (manager, per_block) = (&self.manager, kind.entries_per_block() as usize);
        let blocks = manager.block_table(id).unwrap();
        let row = |i: usize| blocks[i / per_block].0 as usize * per_block + i % per_block;
        let closed = tokens / ratio as usize;
        let what = format!("{layer:?} of {id} at {tokens} tokens");
        let plane = |kind| download(&self.stream, &pool(manager, layer, kind));
        let same = |plane: &[u8], row: usize, want: &[u8], what: &str| {
            assert_same(plane_row(plane, row, want.len() as u64), want, what);
        };
        let (data, scale) = (plane(PoolKind::EntryData), plane(PoolKind::EntryScale));
        for (i, entry) in stored.entries[..closed].iter().enumerate() {
            same(&data, row(i), &entry.data, &format!("entry {i}, {what}"));
            same(&scale, row(i), &entry.scale, &format!("scale of entry {i}, {what}"));
        }
        if kind == LayerKind::Csa {
            let (code, scale) = (plane(PoolKind::IndexCode), plane(PoolKind::IndexScale));
            for (i, key) in stored.keys[..closed].iter().enumerate() {
                same(&code, row(i), &key.codes, &format!("key {i}, {what}"));
                same(&scale, row(i), &key.scale, &format!("scale of key {i}, {what}"));
            }
        }
    }
}

/// The arguments of a commit that accepts the first `accepted[i]` tokens of part `i`.
fn accepted_of(parts: &[Part<'_>], accepted: &[u32]) -> Vec<Accepted<'static>> {
    let parts = parts.iter().zip(accepted);
    parts.map(|(part, &accepted)| Accepted::count(part.id, accepted)).collect()
}

/// Begins a step in every layer group of the model.
///
/// # Errors
/// If the cache refuses a step. Then no step is open.
pub fn begin<'a, B: Backend>(
    manager: &'a mut KvCacheManager<B>,
    stream: &Stream<B>,
    parts: &[Part<'_>],
    padding: Padding,
) -> Result<Vec<Step<'a, B>>, KvError> {
    let requests: Vec<_> = parts.iter().map(Part::request).collect();
    begin_requests(manager, stream, &requests, &padding)
}

/// As [`begin`], for requests instead of parts.
///
/// # Errors
/// As [`begin`].
pub fn begin_requests<'a, B: Backend>(
    manager: &'a mut KvCacheManager<B>,
    stream: &Stream<B>,
    requests: &[StepRequest],
    padding: &Padding,
) -> Result<Vec<Step<'a, B>>, KvError> {
    let groups = manager.groups().into_iter();
    groups.map(|group| group.into_step(stream, padding.launches(), requests)).collect()
}

/// Asserts that every pool holds the bytes `want`.
///
/// # Panics
/// If a byte differs.
pub fn assert_pools<B: Backend>(fed: &Fed<B>, want: &[(String, Vec<u8>)], what: &str) {
    for ((name, got), (_, want)) in fed.pool_bytes().iter().zip(want) {
        assert_same(got, want, &format!("{name}, {what}"));
    }
}
