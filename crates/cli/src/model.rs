//! Models by name or by file.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use dsv4_kv::kv_layout::config::ModelConfig;

use crate::error::InputError;

/// Most bytes of a `config.json`.
const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// The model called `name`, or described by the `config.json` of that path.
pub fn resolve(name: &str) -> Result<ModelConfig, InputError> {
    if let Some(model) = ModelConfig::preset(name) {
        return Ok(model);
    }
    let path = Path::new(name);
    if !path.is_file() && path.extension().is_none() {
        return Err(InputError::UnknownModel { name: name.into() });
    }
    let mut json = String::new();
    File::open(path)
        .and_then(|file| file.take(MAX_CONFIG_BYTES + 1).read_to_string(&mut json))
        .map_err(|source| InputError::ModelFile { path: path.into(), source })?;
    if json.len() as u64 > MAX_CONFIG_BYTES {
        return Err(InputError::ModelFileSize { path: path.into(), limit: MAX_CONFIG_BYTES });
    }
    ModelConfig::from_json(&json)
        .map_err(|source| InputError::ModelConfig { path: path.into(), source })
}
