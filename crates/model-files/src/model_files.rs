//! `ModelFiles`: tensors by released name, shape and type.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use half::bf16;
use safetensors::Dtype;

use crate::catalogue::{Catalogue, Tensor};
use crate::config::{self, Config};
use crate::dequantise::{
    self, Codes, E4M3_BLOCK, MXFP4_GROUP, NVFP4_GROUP, Scaled, Weight, elements,
};
use crate::error::ModelFileError;
use crate::files::{self, Files};

/// A matrix `[rows, columns]` in NVFP4. Each value is `code * group scale * scale`; a group is 16 consecutive values of
/// a row.
#[derive(Clone, Debug, PartialEq)]
pub struct Nvfp4Parts {
    /// `[rows, columns / 2]`: E2M1 codes, the even column in the low four bits.
    pub codes: Vec<u8>,
    /// `[rows, columns / 16]`, rounded up: E4M3 scales, none of them NaN.
    pub scales: Vec<u8>,
    /// The scale of the whole matrix, by which every value is multiplied; finite.
    pub scale: f32,
}

/// A model's directory: its configuration, and its memory-mapped weight files.
///
/// Opening reads only the headers of the files; a tensor is read when it is requested. The files must not change while
/// the model is open.
///
/// Tensors have their released names (`layers.0.attn.wq_a.weight`), even if the files use other names. Weights of MTP
/// layers have the prefixes `mtp.0.`, `mtp.1.` and so on, except in files that number these layers behind the others.
pub struct ModelFiles {
    config: Config,
    catalogue: Catalogue,
    progress: Box<dyn Fn(u64, u64) + Send + Sync>,
    read: Mutex<Read>,
}

/// The tensors that were read, scales included.
#[derive(Default)]
struct Read {
    /// Their released names.
    names: HashSet<String>,
    bytes: u64,
}

/// Last parts of names of scales; the weight has `weight` there.
const SCALES: [&str; 4] = ["scale", "weight_scale", "weight_scale_2", "weight_global_scale"];

impl ModelFiles {
    /// Opens the model in `directory`: `config.json`, and `model.safetensors` or the shards that
    /// `model.safetensors.index.json` lists. Tokens that end a text are also taken from `generation_config.json`, if
    /// there is one.
    ///
    /// # Errors
    /// [`ModelFileError`] names the file and what is wrong with it.
    pub fn open(directory: &Path) -> Result<Self, ModelFileError> {
        Self::open_with(directory, |_, _| ())
    }

