//! The device memory of the steps of one layer group: StepMeta, work lists, entries between a compressor and the flush,
//! and partial sums of attention. A group has one open step at a time, which uses all of it.

use std::ops::RangeInclusive;

use kernels_gpu::attention::HEADS;
use kv_layout::attention::{AttendedKeys, MAX_HEADS};
use kv_layout::geometry::{CSA_RATIO, HCA_RATIO, HEAD_DIM, INDEX_DIM, LayerKind, WINDOW};
use kv_layout::main_row::DATA_BYTES;

use crate::config::CacheConfig;
use crate::device::{
    Backend, Buffer, Device, DeviceError, Event, Memory, Staged, Stream, View, bf16,
};
use crate::error::KvError;
use crate::ids::LayerGroup;
use crate::layer_progress::LayerProgress;
use crate::ledger::{Ledger, Written, largest_layout};
use crate::memory::buffer_spec::{Allocator, BufferSpec};
use crate::ops::{
    AttentionExchange, SPREAD_CLUSTERS, SplitWorkspace, StepTokens, exchange_elements,
    run_capacity, split_elements, window_capacity,
};
use crate::poison::ToPoison;
use crate::pool_kind::PoolUnit;
use crate::step_meta::{Section, StepLayout};

/// Pinned arrays from which StepMeta is written. Besides each step, each admission that reuses a prefix, fork, suspension,
/// resumption and save writes it once between steps, in the order of the stream. So the host waits for a step only if it
/// queues more than seven of these before that step has run.
const STEP_ARRAYS: usize = 8;

/// The buffers of one group, each once.
struct Specs {
    step_meta: BufferSpec<i32>,
    /// The step's own window rows: data, scales, places.
    own: BufferSpec<u8>,
    /// Workspace of spread attention.
    exchange: BufferSpec<u32>,
    compressed: Option<CompressedSpecs>,
}

/// The buffers that only layers with compressed entries need.
struct CompressedSpecs {
    csa_closing: BufferSpec<i32>,
    hca_runs: BufferSpec<i32>,
    entries: BufferSpec<bf16>,
    keys: BufferSpec<bf16>,
    hca_pooled: BufferSpec<f32>,
    splits: Option<SplitSpecs>,
}

/// Buffers for attention whose keys are in several splits: partial outputs, denominators and arrival counters.
struct SplitSpecs {
    sums: BufferSpec<f32>,
    lse: BufferSpec<f32>,
    arrivals: BufferSpec<u32>,
}

impl SplitSpecs {
    /// Limits of the number of clusters in one launch of attention with several splits. Decode with 64 heads sets the
    /// number. The lower limit keeps all multiprocessors busy with a chunk; the upper one serves 256 requests
    /// with contexts of 1,048,576 tokens.
    const CLUSTERS: RangeInclusive<u32> = 256..=1024;

    /// `None` if no query of the cache can have several splits.
    fn of(config: &CacheConfig) -> Option<Self> {
        // The cache does not know the number of heads. A query with a single group of heads has the most splits.
        let keys = WINDOW + config.max_context / HCA_RATIO;
        let splits = AttendedKeys::All.num_splits(keys, config.attention_cluster, HEADS);
        let has_splits = splits > 1 && config.model.layers.contains(&LayerKind::Hca);
        has_splits.then(|| {
            let of_a_query = splits.saturating_mul(MAX_HEADS.div_ceil(HEADS));
            let queries = config.max_requests.saturating_mul(config.max_decode_tokens());
            let clusters = queries.saturating_mul(splits);
            let clusters = clusters.clamp(*Self::CLUSTERS.start(), *Self::CLUSTERS.end());
            let [sums, lse, arrivals] = split_elements(clusters.max(of_a_query));
            Self {
                sums: BufferSpec::new("splits of attention", sums),
                lse: BufferSpec::new("denominators of splits", lse),
                arrivals: BufferSpec::new("counters of splits", arrivals),
            }
        })
    }

    fn allocate<B: Backend>(
        self,
        allocator: &mut Allocator<'_, B>,
    ) -> Result<SplitWorkspace<B>, DeviceError> {
        Ok(SplitWorkspace {
            sums: allocator.allocate(self.sums)?,
            lse: allocator.allocate(self.lse)?,
            arrivals: allocator.allocate(self.arrivals)?,
        })
    }
}

impl Specs {
    fn of(group: LayerGroup, config: &CacheConfig) -> Self {
        let (tokens, requests) = (config.max_step_tokens, config.max_requests);
        let csa = u64::from(window_capacity(tokens, requests, CSA_RATIO));
        let runs = u64::from(run_capacity(tokens, requests));
        let step_meta = largest_layout(group, config).elements() as u64;
        let compressed = CompressedSpecs {
            csa_closing: BufferSpec::new("CSA work list", csa),
            hca_runs: BufferSpec::new("HCA work list", runs),
            entries: BufferSpec::new("entries", csa * u64::from(HEAD_DIM)),
            keys: BufferSpec::new("indexer keys", csa * u64::from(INDEX_DIM)),
            hca_pooled: BufferSpec::new("pooled entries", runs * u64::from(HEAD_DIM)),
            splits: SplitSpecs::of(config),
        };
        Self {
            step_meta: BufferSpec::new("step metadata", step_meta),
            own: BufferSpec::new("rows of the step", own_bytes(config)),
            exchange: BufferSpec::new("exchange of attention", exchange_elements(SPREAD_CLUSTERS)),
            compressed: (group == LayerGroup::Trunk).then_some(compressed),
        }
    }

