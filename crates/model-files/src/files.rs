//! Finds the weight files of a model: one file, or the shards that an index lists.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Component, Path, PathBuf};

use serde_json::{Map, Value};

use crate::error::ModelFileError;

/// Most bytes of a `config.json`, and of a `generation_config.json`.
const CONFIG_BYTES: u64 = 1 << 20;
/// Most bytes of an index: 200 for each of a million tensors. The index of V4-Pro has 145,000 tensors.
const INDEX_BYTES: u64 = 200 << 20;

/// The weight files of a model.
pub(crate) struct Files {
    /// The index that lists the shards, if there is one.
    index: Option<PathBuf>,
    /// Each shard once, in order of name, with the tensors that the index assigns to it.
    pub(crate) shards: BTreeMap<PathBuf, Vec<String>>,
}

impl Files {
    /// Finds `model.safetensors`, or the shards of `model.safetensors.index.json`. If both are there, the index has to
    /// list the file: other programs differ in which of the two they read.
    pub(crate) fn find(directory: &Path) -> Result<Self, ModelFileError> {
        let single = directory.join("model.safetensors");
        let index = directory.join("model.safetensors.index.json");
        match (is_there(&single), is_there(&index)) {
            (false, false) => Err(ModelFileError::NoWeights { path: directory.into() }),
            (true, false) => {
                Ok(Self { index: None, shards: BTreeMap::from([(single, Vec::new())]) })
            }
            (is_beside, true) => {
                let sharded = Self::of_index(index.clone())?;
                if is_beside && !sharded.shards.contains_key(&single) {
                    let reason = "model.safetensors is beside it, and is not one of its files: \
                                  remove the one of the two that is not of this model";
                    return Err(ModelFileError::Index { path: index, reason: reason.to_owned() });
                }
                Ok(sharded)
            }
        }
    }

    /// The shards that an index lists.
    fn of_index(index: PathBuf) -> Result<Self, ModelFileError> {
        let json = read_text(&index, INDEX_BYTES)?;
        let invalid = |reason: String| ModelFileError::Index { path: index.clone(), reason };
        let object: Map<String, Value> =
            serde_json::from_str(&json).map_err(|error| invalid(error.to_string()))?;
        let Some(map) = object.get("weight_map").and_then(Value::as_object) else {
            return Err(invalid("it has no object `weight_map`".to_owned()));
        };
        let mut shards = BTreeMap::<PathBuf, Vec<String>>::new();
        for (tensor, shard) in map {
            let Some(shard) = shard.as_str() else {
                return Err(invalid(format!("the file of {tensor:?} is {shard}, not a text")));
            };
            shards.entry(beside(&index, shard)?).or_default().push(tensor.clone());
        }
        if shards.is_empty() {
            return Err(invalid("`weight_map` is empty".to_owned()));
        }
        Ok(Self { index: Some(index), shards })
    }

    /// All files: the index, if there is one, then the shards in the order of their names.
    pub(crate) fn all(self) -> impl Iterator<Item = PathBuf> {
        self.index.into_iter().chain(self.shards.into_keys())
    }
}

/// The path of a shard, which must be a file in the index's own directory.
fn beside(index: &Path, shard: &str) -> Result<PathBuf, ModelFileError> {
    let name = Path::new(shard);
    let mut parts = name.components();
    // Compared as text, since paths are equal without a slash at the end.
    let plain = matches!(
        (parts.next(), parts.next()),
        (Some(Component::Normal(part)), None) if part == shard
    );
    if !plain {
        return Err(ModelFileError::OutsideDirectory { path: index.into(), shard: shard.into() });
    }
    let path = index.with_file_name(name);
    if !path.is_file() {
        return Err(ModelFileError::NoShard { path: index.into(), shard: shard.into() });
    }
    Ok(path)
}

/// The `generation_config.json` of a model, if there is one.
pub(crate) fn generation_config(directory: &Path) -> Option<PathBuf> {
    Some(directory.join("generation_config.json")).filter(|path| is_there(path))
}

/// Whether there is a file of this path. A link that leads nowhere is one: it is refused when it is read, by name.
fn is_there(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// A `config.json` or `generation_config.json` of a model.
pub(crate) fn read_config(path: &Path) -> Result<String, ModelFileError> {
    read_text(path, CONFIG_BYTES)
}

fn read_text(path: &Path, most: u64) -> Result<String, ModelFileError> {
    let mut text = String::new();
    let read = File::open(path).and_then(|file| file.take(most + 1).read_to_string(&mut text));
    read.map_err(|source| ModelFileError::File { path: path.into(), source })?;
    if text.len() as u64 > most {
        return Err(ModelFileError::TooLarge { path: path.into(), most });
    }
    Ok(text)
}
