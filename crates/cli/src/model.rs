//! Models, by name or by file.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use dsv4_kv::kv_layout::config::{Fields, ModelConfig};

use crate::error::InputError;

/// Most bytes of a `config.json`.
const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// Most query heads that attention in place accepts.
const MAX_HEADS: u32 = 128;

/// The model called `name`, or the one described by a `config.json` at the path `name`.
pub fn resolve(name: &str) -> Result<ModelConfig, InputError> {
    if let Some(model) = ModelConfig::preset(name) {
        return Ok(model);
    }
    let of_file = |source| InputError::ModelConfig { path: name.into(), source };
    ModelConfig::from_json(&read(name)?).map_err(of_file)
}

/// Number of query heads of a model. The cache's configuration does not include it.
pub fn heads(name: &str) -> Result<u32, InputError> {
    match name {
        "flash" => Ok(64),
        "pro" => Ok(128),
        "tiny" => Ok(8),
        _ => {
            let of_file = |source| InputError::ModelConfig { path: name.into(), source };
            let fields = Fields::parse(&read(name)?).map_err(of_file)?;
            fields.count("num_attention_heads", 1, MAX_HEADS).map_err(of_file)
        }
    }
}

/// Reads the `config.json` at this path.
fn read(name: &str) -> Result<String, InputError> {
    let path = Path::new(name);
    // A model's folder is refused as a file that cannot be read, not as an unknown model.
    if !path.is_file() && !path.is_dir() && path.extension().is_none() {
        return Err(InputError::UnknownModel { name: name.into() });
    }
    let mut json = String::new();
    File::open(path)
        .and_then(|file| file.take(MAX_CONFIG_BYTES + 1).read_to_string(&mut json))
        .map_err(|source| InputError::ModelFile { path: path.into(), source })?;
    if json.len() as u64 > MAX_CONFIG_BYTES {
        return Err(InputError::ModelFileSize { path: path.into(), limit: MAX_CONFIG_BYTES });
    }
    Ok(json)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn every_preset_and_file_says_its_heads() {
        for preset in ModelConfig::PRESETS {
            assert!((1..=MAX_HEADS).contains(&heads(preset).unwrap()), "{preset}");
        }
        let of = |json: &str| {
            let mut file = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
            file.write_all(json.as_bytes()).unwrap();
            heads(file.path().to_str().unwrap()).map_err(|error| error.to_string())
        };
        assert_eq!(of(r#"{"num_attention_heads": 32}"#), Ok(32));
        for json in ["{}", r#"{"num_attention_heads": 129}"#] {
            let refusal = of(json).unwrap_err();
            assert!(refusal.contains("num_attention_heads"), "{refusal}");
        }
        let folder = tempfile::tempdir().unwrap();
        let refusal = resolve(folder.path().to_str().unwrap()).unwrap_err().to_string();
        let end = ": Is a directory (os error 21); give a model's config.json";
        assert!(refusal.starts_with("--model /") && refusal.ends_with(end), "{refusal}");
    }
}