    /// Bytes of each buffer.
    fn bytes(&self) -> impl Iterator<Item = u64> {
        let compressed = self.compressed.iter().flat_map(|specs| {
            [
                specs.csa_closing.bytes(),
                specs.hca_runs.bytes(),
                specs.entries.bytes(),
                specs.keys.bytes(),
                specs.hca_pooled.bytes(),
            ]
        });
        let splits = self.compressed.iter().filter_map(|specs| specs.splits.as_ref());
        let splits = splits
            .flat_map(|specs| [specs.sums.bytes(), specs.lse.bytes(), specs.arrivals.bytes()]);
        let always = [self.step_meta.bytes(), self.own.bytes(), self.exchange.bytes()];
        always.into_iter().chain(compressed).chain(splits)
    }

    /// The buffers of every group that has layers.
    fn of_groups(config: &CacheConfig) -> impl Iterator<Item = Self> {
        let groups = LayerGroup::ALL.into_iter();
        let groups = groups.filter(|&group| !config.group_layers(group).is_empty());
        groups.map(|group| Self::of(group, config))
    }
}

/// How many buffers the steps of a cache need.
pub(crate) fn buffers(config: &CacheConfig) -> u32 {
    Specs::of_groups(config).map(|specs| specs.bytes().count() as u32).sum()
}

/// Bytes of the buffers that the steps of a cache need.
pub(crate) fn bytes(config: &CacheConfig) -> u64 {
    Specs::of_groups(config).map(|specs| specs.bytes().sum::<u64>()).sum()
}

/// Device memory for the steps of one group, and the progress of its layers in the open step.
pub(crate) struct StepMemory<B: Backend> {
    /// StepMeta, with room for the longest step.
    pub step_meta: Staged<B, i32>,
    /// Views of StepMeta's sections, for the last step that was sent or the bucket being captured.
    pub sections: Sections<B>,
    pub own: OwnPlanes<B>,
    /// Workspace of spread attention: softmax weights, partial outputs, denominators, arrival counters.
    pub exchange: AttentionExchange<B>,
    pub compressed: Option<Compressed<B>>,
    /// One for each layer of the group.
    pub progress: Vec<LayerProgress>,
    /// By layer: the address of the window rows with which it was updated; `None` before its update.
    pub rows: Vec<Option<u64>>,
    /// Slots and blocks to poison before the next step; empty unless the cache is poisoned.
    pub to_poison: ToPoison,
    /// The stream of the last step; `ended` lets another stream wait for its end.
    last: Option<Stream<B>>,
    ended: Event<B>,
    memory: Vec<Memory<B>>,
}

/// The step's own window rows of the layer at work, in the format of the ring, for attention that reads them before
/// they enter the ring.
pub(crate) struct OwnPlanes<B: Backend> {
    /// `[step tokens, 576]` u8.
    pub data: Buffer<B, u8>,
    /// `[step tokens, 8]` UE8M0 or `[step tokens]` f32, as bytes.
    pub scale: Buffer<B, u8>,
    /// `[step tokens]`: each token's row of the planes, which is its place in the step.
    pub place: Buffer<B, i32>,
}

/// Work lists and scratch of layers with compressed entries.
pub(crate) struct Compressed<B: Backend> {
    /// Rows of the step's tokens that close a CSA window, then -1.
    pub csa_closing: Buffer<B, i32>,
    /// Rows of the step's tokens that end an HCA run, then -1.
    pub hca_runs: Buffer<B, i32>,
    /// `[capacity, 512]` BF16: CSA entries of the layer at work.
    pub entries: Buffer<B, bf16>,
    /// `[capacity, 128]` BF16: indexer keys of the layer at work.
    pub keys: Buffer<B, bf16>,
    /// `[capacity, 512]` f32: pooled entries of the HCA runs of the layer at work.
    pub hca_pooled: Buffer<B, f32>,
    /// `None` if contexts are too short for several splits.
    pub splits: Option<SplitWorkspace<B>>,
}

/// Bytes of the planes of own rows and of their places.
fn own_bytes(config: &CacheConfig) -> u64 {
    u64::from(config.max_step_tokens) * (config.main_format.row_bytes() + size_of::<i32>() as u64)
}

