//! `CsaIndexer`: picks the entries that a CSA layer's queries attend to.
//!
//! One workspace serves all layers, and bounds the memory of scores: queries that do not fit at once are taken in
//! parts. Selection allocates nothing, reads nothing back and does not depend on device data, so that it can be
//! captured.
//!
//! | file | what it holds |
//! |---|---|
//! | `mod.rs` | [`CsaIndexer`], [`QueryWeight`]: the weights |
//! | `select.rs` | from activations or projections to lists, in an updated CSA layer |
//! | `weights.rs` | [`IndexerWeights`]: the weights in host memory, of a model |
//! | `workspace.rs` | [`IndexerWorkspace`]: the memory |

mod select;
mod weights;
mod workspace;

use dsv4_kv_linear::Nvfp4Linear;
use dsv4_kv_model_files::ModelFiles;
use kv_layout::config::ModelConfig;
use kv_layout::geometry::INDEX_DIM;

use crate::device::shape::check_length;
use crate::device::{Backend, Buffer, Memory, Stream, bf16};
use crate::error::KvError;
use crate::ops::check_argument;

pub use select::{Activations, ProjectedQueries};
pub use weights::{IndexerWeights, QueryValues, padded_columns};
pub use workspace::{IndexerWorkspace, WorkspaceLimits, WorkspaceSize};

/// The weight of the query projection, `[heads * 128, q_lora_rank]`, each row padded with zeros to a multiple of 32.
#[derive(Clone)]
pub enum QueryWeight<B: Backend> {
    /// In BF16. Up to 64 queries take two launches: one for the product, one for RoPE, Hadamard transform and
    /// quantisation. More take one launch for both.
    Bf16(Buffer<B, bf16>),
    /// In NVFP4: one launch from activations to queries.
    Nvfp4(Nvfp4Linear<B>),
}

impl<B: Backend> From<Buffer<B, bf16>> for QueryWeight<B> {
    fn from(weight: Buffer<B, bf16>) -> Self {
        Self::Bf16(weight)
    }
}

impl<B: Backend> From<Nvfp4Linear<B>> for QueryWeight<B> {
    fn from(weight: Nvfp4Linear<B>) -> Self {
        Self::Nvfp4(weight)
    }
}

impl<B: Backend> QueryWeight<B> {
    fn check(&self, columns: u64, inner: u32) -> Result<(), KvError> {
        match self {
            Self::Bf16(weight) => {
                let needed = columns.saturating_mul(inner.into());
                Ok(check_length("indexer query weight", weight.len(), needed)?)
            }
            Self::Nvfp4(weight) => {
                let found = [u64::from(weight.columns()), weight.inner().into()];
                let expected = [columns, inner.into()];
                if found == expected {
                    return Ok(());
                }
                Err(KvError::QueryWeight { found, expected })
            }
        }
    }

    fn memory(&self) -> Vec<Memory<B>> {
        match self {
            Self::Bf16(weight) => vec![weight.memory()],
            Self::Nvfp4(weight) => weight.memory().to_vec(),
        }
    }
}

/// The indexer of one CSA layer: its weights.
///
/// The products need a multiple of 32 columns. For a model with another number, rows of weights are padded with zeros,
/// and activations must have [`Self::latent_columns`] and [`Self::hidden_columns`] columns, padded likewise: the sums
/// are the same. Released models need no padding.
pub struct CsaIndexer<B: Backend> {
    heads: u32,
    latent_columns: u32,
    hidden_columns: u32,
    query_weight: QueryWeight<B>,
    head_weight: Buffer<B, bf16>,
}

