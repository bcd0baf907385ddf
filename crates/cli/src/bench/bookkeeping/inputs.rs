//! The inputs of the layers of a step, on a device that does nothing.

use anyhow::Result;
use dsv4_kv::device::{Buffer, Memory, Null, NullDevice, bf16};
use dsv4_kv::indexer::{
    Activations, CsaIndexer, IndexerWorkspace, WorkspaceLimits, padded_columns,
};
use dsv4_kv::kv_layout::geometry::{HCA_RATIO, HEAD_DIM, INDEX_DIM, LayerKind, WINDOW};
use dsv4_kv::step::{
    AttentionTensors, CompressorInputs, Csa, CsaInputs, EntryLists, Hca, HcaInputs, Layer,
    QueryForm, Swa, UpdatedLayer,
};
use dsv4_kv::{CacheConfig, KvError, LayerId, Layers};

/// Number of queries in the indexer's workspace and in gathers.
const QUERIES: u32 = 256;
/// Length of a query's list.
const SELECTED: u32 = 512;
/// Rows per query of the tile of an HCA layer.
const ALL_ROWS: u32 = 128;
/// Query heads in attention.
const HEADS: u32 = 64;

/// Tensors that all layers share. They have no memory.
pub(super) struct Inputs {
    rows: Buffer<Null, bf16>,
    floats: Buffer<Null, f32>,
    indexer: CsaIndexer<Null>,
    workspace: IndexerWorkspace<Null>,
    activations: Buffer<Null, bf16>,
    lists: Buffer<Null, i32>,
    tile: Buffer<Null, bf16>,
    lengths: Buffer<Null, i32>,
    heads: Buffer<Null, bf16>,
    attended: Buffer<Null, bf16>,
}

impl Inputs {
    /// Tensors for steps of a cache of `config`.
    pub fn new(device: &NullDevice, config: &CacheConfig) -> Result<Self> {
        let (model, tokens) = (&config.model, u64::from(config.max_step_tokens));
        let of_heads = |columns: u32| u64::from(model.index_heads) * u64::from(columns);
        let [latent, hidden] = [model.q_lora_rank, model.hidden_size].map(padded_columns);
        let query = device.allocate("indexer query weight", of_heads(INDEX_DIM * latent))?;
        let head = device.allocate("indexer head weight", of_heads(hidden))?;
        let limits =
            WorkspaceLimits { context: config.max_context, queries: QUERIES, bytes: u64::MAX };
        let queries = u64::from(QUERIES);
        let columns = tokens.max(HCA_RATIO.into()) * 2 * u64::from(HEAD_DIM);
        Ok(Self {
            rows: device.allocate("window rows", tokens * u64::from(HEAD_DIM))?,
            floats: device.allocate("projections", columns)?,
            indexer: CsaIndexer::new(model, query, head)?,
            workspace: IndexerWorkspace::new(device, model, limits)?,
            activations: device.allocate("activations", queries * u64::from(hidden.max(latent)))?,
            lists: device.allocate("lists", queries * u64::from(SELECTED))?,
            tile: device.allocate("tile", queries * u64::from(SELECTED.max(WINDOW) * HEAD_DIM))?,
            lengths: device.allocate("lengths", queries)?,
            heads: device.allocate("heads", queries * u64::from(HEADS * HEAD_DIM))?,
            attended: device.allocate("results", queries * u64::from(HEADS * HEAD_DIM))?,
        })
    }

    /// All memory of the tensors, for a graph to retain.
    pub fn memory(&self) -> Vec<Memory<Null>> {
        let Self { rows, floats, activations, lists, tile, lengths, heads, attended, .. } = self;
        let own = [rows.memory(), floats.memory(), activations.memory(), heads.memory()];
        let results = [lists.memory(), tile.memory(), lengths.memory(), attended.memory()];
        let indexer = [self.indexer.memory(), self.workspace.memory()].concat();
        [&own[..], &results, &indexer].concat()
    }

    /// The step's window rows.
    pub fn rows(&self) -> &Buffer<Null, bf16> {
        &self.rows
    }

