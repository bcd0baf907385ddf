//! Each field of whole `config.json` files is changed alone. Then the configuration differs, or the field is refused by
//! name, or it is in the list of fields that may be ignored, with the reason.

use dsv4_kv_model_files::{Config, Routing};
use kv_layout::config::CompressRope;
use serde_json::{Value, json};

use super::{file, with};

/// Fields that have no effect here, and why.
const IGNORED: [(&str, &str); 19] = [
    ("architectures", "names a class of transformers; `model_type` says the same and is checked"),
    ("attention_dropout", "training"),
    ("initializer_range", "training"),
    ("output_router_logits", "training: what a forward pass also returns"),
    ("router_aux_loss_coef", "training"),
    ("router_jitter_noise", "training"),
    ("dtype", "weights say their types themselves"),
    ("torch_dtype", "weights say their types themselves"),
    (
        "expert_dtype",
        "weights say their types themselves; another than FP4, FP8 or BF16 is refused",
    ),
    ("quantization_config.activation_scheme", "activations are not quantised"),
    ("quantization_config.quant_method", "names a library; one that is not known is refused"),
    ("transformers_version", "who wrote the file"),
    ("use_cache", "whether transformers keeps a cache"),
    ("pad_token_id", "batches are not padded"),
    (
        "dspark_block_size",
        "how the drafter is used, which is the server's business; that it is there counts",
    ),
    ("dspark_markov_rank", "a head of the drafter, which is not run"),
    ("dspark_noise_token_id", "a token of the drafter, which is not run"),
    ("dspark_target_layer_ids", "inputs of the drafter, which is not run"),
    ("num_nextn_predict_layers", "in transformers' files: it drops draft layers and writes none"),
];

fn read(json: &Value) -> Result<Config, String> {
    Config::from_json(&json.to_string()).map_err(|error| error.to_string())
}

/// Other values of the same type that are as close to valid as possible.
fn others(field: &str, value: &Value) -> Vec<Value> {
    match value {
        Value::Bool(flag) => vec![json!(!flag)],
        Value::Null => vec![json!(1), json!("x")],
        Value::String(text) if text == "fp4" => vec![json!("bf16"), json!("int4")],
        Value::String(text) if text == "fp8" => vec![json!("modelopt"), json!("awq")],
        Value::String(_) => vec![json!("other")],
        Value::Number(number) if number.is_f64() => vec![json!(number.as_f64().unwrap() * 2.0)],
        Value::Number(number) => {
            let number = number.as_u64().unwrap();
            let others = [number + 1, number * 2, number / 2];
            others.into_iter().filter(|&other| other != number).map(Value::from).collect()
        }
        Value::Array(list) => {
            let mut changed = list.clone();
            let first = &mut changed[0];
            *first = match (field, &*first) {
                ("layer_types", _) => json!("heavily_compressed_attention"),
                ("mlp_layer_types", _) => json!("moe"),
                (_, Value::Number(found)) if found.as_u64() == Some(4) => json!(128),
                (_, Value::Number(found)) if found.as_u64() == Some(128) => json!(4),
                (_, Value::Number(_)) => json!(4),
                _ => json!("Other"),
            };
            vec![changed.into(), list[1..].to_vec().into()]
        }
        Value::Object(_) => unreachable!("its fields are changed"),
    }
}

/// Calls `check` with the path of each field, and the file with another value of this field.
fn each_change(
    json: &Value,
    path: &str,
    rebuild: &dyn Fn(Value) -> Value,
    check: &mut dyn FnMut(&str, &str, Value),
) {
    for (name, value) in json.as_object().unwrap() {
        let here = format!("{path}{name}");
        let replace = |value: Value| {
            rebuild({
                let mut changed = json.clone();
                changed[name] = value;
                changed
            })
        };
        if value.is_object() {
            each_change(value, &format!("{here}."), &replace, check);
        } else {
            others(name, value).into_iter().for_each(|other| check(&here, name, replace(other)));
        }
    }
}

