//! Checkpoint files that a test writes to a temporary directory.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use dsv4_kv_model_files::{ModelFileError, ModelFiles};
use half::bf16;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use tempfile::TempDir;

/// A tensor of a checkpoint file.
#[derive(Clone, Debug, PartialEq)]
pub struct Made {
    /// Its element type.
    pub dtype: Dtype,
    /// Its shape, as in the header of the file.
    pub shape: Vec<usize>,
    /// Its elements, little-endian.
    pub bytes: Vec<u8>,
}

impl Made {
    /// A tensor of the given type, shape and bytes.
    #[must_use]
    pub fn new(dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> Self {
        Self { dtype, shape: shape.to_vec(), bytes }
    }

    /// A tensor of `values` in F32.
    #[must_use]
    pub fn f32(shape: &[usize], values: &[f32]) -> Self {
        Self::new(Dtype::F32, shape, values.iter().flat_map(|value| value.to_le_bytes()).collect())
    }

    /// A tensor of `values`, rounded to BF16.
    #[must_use]
    pub fn bf16(shape: &[usize], values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes());
        Self::new(Dtype::BF16, shape, bytes.collect())
    }

    /// A tensor of `values` in I64.
    #[must_use]
    pub fn i64(shape: &[usize], values: &[i64]) -> Self {
        Self::new(Dtype::I64, shape, values.iter().flat_map(|value| value.to_le_bytes()).collect())
    }
}

/// Tensors by their names in the file.
pub type Tensors = BTreeMap<String, Made>;

/// Builds [`Tensors`] from pairs of name and tensor.
#[must_use]
pub fn tensors<const N: usize>(pairs: [(&str, Made); N]) -> Tensors {
    pairs.into_iter().map(|(name, made)| (name.to_owned(), made)).collect()
}

/// The bytes of a safetensors file with these tensors.
///
/// # Panics
/// If the bytes of a tensor do not have the length that its type and shape require.
#[must_use]
pub fn serialized(tensors: &Tensors) -> Vec<u8> {
    let views = tensors.iter().map(|(name, made)| {
        let view = TensorView::new(made.dtype, made.shape.clone(), &made.bytes);
        (name, view.expect("bytes fit the shape"))
    });
    safetensors::serialize(views, None).expect("a file")
}

/// The `config.json` that transformers wrote for a tiny model with every kind of layer.
///
/// # Panics
/// Never: the file is part of this crate.
#[must_use]
pub fn config() -> Value {
    serde_json::from_str(include_str!("../configs/transformers.json")).expect("JSON")
}

/// Makes a temporary directory with this `config.json` and these files.
///
/// # Panics
/// If a file cannot be written.
#[must_use]
pub fn directory(config: &Value, files: &[(&str, &[u8])]) -> TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    fs::write(directory.path().join("config.json"), config.to_string()).expect("room");
    for (name, bytes) in files {
        fs::write(directory.path().join(name), bytes).expect("room");
    }
    directory
}

/// Opens a checkpoint of one file. The directory is deleted on return; the file stays mapped in the open checkpoint.
///
/// # Panics
/// If the checkpoint is refused.
#[must_use]
pub fn one_file(config: &Value, tensors: &Tensors) -> ModelFiles {
    let directory = directory(config, &[("model.safetensors", &serialized(tensors))]);
    ModelFiles::open(directory.path()).expect("a checkpoint")
}

/// Makes a directory of shards, with an index file whose weight map is `map`.
///
/// # Panics
/// If a file cannot be written.
#[must_use]
pub fn sharded(shards: &[(&str, &Tensors)], map: &Value) -> TempDir {
    let mut files = vec![(
        "model.safetensors.index.json",
        json!({ "weight_map": map }).to_string().into_bytes(),
    )];
    files.extend(shards.iter().map(|(name, tensors)| (*name, serialized(tensors))));
    let files: Vec<(&str, &[u8])> = files.iter().map(|(name, bytes)| (*name, &bytes[..])).collect();
    directory(&config(), &files)
}

/// The error with which `ModelFiles::open` refuses `directory`.
///
/// # Panics
/// If the checkpoint opens.
#[must_use]
pub fn refusal(directory: &Path) -> ModelFileError {
    ModelFiles::open(directory).err().expect("it should be refused")
}