impl<B: Backend> CsaIndexer<B> {
    /// The indexer with these weights: `query_weight` (`[heads * 128, q_lora_rank]` BF16 or NVFP4) and `head_weight`
    /// (`[heads, hidden_size]` BF16), the model's `indexer.wq_b` and `indexer.weights_proj`, each row padded with
    /// zeros to a multiple of 32.
    ///
    /// # Errors
    /// [`KvError::Device`] for a model whose query latent or hidden state has no columns, or more than `2^31`, or for a
    /// weight in BF16 that is too short; [`KvError::QueryWeight`] for one in NVFP4 of another shape.
    pub fn new(
        model: &ModelConfig,
        query_weight: impl Into<QueryWeight<B>>,
        head_weight: Buffer<B, bf16>,
    ) -> Result<Self, KvError> {
        let ModelConfig { index_heads: heads, q_lora_rank, hidden_size, .. } = *model;
        check_columns(model)?;
        let [latent_columns, hidden_columns] = [q_lora_rank, hidden_size].map(padded_columns);
        let of_heads = |columns: u32| u64::from(heads) * u64::from(columns);
        let query_weight = query_weight.into();
        query_weight.check(of_heads(INDEX_DIM), latent_columns)?;
        check_length("indexer head weight", head_weight.len(), of_heads(hidden_columns))?;
        Ok(Self { heads, latent_columns, hidden_columns, query_weight, head_weight })
    }

    /// The indexer of CSA layer `layer` of a model, padded.
    ///
    /// # Errors
    /// As [`IndexerWeights::of_layer`]; [`KvError::Device`].
    pub fn of_layer(
        stream: &Stream<B>,
        model_files: &ModelFiles,
        layer: u32,
    ) -> Result<Self, KvError> {
        let weights = IndexerWeights::of_layer(model_files, layer)?;
        Self::from_host(stream, &model_files.config().cache, &weights)
    }

    /// The indexer with weights in host memory, which are copied and padded.
    ///
    /// # Errors
    /// As [`Self::new`]; [`KvError::Device`] if there is no memory.
    pub fn from_host(
        stream: &Stream<B>,
        model: &ModelConfig,
        weights: &IndexerWeights,
    ) -> Result<Self, KvError> {
        check_columns(model)?;
        let query = match &weights.query {
            QueryValues::Bf16(values) => {
                let padded = padded_rows(values, model.q_lora_rank);
                QueryWeight::Bf16(stream.upload_new("indexer query weight", &padded)?)
            }
            QueryValues::Nvfp4(matrix) => QueryWeight::Nvfp4(Nvfp4Linear::new(stream, matrix)?),
        };
        let head = padded_rows(&weights.head, model.hidden_size);
        Self::new(model, query, stream.upload_new("indexer head weight", &head)?)
    }

    /// `[heads * 128, latent_columns]`, BF16 or NVFP4, for callers who compute the product themselves and pass it to
    /// [`crate::step::UpdatedLayer::select_projected`].
    #[must_use]
    pub fn query_weight(&self) -> &QueryWeight<B> {
        &self.query_weight
    }

    /// `[heads, hidden_columns]` BF16.
    #[must_use]
    pub fn head_weight(&self) -> &Buffer<B, bf16> {
        &self.head_weight
    }

    /// Columns of [`Activations::latent`]: the model's, padded with zeros to a multiple of 32.
    #[must_use]
    pub fn latent_columns(&self) -> u32 {
        self.latent_columns
    }

    /// Columns of [`Activations::hidden`]: the model's, padded with zeros to a multiple of 32.
    #[must_use]
    pub fn hidden_columns(&self) -> u32 {
        self.hidden_columns
    }

    /// Its weights, for a graph to retain.
    #[must_use]
    pub fn memory(&self) -> Vec<Memory<B>> {
        let mut memory = self.query_weight.memory();
        memory.push(self.head_weight.memory());
        memory
    }
}

/// Refuses a model whose weights have no columns, or too many to be padded.
fn check_columns(model: &ModelConfig) -> Result<(), KvError> {
    check_argument("query latent columns", model.q_lora_rank, 1, 1 << 31)?;
    Ok(check_argument("hidden columns", model.hidden_size, 1, 1 << 31)?)
}

/// Rows of `columns` values, each padded with zeros to [`padded_columns`].
fn padded_rows(weight: &[bf16], columns: u32) -> Vec<bf16> {
    let zeros = vec![bf16::ZERO; (padded_columns(columns) - columns) as usize];
    weight.chunks_exact(columns as usize).flat_map(|row| [row, &zeros].concat()).collect()
}
