//! Models by name or by file.

use std::path::Path;

use dsv4_kv::kv_layout::config::ModelConfig;

use crate::error::InputError;

/// The model called `name`, or described by the `config.json` of that path.
pub fn resolve(name: &str) -> Result<ModelConfig, InputError> {
    if let Some(model) = ModelConfig::preset(name) {
        return Ok(model);
    }
    let path = Path::new(name);
    if !path.is_file() && path.extension().is_none() {
        return Err(InputError::UnknownModel { name: name.into() });
    }
    let json = std::fs::read_to_string(path)
        .map_err(|source| InputError::ModelFile { path: path.into(), source })?;
    ModelConfig::from_json(&json)
        .map_err(|source| InputError::ModelConfig { path: path.into(), source })
}