#[test]
fn each_field_changed_alone_changes_the_configuration_or_is_refused_by_name() {
    for name in ["flash", "flash-0731", "pro", "transformers"] {
        let whole = file(name);
        let before = read(&whole).expect(name);
        let mut changes = 0;
        each_change(&whole, "", &|changed| changed, &mut |path, field, changed| {
            changes += 1;
            let ignored = IGNORED.iter().any(|(ignored, _)| *ignored == path);
            match read(&changed) {
                Ok(after) if after == before => {
                    assert!(ignored, "{name}: {path} makes no difference");
                    let written = name == "transformers";
                    assert!(path != "num_nextn_predict_layers" || written, "{name}: {path}");
                }
                Ok(_) => assert!(!ignored, "{name}: {path} does make a difference"),
                // A schedule of another length is reported under the name of the list.
                Err(error) => {
                    let named = error.contains(field)
                        || field.starts_with("num_") && error.contains("entries");
                    assert!(named, "{name}: {path}: {error}");
                }
            }
        });
        assert!(changes > 60, "{name}: {changes}");
    }
}

#[test]
fn each_field_that_is_used_must_be_there() {
    for name in ["flash", "pro", "transformers"] {
        let whole = file(name);
        let before = read(&whole).expect(name);
        for field in whole.as_object().unwrap().keys() {
            if let Ok(after) = read(&with(&whole, field, Value::Null)) {
                let said_twice = ["rope_theta", "compress_rope_theta", "qk_rope_head_dim"];
                let absent = ["bos_token_id", "quantization_config"];
                assert!(
                    after == before || absent.contains(&&**field) || said_twice.contains(&&**field),
                    "{name}: {field} was guessed"
                );
            }
        }
    }
}

#[test]
fn flash_and_flash_0731_are_read_whole() {
    let flash = read(&file("flash")).unwrap();
    assert_eq!((flash.vocab_size, flash.hidden_size, flash.heads), (129_280, 4096, 64));
    assert_eq!((flash.q_lora_rank, flash.o_groups, flash.o_lora_rank), (1024, 8, 1024));
    assert_eq!((flash.norm_eps, flash.rope_theta), (1e-6, 1e4));
    assert_eq!(flash.compress_rope, CompressRope::RELEASED);
    let hyper = flash.hyper;
    assert_eq!((hyper.streams, hyper.sinkhorn_iterations, hyper.eps), (4, 20, 1e-6));
    let experts = &flash.experts;
    assert_eq!((experts.routed, experts.per_token, experts.shared), (256, 6, 1));
    assert_eq!((experts.intermediate_size, experts.scaling), (2048, 1.5));
    assert_eq!((experts.swiglu_limit, experts.routing.len()), (10.0, 44));
    assert_eq!(experts.routing[2..4], [Routing::Hash, Routing::Learned]);
    assert_eq!(experts.routing[43], Routing::Learned, "the MTP layer");
    assert_eq!((flash.bos, &flash.eos[..]), (Some(0), &[1][..]));
    let newer = read(&file("flash-0731")).unwrap();
    assert_eq!(newer.experts.routing.len(), 46);
    let experts = dsv4_kv_model_files::Experts {
        routing: newer.experts.routing.clone(),
        ..flash.experts.clone()
    };
    assert_eq!(newer, Config { cache: newer.cache.clone(), experts, ..flash });
}

#[test]
fn pro_and_what_transformers_writes_are_read_whole() {
    let pro = read(&file("pro")).unwrap();
    assert_eq!((pro.hidden_size, pro.heads, pro.q_lora_rank, pro.o_groups), (7168, 128, 1536, 16));
    assert_eq!((pro.experts.routed, pro.experts.intermediate_size), (384, 3072));
    assert_eq!((pro.experts.scaling, pro.experts.routing.len()), (2.5, 62));
    let tiny = read(&file("transformers")).unwrap();
    assert_eq!((tiny.vocab_size, tiny.hidden_size, tiny.heads, tiny.o_groups), (256, 64, 4, 2));
    assert_eq!((tiny.rope_theta, tiny.compress_rope), (1e4, CompressRope::RELEASED));
    assert_eq!(tiny.experts.routing, [Routing::Hash; 4]);
    assert_eq!((tiny.bos, &tiny.eos[..]), (Some(0), &[][..]));
}

