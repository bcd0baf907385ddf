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
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Made {
    pub fn new(dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> Self {
        Self { dtype, shape: shape.to_vec(), bytes }
    }

    pub fn f32(shape: &[usize], values: &[f32]) -> Self {
        Self::new(Dtype::F32, shape, values.iter().flat_map(|value| value.to_le_bytes()).collect())
    }

    pub fn bf16(shape: &[usize], values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes());
        Self::new(Dtype::BF16, shape, bytes.collect())
    }

    pub fn i64(shape: &[usize], values: &[i64]) -> Self {
        Self::new(Dtype::I64, shape, values.iter().flat_map(|value| value.to_le_bytes()).collect())
    }
}

/// Tensors by the names they are written with.
pub type Tensors = BTreeMap<String, Made>;

/// Tensors from pairs.
pub fn tensors<const N: usize>(pairs: [(&str, Made); N]) -> Tensors {
    pairs.into_iter().map(|(name, made)| (name.to_owned(), made)).collect()
}

/// A file's bytes.
pub fn serialized(tensors: &Tensors) -> Vec<u8> {
    let views = tensors.iter().map(|(name, made)| {
        let view = TensorView::new(made.dtype, made.shape.clone(), &made.bytes);
        (name, view.expect("bytes fit the shape"))
    });
    safetensors::serialize(views, None).expect("a file")
}

/// A directory with the `config.json` that transformers wrote, and these files.
pub fn directory(files: &[(&str, &[u8])]) -> TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    let config = include_str!("../../../configs/transformers.json");
    fs::write(directory.path().join("config.json"), config).expect("room");
    for (name, bytes) in files {
        fs::write(directory.path().join(name), bytes).expect("room");
    }
    directory
}

/// A checkpoint of one file.
pub fn one_file(tensors: &Tensors) -> (TempDir, Checkpoint) {
    let directory = directory(&[("model.safetensors", &serialized(tensors))]);
    let checkpoint = Checkpoint::open(directory.path()).expect("a checkpoint");
    (directory, checkpoint)
}

/// Shards with an index that says `map`.
pub fn sharded(shards: &[(&str, &Tensors)], map: &Value) -> TempDir {
    let mut files = vec![(
        "model.safetensors.index.json",
        json!({ "weight_map": map }).to_string().into_bytes(),
    )];
    files.extend(shards.iter().map(|(name, tensors)| (*name, serialized(tensors))));
    let files: Vec<(&str, &[u8])> = files.iter().map(|(name, bytes)| (*name, &bytes[..])).collect();
    directory(&files)
}

/// Why it is not opened.
pub fn refusal(directory: &Path) -> CheckpointError {
    Checkpoint::open(directory).err().expect("it should be refused")
}