    /// As [`Self::open`]. Calls `progress` after each tensor that was read, with the bytes read so far and the bytes of
    /// all tensors.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_with(
        directory: &Path,
        progress: impl Fn(u64, u64) + Send + Sync + 'static,
    ) -> Result<Self, ModelFileError> {
        let config = read_config(directory)?;
        let catalogue = Catalogue::open(&Files::find(directory)?)?;
        Ok(Self { config, catalogue, progress: Box::new(progress), read: Mutex::default() })
    }

    /// The files of `directory` whose contents define the results of the model, in a fixed order: `config.json`, the
    /// index if there is one, and the weight files. `generation_config.json` is none of them: it only says where a text
    /// ends.
    ///
    /// # Errors
    /// [`ModelFileError`], as [`Self::open`], for weight files or an index that are missing or invalid.
    pub fn files(directory: &Path) -> Result<Vec<PathBuf>, ModelFileError> {
        let files = Files::find(directory)?.all();
        let config = std::iter::once(directory.join("config.json"));
        Ok(config.chain(files).collect())
    }

    /// Its configuration.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The prefix of the names of a layer's tensors: `layers.3`, or `mtp.0` for the first MTP layer. Layers are counted
    /// through the trunk, then through the MTP layers.
    #[must_use]
    pub fn layer_prefix(&self, layer: u32) -> String {
        let cache = &self.config.cache;
        let trunk = cache.layers.len() as u32 - cache.mtp_layers;
        match layer.checked_sub(trunk) {
            None => format!("layers.{layer}"),
            Some(draft) => format!("mtp.{draft}"),
        }
    }

    /// Whether there is a tensor with this released name. An index may list one that no file has: it is not there.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        self.catalogue.find(name).is_some()
    }

    /// The released names of all tensors, in no particular order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.catalogue.names()
    }

    /// The released names of the tensors that were not read yet, in order. The scales of a weight are read with it.
    #[must_use]
    pub fn unread(&self) -> Vec<&str> {
        let read = self.read();
        let mut names: Vec<&str> =
            self.names().filter(|name| !read.names.contains(*name)).collect();
        names.sort_unstable();
        names
    }

    /// Checks the index: some file has each tensor that it lists and whose released name is `needed`. `.scale` of a
    /// BF16 `wo_a` is never needed: a converter has applied it. Opening does not check this, and reading a tensor checks only that one and its scales.
    ///
    /// # Errors
    /// [`ModelFileError::NotInShard`] for the first in the order of released names.
    pub fn check_listed(&self, needed: impl Fn(&str) -> bool) -> Result<(), ModelFileError> {
        let mut absent = self.catalogue.absent();
        let lost = absent.find(|name| needed(name) && !self.is_applied_scale(name));
        lost.and_then(|name| self.catalogue.not_in_shard(name)).map_or(Ok(()), Err)
    }

    /// The shape of a tensor as stored in its file, where a byte holds two FP4 elements; `None` if there is no such
    /// tensor.
    #[must_use]
    pub fn shape(&self, name: &str) -> Option<Vec<u64>> {
        self.catalogue.find(name).map(|tensor| tensor.shape.clone())
    }

    /// The tensor as f32. In the file it may be BF16, F32, E4M3 with UE8M0 or F32 scales, MXFP4 or NVFP4. The values
    /// are exact, except that products with F32 scales (of E4M3 blocks, or of a whole tensor in NVFP4) are rounded to
    /// f32.
    ///
    /// # Errors
    /// [`ModelFileError::Missing`], or [`ModelFileError::NotInShard`] if the index lists it, also for scales;
    /// [`ModelFileError::Shape`]; [`ModelFileError::Type`], also for BF16 or F32 with scales beside it, other than
    /// `.scale` of a BF16 `wo_a`; [`ModelFileError::BadScale`]; [`ModelFileError::WouldRound`] for a product that
    /// leaves f32's range.
    pub fn f32(&self, name: &str, shape: &[u64]) -> Result<Vec<f32>, ModelFileError> {
        let values = self.weight(name, shape)?.to_f32(name)?;
        self.has_read(name);
        Ok(values)
    }

    /// As [`Self::f32`], but refuses NaN and infinity, for tensors that a model computes with.
    ///
    /// # Errors
    /// As [`Self::f32`]; [`ModelFileError::NotFinite`].
    pub fn finite_f32(&self, name: &str, shape: &[u64]) -> Result<Vec<f32>, ModelFileError> {
        let values = self.f32(name, shape)?;
        check_finite(name, values.iter().copied())?;
        Ok(values)
    }

    /// As [`Self::bf16`], but refuses NaN and infinity, for tensors that a model computes with.
    ///
    /// # Errors
    /// As [`Self::bf16`]; [`ModelFileError::NotFinite`].
    pub fn finite_bf16(&self, name: &str, shape: &[u64]) -> Result<Vec<bf16>, ModelFileError> {
        let values = self.bf16(name, shape)?;
        check_finite(name, values.iter().map(|value| value.to_f32()))?;
        Ok(values)
    }

    /// As [`Self::f32`], but as BF16, which can represent every product of an E4M3 value and a power of two in its
    /// range.
    ///
    /// # Errors
    /// As [`Self::f32`]; [`ModelFileError::WouldRound`] for a value that BF16 cannot represent.
    pub fn bf16(&self, name: &str, shape: &[u64]) -> Result<Vec<bf16>, ModelFileError> {
        let values = self.weight(name, shape)?.to_bf16(name)?;
        self.has_read(name);
        Ok(values)
    }

    /// The parts of a matrix that is stored as NVFP4, unchanged; `None` for a matrix of another type.
    ///
    /// # Errors
    /// As [`Self::f32`], except that no product is computed, and so none is out of range.
    pub fn nvfp4(&self, name: &str, shape: [u64; 2]) -> Result<Option<Nvfp4Parts>, ModelFileError> {
        if !self.has(&scale_name(name, "weight_scale"))? {
            return Ok(None);
        }
        let Weight::Scaled(Scaled { codes: Codes::E2m1(codes), .. }) = self.weight(name, &shape)?
        else {
            return Ok(None);
        };
        let (scales, scale) = self.nvfp4_scales(name, shape[0], shape[1])?;
        let parts = Nvfp4Parts { codes: codes.to_vec(), scales: scales.to_vec(), scale };
        self.has_read(name);
        Ok(Some(parts))
    }

    /// A tensor of integers: I64 or I32 in the file.
    ///
    /// # Errors
    /// [`ModelFileError::Missing`]; [`ModelFileError::NotInShard`]; [`ModelFileError::Shape`];
    /// [`ModelFileError::Type`].
    pub fn i64(&self, name: &str, shape: &[u64]) -> Result<Vec<i64>, ModelFileError> {
        let tensor = self.find(name)?;
        check_shape(name, &tensor.shape, shape)?;
        let bytes = self.catalogue.bytes_of(tensor);
        let values = match tensor.dtype {
            Dtype::I64 => elements(bytes, i64::from_le_bytes),
            Dtype::I32 => elements(bytes, |element| i32::from_le_bytes(element).into()),
            found => return Err(wrong_type(name, found, "I64 or I32")),
        };
        self.has_read(name);
        Ok(values)
    }

    fn find(&self, name: &str) -> Result<&Tensor, ModelFileError> {
        let missing = || ModelFileError::Missing { name: name.to_owned() };
        let absent = || self.catalogue.not_in_shard(name).unwrap_or_else(missing);
        self.catalogue.find(name).ok_or_else(absent)
    }

    /// As [`Self::contains`], but refuses a name that the index lists and no file has: what to read would be a guess.
    fn has(&self, name: &str) -> Result<bool, ModelFileError> {
        self.catalogue.not_in_shard(name).map_or(Ok(self.contains(name)), Err)
    }

    /// The bytes of a weight, and of its scales.
    fn weight(&self, name: &str, shape: &[u64]) -> Result<Weight<'_>, ModelFileError> {
        let tensor = self.find(name)?;
        let bytes = self.catalogue.bytes_of(tensor);
        match tensor.dtype {
            Dtype::BF16 | Dtype::F32 => {
                check_shape(name, &tensor.shape, shape)?;
                self.check_without_scales(name, tensor.dtype)?;
            }
            Dtype::F8_E4M3 => check_shape(name, &tensor.shape, shape)?,
            // A row ends at a byte boundary.
            Dtype::F4 => {
                check_shape(name, &tensor.shape, shape)?;
                if shape.last().is_none_or(|columns| !columns.is_multiple_of(2)) {
                    return Err(wrong_shape(name, tensor, shape));
                }
            }
            // Two codes per byte: half as many columns.
            Dtype::I8 | Dtype::U8 => {
                let &[rows, columns] = shape else { return Err(wrong_shape(name, tensor, shape)) };
                if tensor.shape != [rows, columns / 2] || !columns.is_multiple_of(2) {
                    return Err(wrong_shape(name, tensor, shape));
                }
            }
            found => {
                let expected = "BF16, F32, F8_E4M3, or FP4 in I8, U8 or F4";
                return Err(wrong_type(name, found, expected));
            }
        }
        match tensor.dtype {
            Dtype::BF16 => Ok(Weight::Bf16(bytes)),
            Dtype::F32 => Ok(Weight::F32(bytes)),
            Dtype::F8_E4M3 => {
                let scaled = self.block_scaled(name, shape, Codes::E4m3(bytes))?;
                Ok(Weight::Scaled(scaled))
            }
            _ => Ok(Weight::Scaled(self.fp4(name, shape, Codes::E2m1(bytes))?)),
        }
    }

    /// Refuses scales beside a weight whose type has none: the file has two forms of the weight, or half of each.
    fn check_without_scales(&self, name: &str, found: Dtype) -> Result<(), ModelFileError> {
        for scale in SCALES.map(|end| scale_name(name, end)) {
            if self.is_applied_scale(&scale) {
                self.note(&scale);
            } else if self.has(&scale)? {
                return Err(wrong_type(name, found, "F8_E4M3 or FP4, since it has scales"));
            }
        }
        Ok(())
    }

    /// Whether these are scales that a BF16 `wo_a` no longer needs. SGLang's FP8 checkpoints (`DeepSeek-V4-Flash-FP8`)
    /// have `wo_a` in BF16, multiplied by its scales, and their index still lists the scales; shards may hold them too.
    /// SGLang ignores them. No other weight is known to have such scales.
    fn is_applied_scale(&self, scale: &str) -> bool {
        let Some(layer) = scale.strip_suffix(".attn.wo_a.scale") else { return false };
        let weight = self.catalogue.find(&format!("{layer}.attn.wo_a.weight"));
        weight.is_some_and(|weight| weight.dtype == Dtype::BF16)
    }

    /// An E4M3 weight with a scale for each block of 128 x 128: UE8M0, or F32 in Base models.
    fn block_scaled<'a>(
        &self,
        name: &str,
        shape: &[u64],
        codes: Codes<'a>,
    ) -> Result<Scaled<'a>, ModelFileError> {
        let scale = scale_name(name, "scale");
        let (rows, columns) = self.matrix(name, shape)?;
        let blocks = [rows.div_ceil(E4M3_BLOCK), columns.div_ceil(E4M3_BLOCK)];
        let types = [Dtype::F8_E8M0, Dtype::F32];
        let (found, bytes) = self.scales(&scale, &blocks, &types, "F8_E8M0 or F32")?;
        let rounds = found == Dtype::F32;
        let decode = if rounds { dequantise::f32_scales } else { dequantise::ue8m0_scales };
        Ok(Scaled {
            codes,
            columns: columns as usize,
            group_rows: E4M3_BLOCK as usize,
            group_columns: E4M3_BLOCK as usize,
            scales: decode(&scale, bytes)?,
            rounds,
        })
    }

    /// An MXFP4 weight, or an NVFP4 weight if there is a tensor `.weight_scale`.
    fn fp4<'a>(
        &self,
        name: &str,
        shape: &[u64],
        codes: Codes<'a>,
    ) -> Result<Scaled<'a>, ModelFileError> {
        let (rows, columns) = self.matrix(name, shape)?;
        let nvfp4 = scale_name(name, "weight_scale");
        let of = |group: u64, scales, rounds| Scaled {
            codes,
            columns: columns as usize,
            group_rows: 1,
            group_columns: group as usize,
            scales,
            rounds,
        };
        if !self.has(&nvfp4)? {
            let scale = scale_name(name, "scale");
            let groups = [rows, columns.div_ceil(MXFP4_GROUP)];
            // Not F32: some tools store codes of INT4 so, two per byte, with F32 scales of the same shape.
            let (_, bytes) = self.scales(&scale, &groups, &[Dtype::F8_E8M0], "F8_E8M0")?;
            return Ok(of(MXFP4_GROUP, dequantise::ue8m0_scales(&scale, bytes)?, false));
        }
        let (bytes, factor) = self.nvfp4_scales(name, rows, columns)?;
        let mut scales = dequantise::e4m3_scales(&nvfp4, bytes)?;
        scales.iter_mut().for_each(|scale| *scale *= f64::from(factor));
        Ok(of(NVFP4_GROUP, scales, true))
    }

    /// The E4M3 scales of an NVFP4 weight, and the factor of the whole weight.
    fn nvfp4_scales(
        &self,
        name: &str,
        rows: u64,
        columns: u64,
    ) -> Result<(&[u8], f32), ModelFileError> {
        let groups = [rows, columns.div_ceil(NVFP4_GROUP)];
        let scale = scale_name(name, "weight_scale");
        let (_, bytes) = self.scales(&scale, &groups, &[Dtype::F8_E4M3], "F8_E4M3")?;
        // ModelOpt stores a factor, compressed-tensors a divisor.
        let [factor, divisor] =
            ["weight_scale_2", "weight_global_scale"].map(|end| scale_name(name, end));
        let is_divisor = !self.has(&factor)? && self.has(&divisor)?;
        let whole = if is_divisor { divisor } else { factor };
        let one: &[u64] = if self.find(&whole)?.shape.is_empty() { &[] } else { &[1] };
        let (_, found) = self.scales(&whole, one, &[Dtype::F32], "F32")?;
        let found = elements(found, f32::from_le_bytes)[0];
        let factor = if is_divisor { 1.0 / found } else { found };
        if !found.is_finite() || !factor.is_finite() {
            return Err(ModelFileError::BadScale { name: whole, index: 0 });
        }
        Ok((bytes, factor))
    }

    /// The rows and columns of a scaled weight, which must be a matrix.
    fn matrix(&self, name: &str, shape: &[u64]) -> Result<(u64, u64), ModelFileError> {
        match *shape {
            [rows, columns] => Ok((rows, columns)),
            _ => Err(wrong_shape(name, self.find(name)?, shape)),
        }
    }

    /// The type and the bytes of scales, which must have one of `types`.
    fn scales(
        &self,
        name: &str,
        shape: &[u64],
        types: &[Dtype],
        expected: &'static str,
    ) -> Result<(Dtype, &[u8]), ModelFileError> {
        let tensor = self.find(name)?;
        check_shape(name, &tensor.shape, shape)?;
        if !types.contains(&tensor.dtype) {
            return Err(wrong_type(name, tensor.dtype, expected));
        }
        self.note(name);
        Ok((tensor.dtype, self.catalogue.bytes_of(tensor)))
    }

    fn read(&self) -> MutexGuard<'_, Read> {
        self.read.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a tensor was read.
    fn note(&self, name: &str) {
        let Some(tensor) = self.catalogue.find(name) else { return };
        let bytes = self.catalogue.bytes_of(tensor).len() as u64;
        let mut read = self.read();
        if read.names.insert(name.to_owned()) {
            read.bytes += bytes;
        }
    }

    /// Notes that a tensor was read, as its scales were before, and reports the progress.
    fn has_read(&self, name: &str) {
        self.note(name);
        let done = self.read().bytes;
        (self.progress)(done, self.catalogue.bytes());
    }
}

