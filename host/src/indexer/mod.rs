//! `CsaIndexer`: picks the entries that a CSA layer's queries attend to.
//!
//! One workspace serves all layers, and bounds the memory of scores: a chunk of queries that does not
//! fit is taken in parts. Nothing here allocates, reads back or depends on device data, so that it
//! can be captured.
//!
//! | file | what it holds |
//! |---|---|
//! | `mod.rs` | [`CsaIndexer`]: the weights |
//! | `select.rs` | from activations or projections to lists, in an updated CSA layer |
//! | `workspace.rs` | [`IndexerWorkspace`]: the memory |

mod select;
mod workspace;

use dsv4_kv_checkpoint::Checkpoint;
use kv_layout::config::ModelConfig;
use kv_layout::geometry::INDEX_DIM;

use crate::device::shape::check_length;
use crate::device::{Backend, Buffer, Memory, Stream, bf16};
use crate::error::KvError;
use crate::ops;
use crate::weights::upload;

pub use select::{Activations, ProjectedQueries, Selection};
pub use workspace::{IndexerWorkspace, WorkspaceLimits, WorkspaceSize};

/// The indexer of one CSA layer: its weights.
///
/// The products take columns in steps of 128. A model with others has zeros behind its weights, and
/// activations of [`Self::latent_columns`] and [`Self::hidden_columns`] columns, with zeros behind theirs: the
/// sums are the same. Released models need none.
pub struct CsaIndexer<B: Backend> {
    heads: u32,
    latent_columns: u32,
    hidden_columns: u32,
    query_weight: Buffer<B, bf16>,
    head_weight: Buffer<B, bf16>,
}

impl<B: Backend> CsaIndexer<B> {
    /// The indexer with these weights: `query_weight` (`[heads * 128, q_lora_rank]` BF16) and
    /// `head_weight` (`[heads, hidden_size]` BF16), the checkpoint's `indexer.wq_b` and
    /// `indexer.weights_proj`, with zeros behind each row up to a multiple of 128.
    ///
    /// # Errors
    /// [`KvError::Device`] if a weight is too short for the model.
    pub fn new(
        model: &ModelConfig,
        query_weight: Buffer<B, bf16>,
        head_weight: Buffer<B, bf16>,
    ) -> Result<Self, KvError> {
        let ModelConfig { index_heads: heads, q_lora_rank, hidden_size, .. } = *model;
        let [latent_columns, hidden_columns] = [q_lora_rank, hidden_size].map(padded_columns);
        let of_heads = |columns: u32| u64::from(heads) * u64::from(columns);
        let query = of_heads(INDEX_DIM).saturating_mul(latent_columns.into());
        check_length("indexer query weight", query_weight.len(), query)?;
        check_length("indexer head weight", head_weight.len(), of_heads(hidden_columns))?;
        Ok(Self { heads, latent_columns, hidden_columns, query_weight, head_weight })
    }

    /// The indexer of CSA layer `layer` of a checkpoint, padded. Released checkpoints have `indexer.wq_b` as
    /// E4M3 with UE8M0 scales, which BF16 holds exactly.
    ///
    /// # Errors
    /// [`KvError::Checkpoint`] for a tensor that is missing, of another shape or type, or not exact in BF16;
    /// [`KvError::Device`].
    pub fn of_layer(
        stream: &Stream<B>,
        checkpoint: &Checkpoint,
        layer: u32,
    ) -> Result<Self, KvError> {
        let model = &checkpoint.config().cache;
        let prefix = format!("{}.attn.indexer", checkpoint.layer_prefix(layer));
        let load = |name: &str, rows: u32, columns: u32| {
            let name = format!("{prefix}.{name}.weight");
            checkpoint.bf16(&name, &[rows.into(), columns.into()])
        };
        let rows = model.index_heads.saturating_mul(INDEX_DIM);
        let query = load("wq_b", rows, model.q_lora_rank)?;
        let head = load("weights_proj", model.index_heads, model.hidden_size)?;
        Self::from_host(stream, model, &query, &head)
    }

    /// The indexer with weights in host memory, `[heads * 128, q_lora_rank]` and `[heads, hidden_size]`, which
    /// are copied and padded.
    ///
    /// # Errors
    /// [`KvError::Device`] if a weight is too short for the model, or there is no memory.
    pub fn from_host(
        stream: &Stream<B>,
        model: &ModelConfig,
        query_weight: &[bf16],
        head_weight: &[bf16],
    ) -> Result<Self, KvError> {
        let (query, head) = ("indexer query weight", "indexer head weight");
        let query = upload(stream, query, &padded_rows(query_weight, model.q_lora_rank))?;
        let head = upload(stream, head, &padded_rows(head_weight, model.hidden_size))?;
        Self::new(model, query, head)
    }

    /// `[heads * 128, latent_columns]` BF16: for callers who project, as [`crate::step`]'s
    /// `select_projected` takes it.
    #[must_use]
    pub fn query_weight(&self) -> &Buffer<B, bf16> {
        &self.query_weight
    }

    /// `[heads, hidden_columns]` BF16.
    #[must_use]
    pub fn head_weight(&self) -> &Buffer<B, bf16> {
        &self.head_weight
    }

    /// Columns of [`Activations::latent`]: the model's, and zeros up to a multiple of 128.
    #[must_use]
    pub fn latent_columns(&self) -> u32 {
        self.latent_columns
    }

    /// Columns of [`Activations::hidden`]: the model's, and zeros up to a multiple of 128.
    #[must_use]
    pub fn hidden_columns(&self) -> u32 {
        self.hidden_columns
    }

    /// Its weights, for a graph to retain.
    #[must_use]
    pub fn memory(&self) -> Vec<Memory<B>> {
        vec![self.query_weight.memory(), self.head_weight.memory()]
    }
}

/// Columns of activations that the products take for a model with these: the next multiple of 128.
#[must_use]
pub const fn padded_columns(columns: u32) -> u32 {
    columns.next_multiple_of(ops::PROJECTION_STEP)
}

/// Rows of `columns`, with zeros behind each.
fn padded_rows(weight: &[bf16], columns: u32) -> Vec<bf16> {
    let zeros = vec![bf16::ZERO; (padded_columns(columns) - columns) as usize];
    weight.chunks_exact(columns as usize).flat_map(|row| [row, &zeros].concat()).collect()
}
