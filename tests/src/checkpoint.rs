//! Checkpoints made by a test, in a directory of their own.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use dsv4_kv_checkpoint::{Checkpoint, CheckpointError};
use half::bf16;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use tempfile::TempDir;

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq)]
pub struct Made {
    /// Its type.
    pub dtype: Dtype,
    /// Its shape, as the file says it.
    pub shape: Vec<usize>,
    /// Its elements, little-endian.
    pub bytes: Vec<u8>,
}

impl Made {
    /// A tensor of these bytes.
    #[must_use]
    pub fn new(dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> Self {
        Self { dtype, shape: shape.to_vec(), bytes }
    }

    /// A tensor of these values, as F32.
    #[must_use]
    pub fn f32(shape: &[usize], values: &[f32]) -> Self {
        Self::new(Dtype::F32, shape, values.iter().flat_map(|value| value.to_le_bytes()).collect())
    }

    /// A tensor of these values, as BF16, rounded.
    #[must_use]
    pub fn bf16(shape: &[usize], values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes());
        Self::new(Dtype::BF16, shape, bytes.collect())
    }

    /// A tensor of these values, as I64.
    #[must_use]
    pub fn i64(shape: &[usize], values: &[i64]) -> Self {
        Self::new(Dtype::I64, shape, values.iter().flat_map(|value| value.to_le_bytes()).collect())
    }
}

/// Tensors by the names they are written with.
pub type Tensors = BTreeMap<String, Made>;

/// Tensors from pairs.
#[must_use]
pub fn tensors<const N: usize>(pairs: [(&str, Made); N]) -> Tensors {
    pairs.into_iter().map(|(name, made)| (name.to_owned(), made)).collect()
}

/// A file's bytes.
///
/// # Panics
/// If a tensor's bytes are not those of its type and shape.
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

/// A directory with this `config.json` and these files.
///
/// # Panics
/// If they cannot be written.
#[must_use]
pub fn directory(config: &Value, files: &[(&str, &[u8])]) -> TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    fs::write(directory.path().join("config.json"), config.to_string()).expect("room");
    for (name, bytes) in files {
        fs::write(directory.path().join(name), bytes).expect("room");
    }
    directory
}

/// A checkpoint of one file. Its files are gone when it has been opened: they stay mapped.
///
/// # Panics
/// If it is refused.
#[must_use]
pub fn one_file(config: &Value, tensors: &Tensors) -> Checkpoint {
    let directory = directory(config, &[("model.safetensors", &serialized(tensors))]);
    Checkpoint::open(directory.path()).expect("a checkpoint")
}

/// Shards with an index that says `map`.
///
/// # Panics
/// If they cannot be written.
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

/// Why it is not opened.
///
/// # Panics
/// If it is.
#[must_use]
pub fn refusal(directory: &Path) -> CheckpointError {
    Checkpoint::open(directory).err().expect("it should be refused")
}
