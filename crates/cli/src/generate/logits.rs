//! The file of `--logits`.

use std::fs::{self, OpenOptions};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::Result;
use dsv4_kv_model::Model;
use dsv4_kv_model::sequence::Work;
use ndarray::ArrayView2;
use safetensors::Dtype;
use safetensors::tensor::{TensorView, serialize_to_file};

use crate::error::InputError;
use crate::output::{self, Input};

/// Logits of tokens that became final, for a file.
///
/// Until they are written, an older file stays unchanged. If the value is dropped before that, a file that was created
/// for it is removed.
pub struct Logits {
    path: PathBuf,
    /// Whether the file is removed when this value is dropped.
    unfinished: bool,
    vocabulary: usize,
    tokens: Vec<i64>,
    logits: Vec<f32>,
}

impl Logits {
    /// Checks that the file can be written, and creates it if it does not exist. `inputs` are the files that the command
    /// reads.
    ///
    /// # Errors
    /// [`InputError::Logits`]; [`InputError::OutputIsInput`] if it is one of `inputs`.
    pub fn open(path: &Path, model: &Model, inputs: &[Input<'_>]) -> Result<Self, InputError> {
        let refused = |source| InputError::Logits { path: path.into(), source };
        let mut options = OpenOptions::new();
        let (file, unfinished) = match options.write(true).create_new(true).open(path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                (options.create_new(false).open(path), false)
            }
            made => (made, true),
        };
        let file = file.map_err(refused)?;
        let vocabulary = model.config.vocab_size as usize;
        let (tokens, logits) = (Vec::new(), Vec::new());
        let opened = Self { path: path.into(), unfinished, vocabulary, tokens, logits };
        output::check_not_read(("--logits", path), &file, inputs)?;
        Ok(opened)
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
    pub fn write(mut self) -> Result<()> {
        let Self { path, vocabulary, tokens, logits, .. } = &self;
        let count = tokens.len();
        let bytes = bytemuck::cast_slice(logits);
        let logits = TensorView::new(Dtype::F32, vec![count, *vocabulary], bytes)?;
        let tokens = TensorView::new(Dtype::I64, vec![count], bytemuck::cast_slice(tokens))?;
        serialize_to_file([("logits", logits), ("tokens", tokens)], None, path)?;
        self.unfinished = false;
        Ok(())
    }
}

impl Drop for Logits {
    fn drop(&mut self) {
        if self.unfinished {
            let _ = fs::remove_file(&self.path);
        }
    }
}
