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

use kv_layout::config::ModelConfig;
use kv_layout::geometry::INDEX_DIM;

use crate::device::shape::check_length;
use crate::device::{Backend, Buffer, Memory, bf16};
use crate::error::KvError;

pub use select::{Activations, ProjectedQueries, Selection};
pub use workspace::{IndexerWorkspace, WorkspaceLimits, WorkspaceSize};

/// The indexer of one CSA layer: its weights.
pub struct CsaIndexer<B: Backend> {
    heads: u32,
    q_lora_rank: u32,
    hidden_size: u32,
    query_weight: Buffer<B, bf16>,
    head_weight: Buffer<B, bf16>,
}

impl<B: Backend> CsaIndexer<B> {
    /// The indexer with these weights: `query_weight` (`[heads * 128, q_lora_rank]` BF16) and
    /// `head_weight` (`[heads, hidden_size]` BF16): the checkpoint's `indexer.wq_b`, which released
    /// checkpoints store as E4M3 with UE8M0 scales, and `indexer.weights_proj`.
    ///
    /// # Errors
    /// [`KvError::Device`] if a weight is too short for the model.
    pub fn new(
        model: &ModelConfig,
        query_weight: Buffer<B, bf16>,
        head_weight: Buffer<B, bf16>,
    ) -> Result<Self, KvError> {
        let ModelConfig { index_heads: heads, q_lora_rank, hidden_size, .. } = *model;
        let of_heads = |columns: u32| u64::from(heads) * u64::from(columns);
        let query = of_heads(INDEX_DIM).saturating_mul(q_lora_rank.into());
        check_length("indexer query weight", query_weight.len(), query)?;
        check_length("indexer head weight", head_weight.len(), of_heads(hidden_size))?;
        Ok(Self { heads, q_lora_rank, hidden_size, query_weight, head_weight })
    }

    /// Its weights, for a graph to retain.
    #[must_use]
    pub fn memory(&self) -> Vec<Memory<B>> {
        vec![self.query_weight.memory(), self.head_weight.memory()]
    }
}