/// The configuration of a model, with the end tokens of both files that may say some.
fn read_config(directory: &Path) -> Result<Config, ModelFileError> {
    let refused = |path: &Path, source| ModelFileError::Config { path: path.into(), source };
    let path = directory.join("config.json");
    let json = files::read_config(&path)?;
    let more = match files::generation_config(directory) {
        None => None,
        Some(path) => config::generation_end_tokens(&files::read_config(&path)?)
            .map_err(|source| refused(&path, source))?,
    };
    Config::with_end_tokens(&json, more).map_err(|source| refused(&path, source))
}

/// The name of a weight's scales: `.weight` is replaced by `end`.
fn scale_name(weight: &str, end: &str) -> String {
    format!("{}.{end}", weight.strip_suffix(".weight").unwrap_or(weight))
}

fn check_shape(name: &str, found: &[u64], expected: &[u64]) -> Result<(), ModelFileError> {
    if found == expected {
        return Ok(());
    }
    let (found, expected) = (found.to_vec(), expected.to_vec());
    Err(ModelFileError::Shape { name: name.to_owned(), found, expected })
}

fn wrong_shape(name: &str, tensor: &Tensor, expected: &[u64]) -> ModelFileError {
    let (found, expected) = (tensor.shape.clone(), expected.to_vec());
    ModelFileError::Shape { name: name.to_owned(), found, expected }
}

fn wrong_type(name: &str, found: Dtype, expected: &'static str) -> ModelFileError {
    ModelFileError::Type { name: name.to_owned(), found, expected }
}

/// Refuses NaN and infinity: either would make every step fail that has a token which uses it, with all requests in the
/// step.
fn check_finite(
    name: &str,
    mut values: impl Iterator<Item = f32> + Clone,
) -> Result<(), ModelFileError> {
    match values.clone().position(|value| !value.is_finite()) {
        None => Ok(()),
        Some(index) => {
            let value = values.nth(index).unwrap_or(f32::NAN);
            Err(ModelFileError::NotFinite { name: name.into(), index, value })
        }
    }
}