    fn compressor(&self) -> CompressorInputs<'_, Null> {
        let floats = &self.floats;
        CompressorInputs { kv: floats, gate: floats, ape: floats, norm: floats }
    }

    /// Queues the update of a layer that has only a window.
    pub fn update_swa<'s>(
        &self,
        layer: Layer<'s, Null, Swa>,
    ) -> Result<UpdatedLayer<'s, Null, Swa>, KvError> {
        layer.update(&self.rows)
    }

    /// Queues the update of a CSA layer.
    pub fn update_csa<'s>(
        &self,
        layer: Layer<'s, Null, Csa>,
    ) -> Result<UpdatedLayer<'s, Null, Csa>, KvError> {
        let (kv, main, index) = (&self.rows, self.compressor(), self.compressor());
        layer.update(&CsaInputs { kv, main, index })
    }

    /// Queues the update of an HCA layer.
    pub fn update_hca<'s>(
        &self,
        layer: Layer<'s, Null, Hca>,
    ) -> Result<UpdatedLayer<'s, Null, Hca>, KvError> {
        layer.update(&HcaInputs { kv: &self.rows, main: self.compressor() })
    }

    /// Queues the gather of the windows of the first `queries` queries.
    pub fn gather_window<K>(
        &self,
        layer: &UpdatedLayer<'_, Null, K>,
        queries: u32,
    ) -> Result<(), KvError> {
        layer.gather_window(0..queries, &self.tile, &self.lengths)
    }

    /// Queues the whole indexer, from activations to lists.
    pub fn select(&self, layer: &UpdatedLayer<'_, Null, Csa>, queries: u32) -> Result<(), KvError> {
        let activations = Activations { latent: &self.activations, hidden: &self.activations };
        layer.select(&self.indexer, &activations, &self.workspace, &self.lists(queries))
    }

    /// The lists of the first `queries` queries.
    fn lists(&self, queries: u32) -> EntryLists<'_, Null> {
        EntryLists { queries: 0..queries, k: SELECTED, indices: &self.lists }
    }

    /// Queues the gather of the entries in the lists.
    pub fn gather_entries(
        &self,
        layer: &UpdatedLayer<'_, Null, Csa>,
        queries: u32,
    ) -> Result<(), KvError> {
        layer.gather_entries(0..queries, &self.lists(queries), &self.tile)
    }

    /// Queues the gather of all entries.
    pub fn gather_all(
        &self,
        layer: &UpdatedLayer<'_, Null, Hca>,
        queries: u32,
    ) -> Result<(), KvError> {
        layer.gather_all(0..queries, ALL_ROWS, &self.tile, &self.lengths)
    }

    /// The other tensors of attention in place.
    pub fn heads(&self) -> AttentionTensors<'_, Null> {
        let Self { heads: query, floats: sinks, attended: out, .. } = self;
        let form = QueryForm::Rotated;
        AttentionTensors { heads: HEADS, query, form, sinks, out, lse: None }
    }

    /// Queues attention in place over the window and the listed entries.
    pub fn attend_listed(
        &self,
        layer: &UpdatedLayer<'_, Null, Csa>,
        queries: u32,
    ) -> Result<(), KvError> {
        layer.attend(0..queries, &self.lists(queries), &self.heads())
    }

    /// Queues the updates and appends of all layers.
    pub fn queue(&self, layers: &mut Layers<'_, Null>) -> Result<(), KvError> {
        layers.layer_kinds().try_for_each(|(layer, kind)| self.queue_layer(layers, layer, kind))
    }

    fn queue_layer(
        &self,
        layers: &mut Layers<'_, Null>,
        layer: LayerId,
        kind: LayerKind,
    ) -> Result<(), KvError> {
        match kind {
            LayerKind::Swa => self.update_swa(layers.swa(layer)?)?.append(),
            LayerKind::Csa => self.update_csa(layers.csa(layer)?)?.append(),
            LayerKind::Hca => self.update_hca(layers.hca(layer)?)?.append(),
        }
    }
}
