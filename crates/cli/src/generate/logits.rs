//! The file of `--logits`.

use std::path::{Path, PathBuf};

use anyhow::Result;
use dsv4_kv_model::Model;
use dsv4_kv_model::sequence::Work;
use ndarray::ArrayView2;
use safetensors::Dtype;
use safetensors::tensor::{TensorView, serialize_to_file};

use crate::error::InputError;

/// Logits of tokens that became final.
pub struct Logits {
    path: PathBuf,
    vocabulary: usize,
    tokens: Vec<i64>,
    logits: Vec<f32>,
}

impl Logits {
    /// Opens the file, which must be writable.
    ///
    /// # Errors
    /// [`InputError::Logits`].
    pub fn open(path: &Path, model: &Model) -> Result<Self, InputError> {
        let refused = |source| InputError::Logits { path: path.into(), source };
        std::fs::File::create(path).map_err(refused)?;
        let vocabulary = model.config.vocab_size as usize;
        Ok(Self { path: path.into(), vocabulary, tokens: Vec::new(), logits: Vec::new() })
    }

    /// Adds the final tokens of a step.
    pub fn push(&mut self, work: &Work, logits: ArrayView2<'_, f32>, accepted: u32) {
        let rows = work.tokens.iter().zip(logits.outer_iter()).take(accepted as usize);
        for (&token, row) in rows {
            self.tokens.push(token.into());
            self.logits.extend(row);
        }
    }

    /// Writes the file.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write(self) -> Result<()> {
        let Self { path, vocabulary, tokens, logits } = self;
        let count = tokens.len();
        let bytes = bytemuck::cast_slice(&logits);
        let logits = TensorView::new(Dtype::F32, vec![count, vocabulary], bytes)?;
        let tokens = TensorView::new(Dtype::I64, vec![count], bytemuck::cast_slice(&tokens))?;
        Ok(serialize_to_file([("logits", logits), ("tokens", tokens)], None, &path)?)
    }
}
