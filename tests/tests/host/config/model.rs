//! `ModelConfig`: the layer counts of the presets, and `config.json` with each possible mistake.

use dsv4_kv::{CacheConfig, KvError};
use kv_layout::config::{ConfigError, ModelConfig};
use kv_layout::geometry::LayerKind::{self, Csa, Hca, Swa};
use serde_json::{Value, json};

use super::{file, with};

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

/// Flash's configuration with one field replaced, or removed (`Value::Null`).
fn read_with(field: &str, value: Value) -> Result<ModelConfig, ConfigError> {
    ModelConfig::from_json(&with(&file("flash"), field, value).to_string())
}

/// The configuration that transformers wrote, with one field replaced or removed.
fn written_with(field: &str, value: Value) -> Result<ModelConfig, ConfigError> {
    ModelConfig::from_json(&with(&file("transformers"), field, value).to_string())
}

#[test]
fn flash_and_pro_are_read_as_their_presets() {
    for name in ["flash", "pro"] {
        let read = ModelConfig::from_json(&file(name).to_string()).unwrap();
        assert_eq!(read, ModelConfig { name: "deepseek_v4".into(), ..preset(name) });
    }
}

/// A file that does not say its architecture may be of another one.
#[test]
fn a_model_says_its_type() {
    let error = read_with("model_type", Value::Null).unwrap_err();
    assert!(matches!(&error, ConfigError::Missing { field } if field == "model_type"), "{error}");
    let error = read_with("model_type", json!("deepseek_v3")).unwrap_err();
    assert!(
        matches!(&error, ConfigError::Unsupported { field, .. } if field == "model_type"),
        "{error}"
    );
}

/// Flash of 2026-07-31 is Flash with a block drafter of three stages instead of one MTP layer.
#[test]
fn flash_0731_has_43_layers_and_3_draft_layers() {
    let read = ModelConfig::from_json(&file("flash-0731").to_string()).unwrap();
    let mut layers = preset("flash").layers;
    layers.extend([Swa, Swa]);
    let name = "deepseek_v4".into();
    assert_eq!(read, ModelConfig { name, layers, mtp_layers: 3, ..preset("flash") });
}

#[test]
fn what_transformers_writes_is_read() {
    let read = ModelConfig::from_json(&file("transformers").to_string()).unwrap();
    let name = "deepseek_v4".into();
    let (layers, mtp_layers) = (vec![Swa, Csa, Hca, Csa], 0);
    let same = preset("flash");
    assert_eq!(
        read,
        ModelConfig { name, layers, mtp_layers, hidden_size: 64, q_lora_rank: 32, ..same }
    );
}

#[test]
fn a_nested_text_config_is_read_as_if_it_were_not_nested() {
    for name in ["flash", "flash-0731", "pro", "transformers"] {
        let flat = file(name);
        let nested = json!({ "text_config": flat, "architectures": ["Other"], "hidden_size": flat["hidden_size"] });
        let read = |json: &Value| ModelConfig::from_json(&json.to_string());
        assert_eq!(read(&nested).unwrap(), read(&flat).unwrap());
        let error = read(&with(&nested, "hidden_size", json!(4128))).unwrap_err();
        assert!(
            matches!(&error, ConfigError::Disagree { first, .. } if first == "text_config.hidden_size"),
            "{error}"
        );
    }
    read_with("text_config", json!({})).unwrap();
    for wrong in [json!([]), json!("text"), json!(false)] {
        let error = read_with("text_config", wrong).unwrap_err();
        assert!(
            matches!(&error, ConfigError::Type { field, .. } if field == "text_config"),
            "{error}"
        );
    }
}

#[test]
fn text_that_is_not_a_configuration() {
    assert!(matches!(ModelConfig::from_json("{"), Err(ConfigError::Json(_))));
    assert!(matches!(ModelConfig::from_json("[]"), Err(ConfigError::Json(_))));
    let error = read_with("head_dim", json!("512")).unwrap_err();
    assert_eq!(
        error.to_string(),
        "head_dim is \"512\"; it must be an integer from 0 to 4294967295"
    );
    let error = read_with("sliding_window", Value::Null).unwrap_err();
    assert!(
        matches!(&error, ConfigError::Missing { field } if field == "sliding_window"),
        "{error}"
    );
}

#[test]
fn a_schedule_is_never_guessed() {
    let error = read_with("compress_ratios", Value::Null).unwrap_err();
    assert!(matches!(error, ConfigError::NoSchedule), "{error}");
    let error = written_with("layer_types", Value::Null).unwrap_err();
    assert!(matches!(error, ConfigError::NoSchedule), "{error}");
}

#[test]
fn two_schedules_must_agree() {
    written_with("compress_ratios", json!([0, 4, 128, 4])).expect("the same as `layer_types`");
    let error = written_with("compress_ratios", json!([0, 4, 4, 4])).unwrap_err();
    assert!(matches!(error, ConfigError::Disagree { .. }), "{error}");
}

