//! The tensors of all weight files, under released names.

use std::collections::hash_map::Entry as MapEntry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use kv_layout::router::MAX_EXPERTS;
use safetensors::tensor::Metadata;
use safetensors::{Dtype, SafeTensorError};

use crate::error::ModelFileError;
use crate::files::Files;
use crate::mapped::Mapped;
use crate::names::{self, Merged};

/// Bytes of the length field before a header.
const LENGTH: usize = 8;
/// Most bytes of a header (the format's own limit).
const MAX_HEADER: u64 = 100_000_000;

/// Where a tensor lies, with its type and shape. `bytes` is a range of its file, within the file's length.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    file: usize,
    /// Its name in the file.
    written: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    bytes: Range<usize>,
}

impl Tensor {
    /// Bytes of the tensor in its file.
    fn len(&self) -> u64 {
        self.bytes.len() as u64
    }
}

/// All weight files of a model, memory-mapped, and their tensors.
pub(crate) struct Catalogue {
    files: Vec<(PathBuf, Mapped)>,
    /// The tensors by released name.
    tensors: HashMap<String, Tensor>,
    /// What the index lists and no file has, by released name: the shard and the name that the index gives.
    absent: BTreeMap<String, (PathBuf, String)>,
    bytes: u64,
}

impl Catalogue {
    /// Opens all files and reads their headers. A tensor that the index lists and no file has is no error yet: the
    /// model may not need it.
    pub(crate) fn open(files: &Files) -> Result<Self, ModelFileError> {
        let (opened, tensors, absent) = (Vec::new(), HashMap::new(), BTreeMap::new());
        let mut catalogue = Self { files: opened, tensors, absent, bytes: 0 };
        for (path, indexed) in &files.shards {
            catalogue.add(path, indexed)?;
        }
        let Self { tensors, absent, .. } = &mut catalogue;
        // By the names of whole tensors, as the index lists them: `tensors` has those that merge experts split.
        let held: HashSet<String> =
            tensors.values().map(|tensor| names::released(&tensor.written)).collect();
        absent.retain(|name, _| !held.contains(name));
        catalogue.bytes = catalogue.tensors.values().map(Tensor::len).sum();
        Ok(catalogue)
    }

    /// Bytes of all tensors together.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn find(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name)
    }

    /// All released names, in no particular order.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The released names that the index lists and no file has, in order.
    pub(crate) fn absent(&self) -> impl Iterator<Item = &str> {
        self.absent.keys().map(String::as_str)
    }

    /// The error for a name that the index lists and no file has; `None` for every other name.
    pub(crate) fn not_in_shard(&self, name: &str) -> Option<ModelFileError> {
        let (path, tensor) = self.absent.get(name)?.clone();
        Some(ModelFileError::NotInShard { path, tensor })
    }

    /// The bytes of a tensor of this catalogue.
    pub(crate) fn bytes_of(&self, tensor: &Tensor) -> &[u8] {
        &self.files[tensor.file].1.bytes()[tensor.bytes.clone()]
    }

    fn add(&mut self, path: &Path, indexed: &[String]) -> Result<(), ModelFileError> {
        let mapped = Mapped::open(path)?;
        let (start, metadata) = header(path, mapped.bytes())?;
        for name in indexed.iter().filter(|name| metadata.info(name).is_none()) {
            self.absent.insert(names::released(name), (path.into(), name.clone()));
        }
        let file = self.files.len();
        self.files.push((path.into(), mapped));
        for (written, info) in metadata.tensors() {
            // Within the file's length, because `header` has compared the last end with it.
            let (first, end) = info.data_offsets;
            let tensor = Tensor {
                file,
                dtype: info.dtype,
                shape: info.shape.iter().map(|&extent| extent as u64).collect(),
                bytes: start + first..start + end,
                written,
            };
            self.insert(tensor)?;
        }
        Ok(())
    }

    /// Enters a tensor under its released name. A tensor that merges all experts is entered as one tensor per expert.
    fn insert(&mut self, tensor: Tensor) -> Result<(), ModelFileError> {
        let name = names::released(&tensor.written);
        match names::merged(&name).and_then(|(start, merged)| experts(&tensor, start, merged)) {
            Some(parts) => parts.into_iter().try_for_each(|(name, part)| self.enter(name, part)),
            None => self.enter(name, tensor),
        }
    }

    fn enter(&mut self, name: String, tensor: Tensor) -> Result<(), ModelFileError> {
        match self.tensors.entry(name) {
            MapEntry::Vacant(place) => {
                place.insert(tensor);
                Ok(())
            }
            MapEntry::Occupied(other) => {
                let place = |tensor: &Tensor| {
                    format!("{} of {}", tensor.written, self.files[tensor.file].0.display())
                };
                let (first, second) = (place(other.get()), place(&tensor));
                Err(ModelFileError::Duplicate { name: other.key().clone(), first, second })
            }
        }
    }
}

/// Splits a tensor that merges the weights of all experts into the weights of each expert, which are consecutive rows
/// of it. `None` unless its shape is `[experts, rows, columns]`, with elements of whole bytes.
fn experts(tensor: &Tensor, start: &str, merged: Merged) -> Option<Vec<(String, Tensor)>> {
    let [experts, rows, columns] = tensor.shape[..] else { return None };
    let weights: &[&str] = match merged {
        Merged::GateUp => &["w1", "w3"],
        Merged::Down => &["w2"],
    };
    let each = weights.len() as u64;
    let whole = tensor.dtype.bitsize().is_multiple_of(8) && rows.is_multiple_of(each);
    if !whole || !(1..=u64::from(MAX_EXPERTS)).contains(&experts) {
        return None;
    }
    let bytes = tensor.bytes.len() / (experts * each) as usize;
    let parts = (0..experts).flat_map(|expert| weights.iter().map(move |weight| (expert, weight)));
    let place = |(at, (expert, weight)): (usize, (u64, &&str))| {
        let first = tensor.bytes.start + at * bytes;
        let part = Tensor {
            shape: vec![rows / each, columns],
            bytes: first..first + bytes,
            ..tensor.clone()
        };
        (format!("{start}{expert}.{weight}.weight"), part)
    };
    Some(parts.enumerate().map(place).collect())
}

/// Reads the header of a file and checks it against the file's length. Returns the offset of the data, and the header.
fn header(path: &Path, bytes: &[u8]) -> Result<(usize, Metadata), ModelFileError> {
    let corrupt = |source| ModelFileError::Corrupt { path: path.into(), source };
    let Some((length, rest)) = bytes.split_first_chunk::<LENGTH>() else {
        return Err(corrupt(SafeTensorError::HeaderTooSmall));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER {
        return Err(corrupt(SafeTensorError::HeaderTooLarge));
    }
    let Some((header, data)) = rest.split_at_checked(length as usize) else {
        return Err(corrupt(SafeTensorError::InvalidHeaderLength));
    };
    let metadata: Metadata = serde_json::from_slice(header)
        .map_err(|error| corrupt(SafeTensorError::InvalidHeaderDeserialization(error)))?;
    if metadata.data_len() != data.len() {
        let expected = (LENGTH as u128) + u128::from(length) + metadata.data_len() as u128;
        return Err(ModelFileError::Length {
            path: path.into(),
            found: bytes.len() as u64,
            expected,
        });
    }
    Ok((LENGTH + header.len(), metadata))
}