/// What tools write that quantise: transformers, ModelOpt for a whole model and for the experts of V4, llm-compressor.
fn quantisations() -> [Value; 4] {
    let group = json!({ "num_bits": 4, "type": "float", "group_size": 16, "dynamic": false });
    let groups = json!({ "group_0": { "weights": group, "input_activations": group, "targets": ["Linear"] } });
    let producer = json!({ "name": "modelopt", "version": "0.47.0" });
    [
        json!({
            "activation_scheme": "dynamic", "dequantize": false, "modules_to_convert": null,
            "modules_to_not_convert": ["lm_head"], "quant_method": "fp8", "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        }),
        json!({
            "config_groups": groups, "ignore": ["lm_head"], "kv_cache_scheme": { "num_bits": 8 }, "producer": producer,
            "quant_algo": "NVFP4", "quant_method": "modelopt",
        }),
        json!({
            "activation_scheme": "dynamic", "config_groups": groups, "expert_dtype": "fp4", "fmt": "e4m3",
            "group_size": 16, "ignore": ["*.attn.*", "mtp.*"], "kv_cache_quant_algo": null, "moe_quant_algo": "NVFP4",
            "producer": producer, "quant_algo": "MIXED_PRECISION", "quant_method": "fp8",
            "quantized_layers": { "layers.0.ffn.experts": { "quant_algo": "NVFP4", "group_size": 16 } },
            "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
        }),
        json!({
            "config_groups": groups, "format": "nvfp4-pack-quantized", "global_compression_ratio": null,
            "ignore": ["lm_head"], "kv_cache_scheme": null, "packed_modules_mapping": { "gate_up_proj": ["w1", "w3"] },
            "quant_method": "compressed-tensors", "quantization_status": "compressed", "sparsity_config": {},
            "transform_config": {}, "version": "0.17.2",
        }),
    ]
}

#[test]
fn a_field_of_the_quantisation_is_known_or_refused() {
    let flash = file("flash");
    let before = read(&flash).unwrap();
    for written in quantisations() {
        let with_quantisation = |value| read(&with(&flash, "quantization_config", value));
        assert_eq!(with_quantisation(written.clone()), Ok(before.clone()));
        for (field, value) in [
            // Weights that are stored rotated, smoothed, or with a part of low rank beside them.
            ("transform_config", json!({ "config_groups": { "R1": { "type": "hadamard" } } })),
            ("pre_quant_scale", json!(true)),
            ("svdquant_rank", json!(32)),
            ("quant_algo", json!("NVFP4_AWQ")),
            ("moe_quant_algo", json!("W4A8_AWQ")),
            ("expert_dtype", json!("int4")),
            ("format", json!("mixed-precision")),
            ("weight_block_size", json!([1, 32])),
        ] {
            let error = with_quantisation(with(&written, field, value)).unwrap_err();
            assert!(error.starts_with(&format!("quantization_config.{field} is ")), "{error}");
        }
    }
}

#[test]
fn layers_may_choose_in_any_order_and_texts_end_with_several_tokens() {
    let whole = file("transformers");
    let types = json!(["moe", "hash_moe", "moe", "moe"]);
    let read_with = |field, value| read(&with(&whole, field, value));
    let routing = read_with("mlp_layer_types", types).unwrap().experts.routing;
    use Routing::{Hash, Learned};
    assert_eq!(routing, [Learned, Hash, Learned, Learned]);
    assert_eq!(read_with("eos_token_id", json!([1, 7])).unwrap().eos, [1, 7]);
    assert!(read_with("eos_token_id", json!([1, "x"])).unwrap_err().contains("eos_token_id"));
    assert!(read_with("num_hash_layers", json!(3)).unwrap_err().contains("disagree"));
    let dense = read_with("mlp_layer_types", json!(["dense", "moe", "moe", "moe"])).unwrap_err();
    assert!(dense.contains("mlp_layer_types"), "{dense}");
}
