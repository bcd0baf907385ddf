//! [`IndexerWeights`]: the weights of an indexer in host memory.

use dsv4_kv_linear::Nvfp4Matrix;
use dsv4_kv_model_files::{ModelFiles, Nvfp4Parts};
use kv_layout::geometry::INDEX_DIM;
use kv_layout::linear::{GROUP, INNER_STEP};

use crate::device::bf16;
use crate::error::KvError;

/// The weights of one layer's indexer in host memory.
#[derive(Clone, Debug)]
pub struct IndexerWeights {
    /// `indexer.wq_b`.
    pub query: QueryValues,
    /// `[heads, hidden_size]`: `indexer.weights_proj`.
    pub head: Vec<bf16>,
}

/// The weight of the query projection in host memory.
#[derive(Clone, Debug)]
pub enum QueryValues {
    /// `[heads * 128, q_lora_rank]`.
    Bf16(Vec<bf16>),
    /// `[heads * 128, CsaIndexer::latent_columns]`: each row padded with zeros.
    Nvfp4(Nvfp4Matrix),
}

impl IndexerWeights {
    /// The weights of CSA layer `layer` of a model; layers are counted through the trunk, then through the MTP layers.
    /// The query projection stays in NVFP4 if the model has it in NVFP4. Released models have it as E4M3 with scales
    /// that are powers of two (UE8M0, or F32 in Base models), which BF16 represents exactly.
    ///
    /// # Errors
    /// [`KvError::ModelFile`] for a tensor that is missing, of another shape or type, or not exact in BF16;
    /// [`KvError::Linear`] for one in NVFP4 that the products do not support.
    pub fn of_layer(model_files: &ModelFiles, layer: u32) -> Result<Self, KvError> {
        let model = &model_files.config().cache;
        let prefix = format!("{}.attn.indexer", model_files.layer_prefix(layer));
        let (rows, columns) = (model.index_heads.saturating_mul(INDEX_DIM), model.q_lora_rank);
        let (query, shape) = (format!("{prefix}.wq_b.weight"), [rows, columns].map(u64::from));
        let query = match model_files.nvfp4(&query, shape)? {
            Some(parts) => QueryValues::Nvfp4(padded(rows, columns, &parts)?),
            None => QueryValues::Bf16(model_files.finite_bf16(&query, &shape)?),
        };
        let shape = [model.index_heads, model.hidden_size].map(u64::from);
        let head = model_files.finite_bf16(&format!("{prefix}.weights_proj.weight"), &shape)?;
        Ok(Self { query, head })
    }
}

/// The matrix of these parts, each row padded with zeros.
fn padded(rows: u32, columns: u32, parts: &Nvfp4Parts) -> Result<Nvfp4Matrix, KvError> {
    let Nvfp4Parts { codes, scales, scale } = parts;
    let inner = padded_columns(columns);
    let pad = |bytes: &[u8], found: u32, needed: u32| -> Vec<u8> {
        let zeros = vec![0; (needed - found) as usize];
        bytes.chunks_exact(found as usize).flat_map(|row| [row, &zeros].concat()).collect()
    };
    let codes = pad(codes, columns / 2, inner / 2);
    let scales = pad(scales, columns.div_ceil(GROUP), inner / GROUP);
    Ok(Nvfp4Matrix::from_parts(rows, inner, codes, scales, *scale)?)
}

/// The columns that the products need for `columns` columns of a model, at most `2^31`: the next multiple of 32.
///
/// # Panics
/// Above `u32::MAX - 31`, in a build that checks for overflow.
#[must_use]
pub const fn padded_columns(columns: u32) -> u32 {
    columns.next_multiple_of(INNER_STEP)
}
