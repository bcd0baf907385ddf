//! Tokens that end a text: those of `config.json`, and those of `generation_config.json`, which a tool may change alone.

use dsv4_kv_model_files::{ConfigError, ModelFileError, ModelFiles};
use serde_json::{Value, json};
use tempfile::TempDir;

use dsv4_kv_tests::model_files::{Made, config, directory, serialized, tensors};

/// A checkpoint with this `config.json`, and with the text of a `generation_config.json`.
fn checkpoint(config: &Value, generation: Option<&str>) -> TempDir {
    let weights = serialized(&tensors([("norm.weight", Made::f32(&[1], &[1.0]))]));
    let mut files = vec![("model.safetensors", &weights[..])];
    files.extend(generation.map(|text| ("generation_config.json", text.as_bytes())));
    directory(config, &files)
}

/// The end tokens of that checkpoint.
fn ends(config: &Value, generation: Option<&str>) -> Result<Vec<u32>, ModelFileError> {
    Ok(ModelFiles::open(checkpoint(config, generation).path())?.config().eos.clone())
}

/// The configuration with other end tokens, or without the field.
fn with(ends: Option<Value>) -> Value {
    let mut changed = config();
    match ends {
        Some(ends) => changed["eos_token_id"] = ends,
        None => drop(changed.as_object_mut().expect("an object").remove("eos_token_id")),
    }
    changed
}

#[test]
fn both_files_say_end_tokens() {
    for (config, generation, expected) in [
        (Some(json!(1)), None, &[1_u32][..]),
        (Some(json!(1)), Some(r#"{"eos_token_id": [1, 7]}"#), &[1, 7]),
        (Some(json!([9, 1])), Some(r#"{"eos_token_id": 7}"#), &[1, 7, 9]),
        (Some(json!(1)), Some(r#"{"temperature": 0.6, "top_p": 0.95}"#), &[1]),
        (Some(json!(1)), Some(r#"{"eos_token_id": null}"#), &[1]),
        (Some(Value::Null), Some(r#"{"eos_token_id": 255}"#), &[255]),
        (None, Some(r#"{"eos_token_id": [7]}"#), &[7]),
        // No token ends a text, and a file says so.
        (Some(Value::Null), None, &[]),
        (Some(json!([])), None, &[]),
        (None, Some(r#"{"eos_token_id": null}"#), &[]),
    ] {
        let found = ends(&with(config.clone()), generation).unwrap();
        assert_eq!(found, expected, "{config:?}, {generation:?}");
    }
    assert!(ends(&json!({ "text_config": config() }), None).unwrap().is_empty());
}

#[test]
fn end_tokens_are_never_guessed() {
    for generation in [None, Some("{}")] {
        match ends(&with(None), generation).unwrap_err() {
            ModelFileError::Config { path, source: error @ ConfigError::NoEndTokens } => {
                assert!(path.ends_with("config.json"));
                let error = error.to_string();
                for part in ["`eos_token_id`", "generation_config.json", "`null`"] {
                    assert!(error.contains(part), "{error}");
                }
            }
            error => panic!("{generation:?}: {error}"),
        }
    }
}

#[test]
fn end_tokens_are_of_the_vocabulary() {
    for (config, generation, token) in [
        (json!(300), None, 300.0),
        (json!([1, 256]), None, 256.0),
        (json!(1), Some(r#"{"eos_token_id": [1, 256]}"#), 256.0),
    ] {
        match ends(&with(Some(config)), generation).unwrap_err() {
            ModelFileError::Config {
                source: ConfigError::OutOfRange { value, most, .. }, ..
            } => {
                assert_eq!((value, most), (token, 255.0));
            }
            error => panic!("{error}"),
        }
    }
}

#[test]
fn a_second_file_is_checked_too() {
    for text in ["{", "[]", r#"{"eos_token_id": "x"}"#, r#"{"eos_token_id": [-1]}"#] {
        match ends(&config(), Some(text)).unwrap_err() {
            ModelFileError::Config { path, .. } => {
                assert!(path.ends_with("generation_config.json"))
            }
            error => panic!("{text}: {error}"),
        }
    }
}

/// Where a text ends changes no result of the model.
#[test]
fn a_second_file_defines_no_result() {
    let both = checkpoint(&config(), Some("{}"));
    let expected = ["config.json", "model.safetensors"].map(|name| both.path().join(name));
    assert_eq!(ModelFiles::files(both.path()).unwrap(), expected);
}
