//! `RouterConfig` from a checkpoint's `config.json`.

use dsv4_kv_router::{RouterConfig, RouterError, RouterMode};
use serde_json::{Value, json};

/// The fields of V4-Flash's `config.json` that matter, and one that does not; written by hand, as are
/// the presets.
fn flash() -> Value {
    json!({
        "hidden_size": 4096, "n_routed_experts": 256, "num_experts_per_tok": 6,
        "routed_scaling_factor": 1.5, "vocab_size": 129_280, "num_hidden_layers": 43,
        "num_nextn_predict_layers": 1, "num_hash_layers": 3, "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": true, "topk_method": "noaux_tc",
    })
}

/// The same of V4-Pro.
fn pro() -> Value {
    let mut config = flash();
    for (field, value) in [
        ("hidden_size", json!(7168)),
        ("n_routed_experts", json!(384)),
        ("routed_scaling_factor", json!(2.5)),
        ("num_hidden_layers", json!(61)),
    ] {
        config[field] = value;
    }
    config
}

fn read(value: &Value) -> Result<RouterConfig, RouterError> {
    RouterConfig::from_json(&value.to_string())
}

#[test]
fn flash_and_pro_are_read_as_their_presets() {
    assert_eq!(Some(read(&pro()).unwrap()), RouterConfig::preset("pro"));
    let config = read(&flash()).unwrap();
    assert_eq!(Some(&config), RouterConfig::preset("flash").as_ref());
    for (layer, mode) in [(0, RouterMode::Hash), (2, RouterMode::Hash), (3, RouterMode::Dense)] {
        assert_eq!(config.mode(layer).unwrap(), mode);
    }
    assert_eq!(config.mode(43).unwrap(), RouterMode::Dense, "the MTP layer");
    let error = config.mode(44).unwrap_err();
    assert!(matches!(error, RouterError::NoSuchLayer { layer: 44, layers: 44 }), "{error}");
    RouterConfig::preset("tiny").unwrap().validate().unwrap();
    assert_eq!(RouterConfig::preset("other"), None);
}

#[test]
fn every_field_is_checked() {
    for (field, setting, value) in [
        ("hidden_size", "hidden_size", json!(16)),
        ("n_routed_experts", "experts", json!(544)),
        ("num_experts_per_tok", "selected", json!(0)),
        ("num_experts_per_tok", "selected", json!(9)),
        ("routed_scaling_factor", "scaling", json!(0.0)),
        ("vocab_size", "vocabulary", json!(0)),
        ("num_hash_layers", "hash_layers", json!(45)),
    ] {
        let mut config = flash();
        config[field] = value;
        let error = read(&config).unwrap_err();
        let named = matches!(error, RouterError::Config { setting: found, .. } if found == setting);
        assert!(named, "{field}: {error}");
    }
    let mut config = flash();
    config["n_routed_experts"] = json!(250);
    assert!(matches!(read(&config).unwrap_err(), RouterError::Selection { value: 250, .. }));
    config = flash();
    config["hidden_size"] = json!(4100);
    assert!(matches!(read(&config).unwrap_err(), RouterError::HiddenSize { hidden: 4100, .. }));
}

#[test]
fn another_router_is_refused() {
    for (field, value) in [("scoring_func", json!("sigmoid")), ("norm_topk_prob", json!(false))] {
        let mut config = flash();
        config[field] = value;
        let error = read(&config).unwrap_err();
        let named =
            matches!(error, RouterError::OtherRouter { field: found, .. } if found == field);
        assert!(named, "{error}");
    }
    let mut config = flash();
    config.as_object_mut().unwrap().remove("num_hash_layers");
    assert!(matches!(read(&config).unwrap_err(), RouterError::Json(_)), "never guessed");
}
