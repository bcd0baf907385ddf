//! `RouterConfig` from a checkpoint's configuration.

use dsv4_kv_model_files::Config;
use dsv4_kv_router::{RouterConfig, RouterError, Routing};
use serde_json::{Value, json};

use super::{file, with};

fn read(value: &Value) -> RouterConfig {
    RouterConfig::from(&Config::from_json(&value.to_string()).unwrap())
}

#[test]
fn flash_and_pro_are_read_as_their_presets() {
    assert_eq!(Some(read(&file("pro"))), RouterConfig::preset("pro"));
    let config = read(&file("flash"));
    assert_eq!(Some(&config), RouterConfig::preset("flash").as_ref());
    for (layer, mode) in [(0, Routing::Hash), (2, Routing::Hash), (3, Routing::Learned)] {
        assert_eq!(config.mode(layer).unwrap(), mode);
    }
    assert_eq!(config.mode(43).unwrap(), Routing::Learned, "the MTP layer");
    let error = config.mode(44).unwrap_err();
    assert!(matches!(error, RouterError::NoSuchLayer { layer: 44, layers: 44 }), "{error}");
    RouterConfig::preset("tiny").unwrap().validate().unwrap();
    assert_eq!(RouterConfig::preset("other"), None);
}

/// A `config.json` that no kernel supports is refused when it is read, not at a launch.
#[test]
fn every_configuration_that_is_read_is_valid() {
    for name in ["flash", "flash-0731", "pro", "transformers"] {
        read(&file(name)).validate().expect(name);
    }
    for (field, value) in [
        ("hidden_size", json!(16)),
        ("hidden_size", json!(4100)),
        ("n_routed_experts", json!(544)),
        ("n_routed_experts", json!(250)),
        ("num_experts_per_tok", json!(0)),
        ("num_experts_per_tok", json!(9)),
        ("routed_scaling_factor", json!(0.0)),
        ("vocab_size", json!(0)),
        ("num_hash_layers", json!(45)),
        ("scoring_func", json!("sigmoid")),
        ("norm_topk_prob", json!(false)),
        ("use_index_cache", json!(true)),
        ("index_topk_freq", json!(2)),
        ("index_topk_pattern", json!("FSFS")),
    ] {
        let changed = with(&file("flash"), field, value).to_string();
        let error = Config::from_json(&changed).unwrap_err().to_string();
        assert!(error.contains(field), "{error}");
    }
}

#[test]
fn every_field_is_checked() {
    let tiny = || RouterConfig::preset("tiny").unwrap();
    for (setting, config) in [
        ("hidden_size", RouterConfig { hidden_size: 16, ..tiny() }),
        ("experts", RouterConfig { experts: 544, ..tiny() }),
        ("selected", RouterConfig { selected: 0, ..tiny() }),
        ("selected", RouterConfig { selected: 9, ..tiny() }),
        ("scaling", RouterConfig { scaling: 0.0, ..tiny() }),
        ("vocabulary", RouterConfig { vocabulary: 0, ..tiny() }),
        ("layers", RouterConfig { routing: Vec::new(), ..tiny() }),
    ] {
        let error = config.validate().unwrap_err();
        let named = matches!(error, RouterError::Config { setting: found, .. } if found == setting);
        assert!(named, "{setting}: {error}");
    }
    let error = RouterConfig { experts: 250, ..tiny() }.validate().unwrap_err();
    assert!(matches!(error, RouterError::Selection { value: 250, .. }), "{error}");
    let error = RouterConfig { hidden_size: 4100, ..tiny() }.validate().unwrap_err();
    assert!(matches!(error, RouterError::HiddenSize { hidden: 4100, .. }), "{error}");
}