impl<B: Backend> OwnPlanes<B> {
    /// Divides `all` into the three planes, and queues the upload of the places in `stream`.
    fn new(
        stream: &Stream<B>,
        all: &Buffer<B, u8>,
        config: &CacheConfig,
    ) -> Result<Self, DeviceError> {
        let rows = u64::from(config.max_step_tokens);
        let (data, scale) = (rows * DATA_BYTES, rows * config.main_format.scale_bytes());
        let part = |at, bytes| all.slice(at, bytes).expect("all parts are there");
        let place = part(data + scale, rows * size_of::<i32>() as u64).cast::<i32>()?;
        stream.upload(&(0..rows as i32).collect::<Vec<_>>(), &place, 0)?;
        Ok(Self { data: part(0, data), scale: part(data, scale), place })
    }
}

impl<B: Backend> StepMemory<B> {
    /// The arrival counters of attention, which are 0 between launches.
    pub fn arrivals(&self) -> impl Iterator<Item = &Buffer<B, u32>> {
        let splits = self.compressed.as_ref().and_then(|of| of.splits.as_ref());
        splits.map(|of| &of.arrivals).into_iter().chain([&self.exchange.arrivals])
    }

    /// Allocates all of it and waits until it is ready.
    pub fn new(
        device: &Device<B>,
        group: LayerGroup,
        config: &CacheConfig,
    ) -> Result<Self, KvError> {
        let (specs, mut allocator) = (Specs::of(group, config), Allocator::new(device));
        let stream = device.stream()?;
        let own = OwnPlanes::new(&stream, &allocator.allocate(specs.own)?, config)?;
        let exchange = AttentionExchange::of(&allocator.allocate(specs.exchange)?)?;
        let compressed = match specs.compressed {
            None => None,
            Some(specs) => Some(Compressed {
                csa_closing: allocator.allocate(specs.csa_closing)?,
                hca_runs: allocator.allocate(specs.hca_runs)?,
                entries: allocator.allocate(specs.entries)?,
                keys: allocator.allocate(specs.keys)?,
                hca_pooled: allocator.allocate(specs.hca_pooled)?,
                splits: specs.splits.map(|specs| specs.allocate(&mut allocator)).transpose()?,
            }),
        };
        let BufferSpec { label, .. } = specs.step_meta;
        let step_meta = Staged::new(device, label, specs.step_meta.len() as usize, STEP_ARRAYS)?;
        let step_meta = allocator.keep(step_meta, |staged| staged.buffer().memory());
        stream.synchronize()?;
        Ok(Self {
            sections: Sections::new(step_meta.buffer(), StepLayout::new(0, 0)),
            step_meta,
            own,
            exchange,
            compressed,
            progress: vec![LayerProgress::NotStarted; config.group_layers(group).len()],
            rows: vec![None; config.group_layers(group).len()],
            to_poison: if config.poison {
                ToPoison::new(config.units(PoolUnit::Slot), config.num_blocks)
            } else {
                ToPoison::default()
            },
            last: None,
            ended: device.event()?,
            memory: allocator.memory(),
        })
    }

    /// Makes `stream` wait for the group's last step, if that ran in another stream: both use this
    /// memory, and the rings and blocks of the same requests.
    pub fn follow(&mut self, stream: &Stream<B>) -> Result<(), KvError> {
        if let Some(last) = self.last.as_ref().filter(|last| last.id() != stream.id()) {
            last.record(&self.ended)?;
            stream.wait_for(&self.ended)?;
        }
        self.last = Some(stream.clone());
        Ok(())
    }

    /// Rejects a step that was leaked (`std::mem::forget`): no step borrows this memory any more.
    pub fn reject_leaked_step(&mut self, ledger: &mut Ledger, group: LayerGroup) {
        let to_poison = &mut self.to_poison;
        ledger.reject_step_with(group, Written::Rows, |block| to_poison.add_block(block));
    }

    /// Sets the layout of the sections for the next launches.
    pub fn lay_out(&mut self, layout: StepLayout) {
        if self.sections.layout != layout {
            self.sections = Sections::new(self.step_meta.buffer(), layout);
        }
    }

    /// All of this memory, for a graph to retain.
    pub fn memory(&self) -> &[Memory<B>] {
        &self.memory
    }
}

/// The arrays of a step's StepMeta. They are made when the layout changes, not for each launch.
pub(crate) struct Sections<B: Backend> {
    layout: StepLayout,
    views: [View<B, i32>; Section::ALL.len()],
}

impl<B: Backend> Sections<B> {
    fn new(step_meta: &Buffer<B, i32>, layout: StepLayout) -> Self {
        let view = |section| {
            let range = layout.range(section);
            let found = step_meta.view().slice(range.start as u64, range.len() as u64);
            found.expect("the array has all its sections")
        };
        Self { layout, views: Section::ALL.map(view) }
    }

    /// The view of one section.
    pub fn get(&self, section: Section) -> &View<B, i32> {
        &self.views[section as usize]
    }

    /// The step's tokens, for launches that cover `count` of them.
    pub fn tokens(&self, count: u32) -> StepTokens<'_, B> {
        StepTokens {
            position: self.get(Section::Position),
            slot: self.get(Section::Slot),
            index: self.get(Section::Index),
            remaining: self.get(Section::Remaining),
            count,
        }
    }
}
