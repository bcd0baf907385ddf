//! `ModelConfig`: the presets' layer counts, and `config.json` with each thing that can be wrong.

use kv_layout::config::{ConfigError, ModelConfig};
use kv_layout::geometry::LayerKind::{self, Csa, Hca, Swa};
use serde_json::{Value, json};

fn counts(config: &ModelConfig) -> [u32; 3] {
    [Swa, Csa, Hca].map(|kind| config.count(kind))
}

fn preset(name: &str) -> ModelConfig {
    ModelConfig::preset(name).expect(name)
}

#[test]
fn flash_has_44_layers() {
    let flash = preset("flash");
    assert_eq!(flash.layers.len(), 44);
    assert_eq!(counts(&flash), [3, 21, 20]);
    assert_eq!(flash.layers[..5], [Swa, Swa, Csa, Hca, Csa]);
    assert_eq!(flash.layers[40..], [Csa, Hca, Csa, Swa]);
    assert_eq!((flash.mtp_layers, flash.index_topk, flash.index_heads), (1, 512, 64));
    assert_eq!((flash.hidden_size, flash.q_lora_rank), (4096, 1024));
    assert_eq!(flash.max_context, 1_048_576);
}

#[test]
fn pro_has_62_layers_and_no_swa_layer_in_the_trunk() {
    let pro = preset("pro");
    assert_eq!(pro.layers.len(), 62);
    assert_eq!(counts(&pro), [1, 30, 31]);
    assert_eq!(pro.layers[..5], [Hca, Hca, Csa, Hca, Csa]);
    assert_eq!(pro.layers[58..], [Csa, Hca, Csa, Swa]);
    assert_eq!((pro.mtp_layers, pro.index_topk, pro.index_heads), (1, 1024, 64));
    assert_eq!((pro.hidden_size, pro.q_lora_rank), (7168, 1536));
}

#[test]
fn every_preset_exists_and_nothing_else_does() {
    for name in ModelConfig::PRESETS {
        assert_eq!(preset(name).name, name);
    }
    assert!(counts(&preset("tiny")).iter().all(|&count| count > 0));
    assert_eq!(ModelConfig::preset("v3"), None);
}

/// The fields of V4-Flash's `config.json` that matter, and one that does not; written by hand, as are
/// the presets.
fn flash_json() -> Value {
    json!({
        "model_type": "deepseek_v4",
        "num_hidden_layers": 43,
        "num_nextn_predict_layers": 1,
        "compress_ratios": ratios([0, 0], 20),
        "hidden_size": 4096,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "sliding_window": 128,
        "q_lora_rank": 1024,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "max_position_embeddings": 1_048_576,
        "vocab_size": 129_280,
    })
}

/// The same of V4-Pro.
fn pro_json() -> Value {
    let mut config = flash_json();
    for (field, value) in [
        ("num_hidden_layers", json!(61)),
        ("compress_ratios", json!(ratios([128, 128], 29))),
        ("hidden_size", json!(7168)),
        ("q_lora_rank", json!(1536)),
        ("index_topk", json!(1024)),
    ] {
        config[field] = value;
    }
    config
}

/// Two layers, `pairs` of a CSA and an HCA layer, a CSA layer, and the MTP layer.
fn ratios(first: [u32; 2], pairs: usize) -> Vec<u32> {
    let mut ratios = first.to_vec();
    ratios.extend((0..pairs).flat_map(|_| [4, 128]));
    ratios.extend([4, 0]);
    ratios
}

/// Flash's configuration with one field replaced, or taken away (`Value::Null`).
fn read_with(field: &str, value: Value) -> Result<ModelConfig, ConfigError> {
    let mut config = flash_json();
    let fields = config.as_object_mut().unwrap();
    match value {
        Value::Null => drop(fields.remove(field)),
        value => drop(fields.insert(field.to_owned(), value)),
    }
    ModelConfig::from_json(&config.to_string())
}

#[test]
fn flash_and_pro_are_read_as_their_presets() {
    for (json, name) in [(flash_json(), "flash"), (pro_json(), "pro")] {
        let read = ModelConfig::from_json(&json.to_string()).unwrap();
        assert_eq!(read, ModelConfig { name: "deepseek_v4".into(), ..preset(name) });
    }
    let nameless = read_with("model_type", Value::Null).unwrap();
    assert_eq!(nameless.name, "checkpoint");
}

#[test]
fn text_that_is_not_a_configuration() {
    assert!(matches!(ModelConfig::from_json("{"), Err(ConfigError::Json(_))));
    assert!(matches!(read_with("head_dim", json!("512")), Err(ConfigError::Json(_))));
    let error = read_with("sliding_window", Value::Null).unwrap_err();
    assert!(error.to_string().contains("sliding_window"), "{error}");
}