#[test]
fn a_kind_of_layer_that_is_none() {
    for value in [1, 2, -4, 64] {
        let mut ratios = file("flash")["compress_ratios"].clone();
        ratios[7] = json!(value);
        match read_with("compress_ratios", ratios) {
            Err(ConfigError::BadRatio { layer: 7, value: found }) => assert_eq!(found, value),
            other => panic!("{value}: {other:?}"),
        }
    }
    let mut types = file("transformers")["layer_types"].clone();
    types[2] = json!("full_attention");
    let error = written_with("layer_types", types).unwrap_err();
    assert!(
        matches!(&error, ConfigError::BadLayerType { field: "layer_types", layer: 2, .. }),
        "{error}"
    );
    for (field, value) in
        [("compressed_sparse_attention", json!(8)), ("heavily_compressed_attention", json!(64))]
    {
        let mut rates = file("transformers")["compress_rates"].clone();
        rates[field] = value;
        let error = written_with("compress_rates", rates).unwrap_err();
        let named = matches!(&error, ConfigError::BadDimension { field: found, .. }
            if *found == format!("compress_rates.{field}"));
        assert!(named, "{error}");
    }
}

#[test]
fn a_schedule_of_the_wrong_length() {
    let mut ratios = file("flash")["compress_ratios"].as_array().unwrap().clone();
    ratios.pop();
    let error = read_with("compress_ratios", ratios.into()).unwrap_err();
    let field = "compress_ratios";
    assert!(
        matches!(error, ConfigError::BadLength { field: f, found: 43, layers: 43, mtp_layers: 1 } if f == field),
        "{error}"
    );
    assert!(error.to_string().contains("need 44"), "{error}");
    // Without MTP layers the same schedule is one entry too long.
    let error = read_with("num_nextn_predict_layers", Value::Null).unwrap_err();
    assert!(
        matches!(error, ConfigError::BadLength { found: 44, layers: 43, mtp_layers: 0, .. }),
        "{error}"
    );
    // Only a drafter may have more ratios than `num_nextn_predict_layers` allows.
    let drafter = file("flash-0731");
    for (field, value) in
        [("dspark_block_size", Value::Null), ("num_nextn_predict_layers", json!(2))]
    {
        let changed = with(&drafter, field, value).to_string();
        let error = ModelConfig::from_json(&changed).unwrap_err();
        assert!(matches!(error, ConfigError::BadLength { found: 46, .. }), "{error}");
    }
    let error = written_with("layer_types", json!(["sliding_attention"])).unwrap_err();
    assert!(
        matches!(error, ConfigError::BadLength { field: "layer_types", found: 1, layers: 4, .. }),
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
        ("num_key_value_heads", 8, 1),
    ] {
        match read_with(name, json!(wrong)) {
            Err(ConfigError::BadDimension { field, value, expected }) => {
                assert_eq!((&*field, value, expected), (name, wrong, right));
            }
            other => panic!("{name}: {other:?}"),
        }
    }
}

/// Constants that the stored configuration of a cache could have, although no file of a model can.
#[test]
fn a_cache_refuses_rotary_constants_out_of_range() {
    type Change = fn(&mut ModelConfig);
    let tiny = ModelConfig::preset("tiny").unwrap();
    let changes: [(&str, Change); 8] = [
        ("rope_theta", |model| model.rope_theta = 0.0),
        ("rope_theta", |model| model.rope_theta = -2.0),
        ("rope_theta", |model| model.rope_theta = f64::NAN),
        ("compress_rope.theta", |model| model.compress_rope.theta = 1.0),
        ("compress_rope.factor", |model| model.compress_rope.factor = 0.0),
        ("compress_rope.beta_fast", |model| model.compress_rope.beta_fast = f64::INFINITY),
        ("compress_rope.beta_slow", |model| model.compress_rope.beta_slow = 0.0),
        ("compress_rope.trained_context", |model| model.compress_rope.trained_context = 0.5),
    ];
    for (name, change) in changes {
        let mut model = tiny.clone();
        CacheConfig::new(model.clone()).validate().unwrap();
        change(&mut model);
        let error = CacheConfig::new(model).validate().unwrap_err();
        let KvError::Model(error) = error else { panic!("{error}") };
        assert!(
            matches!(&*error, ConfigError::OutOfRange { field, .. } if field == name),
            "{error}"
        );
    }
}

/// Too many draft layers are refused as such, however many ratios there are.
#[test]
fn more_draft_layers_than_there_can_be() {
    for found in [43 + 64, 43 + 65] {
        let mut config = file("flash");
        config["num_nextn_predict_layers"] = json!(65);
        config["compress_ratios"] = vec![0; found].into();
        let error = ModelConfig::from_json(&config.to_string()).unwrap_err();
        let named = matches!(&error, ConfigError::OutOfRange { field, value: 65.0, most: 64.0, .. }
            if field == "num_nextn_predict_layers");
        assert!(named, "{error}");
    }
}

