//! A folder of reference vectors: a checkpoint, and the results of transformers for it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use dsv4_kv_model::layer::Compressed;
use dsv4_kv_model::{AttentionPlace, Model};
use dsv4_kv_model_files::{ModelFiles, Routing};
use ndarray::{Array2, ArrayD, ArrayView3, Ix3, s};
use safetensors::{Dtype, SafeTensors};

/// A checkpoint and its reference vectors.
#[derive(Clone)]
pub struct Reference {
    /// The folder.
    pub folder: PathBuf,
    /// Its name.
    pub name: String,
    /// The model, as loaded by this project.
    pub model: Arc<Model>,
    /// The device on which attention runs: the host, or in place.
    pub place: AttentionPlace,
    /// `[requests, tokens]`: prompt and greedy continuation.
    pub tokens: Array2<u32>,
    /// Tokens of each prompt.
    pub prompt: usize,
    /// Positions for which logits and streams are stored.
    pub positions: Vec<usize>,
    /// All tensors except tokens and positions, in f32 or as integers.
    tensors: SafeTensorsOwned,
}

/// A file of tensors in memory.
#[derive(Clone)]
struct SafeTensorsOwned(Arc<Vec<u8>>);

impl Reference {
    /// The folders of `DSV4_E2E_DIR`, or those of this repository.
    ///
    /// # Errors
    /// If there is no folder, or one cannot be read.
    pub fn all() -> Result<Vec<Self>> {
        let given = std::env::var_os("DSV4_E2E_DIR").map(PathBuf::from);
        let root = given.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("e2e"));
        let has_model = |folder: &Path| folder.join("reference.safetensors").exists();
        let mut folders = vec![root.clone()];
        if !has_model(&root) {
            let entries = std::fs::read_dir(&root).with_context(|| root.display().to_string())?;
            folders = entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
            folders.retain(|folder| has_model(folder));
            folders.sort();
        }
        ensure!(!folders.is_empty(), "{}: no folder has a reference.safetensors", root.display());
        let open =
            |folder: &PathBuf| Self::open(folder).with_context(|| folder.display().to_string());
        folders.iter().map(open).collect()
    }

    fn open(folder: &Path) -> Result<Self> {
        let name = folder.file_name().context("a folder's name")?.to_string_lossy().into_owned();
        let meta = std::fs::read_to_string(folder.join("meta.json"))?;
        let meta: serde_json::Value = serde_json::from_str(&meta)?;
        let prompt = meta["options"]["prompt_len"].as_u64().context("options.prompt_len")?;
        let model = Arc::new(Model::load(&ModelFiles::open(folder)?, |_| {})?);
        let tensors =
            SafeTensorsOwned(Arc::new(std::fs::read(folder.join("reference.safetensors"))?));
        let tokens =
            tensors.integers("tokens")?.mapv(|token| token as u32).into_dimensionality()?;
        let positions = tensors.integers("positions")?.iter().map(|&p| p as usize).collect();
        let (folder, prompt) = (folder.to_owned(), prompt as usize);
        let place = AttentionPlace::Host;
        Ok(Self { folder, name, model, place, tokens, prompt, positions, tensors })
    }

    /// Whether every expert comes from a hash table and every list holds all entries.
    #[must_use]
    pub fn chooses_nothing_by_score(&self) -> bool {
        let config = &self.model.config;
        let by_table = config.experts.routing.iter().all(|routing| *routing == Routing::Hash);
        by_table && self.tokens.ncols() / 4 <= config.cache.index_topk as usize
    }

    /// Whether a layer has an indexer.
    #[must_use]
    pub fn has_indexers(&self) -> bool {
        self.model.layers.iter().any(|layer| matches!(layer.compressed, Compressed::Csa(_)))
    }

    /// The first request alone, with another model.
    #[must_use]
    pub fn mutated(&self, model: Arc<Model>) -> Self {
        let tokens = self.tokens.slice(s![..1, ..]).to_owned();
        Self { model, tokens, ..self.clone() }
    }

    /// The same reference with attention on the device.
    #[must_use]
    pub fn in_place(&self) -> Self {
        let name = format!("{}::in_place", self.name);
        Self { name, place: AttentionPlace::Device, ..self.clone() }
    }

    /// Number of requests.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.tokens.nrows()
    }

    /// The tokens of a request.
    #[must_use]
    pub fn request(&self, index: usize) -> Vec<u32> {
        self.tokens.row(index).to_vec()
    }

    /// The tensor of f32 with this name; `None` if there is none.
    pub fn find(&self, name: &str) -> Result<Option<ArrayD<f32>>> {
        if self.tensors.view()?.tensor(name).is_err() {
            return Ok(None);
        }
        self.tensors.floats(name).map(Some)
    }

    /// A tensor of f32.
    pub fn floats(&self, name: &str) -> Result<ArrayD<f32>> {
        self.tensors.floats(name)
    }

    /// A tensor of i32.
    pub fn integers(&self, name: &str) -> Result<ArrayD<i32>> {
        self.tensors.integers(name)
    }
}

/// A tensor with three axes.
pub fn three<T>(tensor: &ArrayD<T>) -> Result<ArrayView3<'_, T>> {
    Ok(tensor.view().into_dimensionality::<Ix3>()?)
}

impl SafeTensorsOwned {
    fn view(&self) -> Result<SafeTensors<'_>> {
        Ok(SafeTensors::deserialize(&self.0)?)
    }

    fn floats(&self, name: &str) -> Result<ArrayD<f32>> {
        self.read(name, Dtype::F32, f32::from_le_bytes)
    }

    fn integers(&self, name: &str) -> Result<ArrayD<i32>> {
        self.read(name, Dtype::I32, i32::from_le_bytes)
    }

    fn read<T>(&self, name: &str, dtype: Dtype, decode: fn([u8; 4]) -> T) -> Result<ArrayD<T>> {
        let tensors = self.view()?;
        let tensor = tensors.tensor(name).with_context(|| name.to_owned())?;
        if tensor.dtype() != dtype {
            bail!("{name} is {:?} instead of {dtype:?}", tensor.dtype());
        }
        let values = tensor.data().as_chunks::<4>().0.iter().map(|&bytes| decode(bytes)).collect();
        Ok(ArrayD::from_shape_vec(tensor.shape(), values)?)
    }
}