#[test]
fn a_schedule_is_never_guessed() {
    let error = read_with("compress_ratios", Value::Null).unwrap_err();
    assert!(matches!(error, ConfigError::NoCompressRatios), "{error}");
}

#[test]
fn a_ratio_that_no_layer_has() {
    for value in [1, 2, -4, 64] {
        let mut ratios = flash_json()["compress_ratios"].clone();
        ratios[7] = json!(value);
        match read_with("compress_ratios", ratios) {
            Err(ConfigError::BadRatio { layer: 7, value: found }) => assert_eq!(found, value),
            other => panic!("{value}: {other:?}"),
        }
    }
}

#[test]
fn a_schedule_of_the_wrong_length() {
    let mut ratios = flash_json()["compress_ratios"].as_array().unwrap().clone();
    ratios.pop();
    let error = read_with("compress_ratios", ratios.into()).unwrap_err();
    assert!(
        matches!(error, ConfigError::BadLength { found: 43, layers: 43, mtp_layers: 1 }),
        "{error}"
    );
    assert!(error.to_string().contains("need 44"), "{error}");
    // Without MTP layers the same schedule is one entry too long.
    let error = read_with("num_nextn_predict_layers", Value::Null).unwrap_err();
    assert!(
        matches!(error, ConfigError::BadLength { found: 44, layers: 43, mtp_layers: 0 }),
        "{error}"
    );
}

#[test]
fn dimensions_the_kernels_are_not_built_for() {
    for (name, wrong, right) in [
        ("head_dim", 576, 512),
        ("qk_rope_head_dim", 32, 64),
        ("sliding_window", 4096, 128),
        ("index_head_dim", 64, 128),
    ] {
        match read_with(name, json!(wrong)) {
            Err(ConfigError::BadDimension { field, value, expected }) => {
                assert_eq!((field, value, expected), (name, wrong, right));
            }
            other => panic!("{name}: {other:?}"),
        }
    }
}

#[test]
fn counts_out_of_range() {
    for (name, wrong) in [
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 4_000_000_000_u32),
        ("num_nextn_predict_layers", 65),
        ("hidden_size", 0),
        ("q_lora_rank", 0),
        ("index_n_heads", 0),
        ("index_topk", 0),
        ("index_topk", 2049),
        ("max_position_embeddings", 0),
        ("max_position_embeddings", (1 << 30) + 1),
    ] {
        match read_with(name, json!(wrong)) {
            Err(ConfigError::OutOfRange { field, value, least, most }) => {
                assert_eq!((field, value), (name, wrong));
                assert!(!(least..=most).contains(&value));
            }
            other => panic!("{name} = {wrong}: {other:?}"),
        }
    }
}

#[test]
fn layer_kinds_keep_their_names_in_files() {
    let names = [Swa, Csa, Hca].map(|kind: LayerKind| serde_json::to_string(&kind).unwrap());
    assert_eq!(names, ["\"swa\"", "\"csa\"", "\"hca\""]);
}

/// Constants that kernels and rotary frequencies are built for: the released values are taken, and any
/// other is refused by field and value.
#[test]
fn other_constants_are_refused() {
    let released = |config: &mut Value| {
        config["rms_norm_eps"] = json!(1e-6);
        config["compress_rope_theta"] = json!(160_000);
        config["rope_scaling"] = json!({
            "type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65_536,
        });
    };
    let parse = |change: &dyn Fn(&mut Value)| {
        let mut config = flash_json();
        released(&mut config);
        change(&mut config);
        ModelConfig::from_json(&config.to_string())
    };
    parse(&|_| ()).expect("the released constants");
    for (field, value) in [("rms_norm_eps", 1e-5), ("compress_rope_theta", 10_000.0)] {
        let error = parse(&|config| config[field] = json!(value)).unwrap_err();
        assert!(
            matches!(error, ConfigError::BadConstant { field: f, value: v, .. } if (f, v) == (field, value)),
            "{error}"
        );
    }
    for (field, name) in [
        ("factor", "rope_scaling.factor"),
        ("beta_fast", "rope_scaling.beta_fast"),
        ("beta_slow", "rope_scaling.beta_slow"),
        ("original_max_position_embeddings", "rope_scaling.original_max_position_embeddings"),
    ] {
        let error = parse(&|config| config["rope_scaling"][field] = json!(4)).unwrap_err();
        assert!(
            matches!(error, ConfigError::BadConstant { field: f, value: 4.0, .. } if f == name),
            "{error}"
        );
    }
    let error = parse(&|config| config["rope_scaling"]["type"] = json!("linear")).unwrap_err();
    assert!(matches!(error, ConfigError::BadScaling { found } if found == "linear"));
}