#[test]
fn counts_out_of_range() {
    for (name, wrong) in [
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 4_000_000_000_u32),
        ("hidden_size", 0),
        ("q_lora_rank", 0),
        ("index_n_heads", 0),
        ("index_n_heads", 96),
        ("index_topk", 0),
        ("index_topk", 2049),
        ("max_position_embeddings", 0),
        ("max_position_embeddings", (1 << 30) + 1),
    ] {
        match read_with(name, json!(wrong)) {
            Err(ConfigError::OutOfRange { field, value, least, most }) => {
                assert_eq!((&*field, value), (name, f64::from(wrong)));
                assert!(!(least..=most).contains(&value));
            }
            other => panic!("{name} = {wrong}: {other:?}"),
        }
    }
    let error = read_with("index_n_heads", json!(48)).unwrap_err();
    assert!(matches!(error, ConfigError::NotMultiple { value: 48, multiple: 32, .. }), "{error}");
    assert_eq!(read_with("index_n_heads", json!(32)).unwrap().index_heads, 32);
}

#[test]
fn layer_kinds_keep_their_names_in_files() {
    let names = [Swa, Csa, Hca].map(|kind: LayerKind| serde_json::to_string(&kind).unwrap());
    assert_eq!(names, ["\"swa\"", "\"csa\"", "\"hca\""]);
}

/// The epsilon is compiled into the kernels; rotary constants are taken from the file.
#[test]
fn other_constants() {
    let error = read_with("rms_norm_eps", json!(1e-5)).unwrap_err();
    assert!(
        matches!(&error, ConfigError::BadConstant { field, value: 1e-5, .. } if field == "rms_norm_eps"),
        "{error}"
    );
    assert_eq!(read_with("compress_rope_theta", json!(5e4)).unwrap().compress_rope.theta, 5e4);
    let flash = file("flash")["rope_scaling"].clone();
    let scaled = |field: &str, value| read_with("rope_scaling", with(&flash, field, value));
    let rope = |field| scaled(field, json!(4)).unwrap().compress_rope;
    assert_eq!(rope("factor").factor, 4.0);
    assert_eq!(rope("beta_fast").beta_fast, 4.0);
    assert_eq!(rope("beta_slow").beta_slow, 4.0);
    assert_eq!(rope("original_max_position_embeddings").trained_context, 4.0);
    for (field, value) in [
        ("type", json!("linear")),
        ("attention_factor", json!(1.277)),
        ("mscale", json!(1)),
        ("truncate", json!(false)),
    ] {
        let error = scaled(field, value).unwrap_err().to_string();
        assert!(error.contains(&format!("rope_scaling.{field}")), "{error}");
    }
    for field in ["type", "factor", "beta_fast", "beta_slow", "original_max_position_embeddings"] {
        let error = scaled(field, Value::Null).unwrap_err();
        assert!(matches!(error, ConfigError::Missing { .. }), "{field}: {error}");
    }
    for theta in [json!(1.0), json!(0), json!(-5), json!(1e300)] {
        let error = read_with("compress_rope_theta", theta).unwrap_err();
        assert!(matches!(error, ConfigError::OutOfRange { .. }), "{error}");
    }
}

/// Without `attention_factor` transformers scales the angles of a file with sections, and vLLM does not. Both take 1 for
/// files without sections.
#[test]
fn sections_say_their_attention_factor() {
    let mut file = file("transformers");
    let compress = file["rope_parameters"]["compress"].take();
    for absent in [Value::Null, json!(1.277)] {
        file["rope_parameters"]["compress"] = with(&compress, "attention_factor", absent);
        let error = ModelConfig::from_json(&file.to_string()).unwrap_err().to_string();
        assert!(error.contains("rope_parameters.compress.attention_factor"), "{error}");
    }
    file["rope_parameters"] = with(&compress, "attention_factor", Value::Null);
    ModelConfig::from_json(&file.to_string()).unwrap();
}

/// `rope_parameters` without sections is `rope_scaling` by another name. A base in it is not that of compressed layers:
/// transformers ignores it.
#[test]
fn a_flat_section_says_no_base() {
    let whole = read_with("rope_theta", json!(1e4)).unwrap();
    let scaling = file("flash")["rope_scaling"].clone();
    for name in ["rope_scaling", "rope_parameters"] {
        let without = with(&file("flash"), "rope_scaling", Value::Null);
        let of = |theta| with(&without, name, with(&scaling, "rope_theta", theta));
        let read = |config: Value| ModelConfig::from_json(&config.to_string());
        for theta in [Value::Null, json!(1e4), json!(160_000)] {
            assert_eq!(read(of(theta.clone())).unwrap(), whole, "{name}: {theta}");
            for missing in ["rope_theta", "compress_rope_theta"] {
                let error = read(with(&of(theta.clone()), missing, Value::Null)).unwrap_err();
                let named = matches!(&error, ConfigError::Missing { field } if field == missing);
                assert!(named, "{name}: {theta}: {error}");
            }
        }
        let error = read(of(json!(5e4))).unwrap_err();
        let named = matches!(&error, ConfigError::Unsupported { field, found, .. }
            if *field == format!("{name}.rope_theta") && found == "50000");
        assert!(named, "{error}");
        let error = error.to_string();
        for part in ["10000 (`rope_theta`)", "160000 (`compress_rope_theta`)", "no such field"] {
            assert!(error.contains(part), "{error}");
        }
    }
}
