//! The same weights with released names and with those of transformers, in one file and in shards.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use dsv4_kv_model_files::{ModelFileError, ModelFiles};
use serde_json::{Value, json};

use dsv4_kv_tests::model_files::{
    Made, Tensors, config, directory, one_file, refusal, serialized, sharded, tensors,
};

/// Names of a layer's tensors: as released, as transformers writes them, and as its modules call them.
const SPELLINGS: [[&str; 3]; 34] = [
    ["embed.weight", "model.embed_tokens.weight", "model.embed_tokens.weight"],
    ["head.weight", "head.weight", "lm_head.weight"],
    ["norm.weight", "model.norm.weight", "model.norm.weight"],
    ["hc_head_fn", "model.hc_head.hc_fn", "model.hc_head.hc_fn"],
    ["hc_head_base", "model.hc_head.hc_base", "model.hc_head.hc_base"],
    ["hc_head_scale", "model.hc_head.hc_scale", "model.hc_head.hc_scale"],
    [
        "layers.1.attn_norm.weight",
        "model.layers.1.attn_norm.weight",
        "model.layers.1.input_layernorm.weight",
    ],
    [
        "layers.1.ffn_norm.weight",
        "model.layers.1.ffn_norm.weight",
        "model.layers.1.post_attention_layernorm.weight",
    ],
    ["layers.1.hc_attn_fn", "model.layers.1.hc_attn_fn", "model.layers.1.attn_hc.fn"],
    ["layers.1.hc_attn_base", "model.layers.1.hc_attn_base", "model.layers.1.attn_hc.base"],
    ["layers.1.hc_attn_scale", "model.layers.1.hc_attn_scale", "model.layers.1.attn_hc.scale"],
    ["layers.1.hc_ffn_fn", "model.layers.1.hc_ffn_fn", "model.layers.1.ffn_hc.fn"],
    ["layers.1.hc_ffn_base", "model.layers.1.hc_ffn_base", "model.layers.1.ffn_hc.base"],
    ["layers.1.hc_ffn_scale", "model.layers.1.hc_ffn_scale", "model.layers.1.ffn_hc.scale"],
    ["layers.1.attn.attn_sink", "model.layers.1.attn.attn_sink", "model.layers.1.self_attn.sinks"],
    [
        "layers.1.attn.q_norm.weight",
        "model.layers.1.attn.q_norm.weight",
        "model.layers.1.self_attn.q_a_norm.weight",
    ],
    [
        "layers.1.attn.kv_norm.weight",
        "model.layers.1.attn.norm.weight",
        "model.layers.1.self_attn.kv_norm.weight",
    ],
    [
        "layers.1.attn.wq_a.weight",
        "model.layers.1.attn.wq_a.weight",
        "model.layers.1.self_attn.q_a_proj.weight",
    ],
    [
        "layers.1.attn.wq_b.weight",
        "model.layers.1.attn.wq_b.weight",
        "model.layers.1.self_attn.q_b_proj.weight",
    ],
    [
        "layers.1.attn.wkv.weight",
        "model.layers.1.attn.wkv.weight",
        "model.layers.1.self_attn.kv_proj.weight",
    ],
    [
        "layers.1.attn.wo_a.weight",
        "model.layers.1.attn.wo_a.weight",
        "model.layers.1.self_attn.o_a_proj.weight",
    ],
    [
        "layers.1.attn.wo_b.weight",
        "model.layers.1.attn.wo_b.weight",
        "model.layers.1.self_attn.o_b_proj.weight",
    ],
    [
        "layers.1.attn.compressor.ape",
        "model.layers.1.attn.compressor.ape",
        "model.layers.1.self_attn.compressor.position_bias",
    ],
    [
        "layers.1.attn.compressor.norm.weight",
        "model.layers.1.attn.compressor.norm.weight",
        "model.layers.1.self_attn.compressor.kv_norm.weight",
    ],
    [
        "layers.1.attn.compressor.wkv.weight",
        "model.layers.1.attn.compressor.wkv.weight",
        "model.layers.1.self_attn.compressor.kv_proj.weight",
    ],
    [
        "layers.1.attn.compressor.wgate.weight",
        "model.layers.1.attn.compressor.wgate.weight",
        "model.layers.1.self_attn.compressor.gate_proj.weight",
    ],
    [
        "layers.1.attn.indexer.compressor.ape",
        "model.layers.1.attn.indexer.compressor.ape",
        "model.layers.1.self_attn.compressor.indexer.position_bias",
    ],
    [
        "layers.1.attn.indexer.compressor.norm.weight",
        "model.layers.1.attn.indexer.compressor.norm.weight",
        "model.layers.1.self_attn.compressor.indexer.kv_norm.weight",
    ],
    [
        "layers.1.attn.indexer.compressor.wkv.weight",
        "model.layers.1.attn.indexer.compressor.wkv.weight",
        "model.layers.1.self_attn.compressor.indexer.kv_proj.weight",
    ],
    [
        "layers.1.attn.indexer.wq_b.weight",
        "model.layers.1.attn.indexer.wq_b.weight",
        "model.layers.1.self_attn.compressor.indexer.q_b_proj.weight",
    ],
    [
        "layers.1.attn.indexer.weights_proj.weight",
        "model.layers.1.attn.indexer.weights_proj.weight",
        "model.layers.1.self_attn.compressor.indexer.scorer.weights_proj.weight",
    ],
    [
        "layers.1.ffn.gate.weight",
        "model.layers.1.ffn.gate.weight",
        "model.layers.1.mlp.gate.weight",
    ],
    [
        "layers.1.ffn.gate.bias",
        "model.layers.1.ffn.gate.bias",
        "model.layers.1.mlp.gate.e_score_correction_bias",
    ],
    [
        "layers.1.ffn.shared_experts.w3.weight",
        "model.layers.1.ffn.shared_experts.w3.weight",
        "model.layers.1.mlp.shared_experts.up_proj.weight",
    ],
];

/// A tensor of two elements, of which the first is the place of the spelling among the others.
fn at(place: usize) -> Made {
    Made::f32(&[2], &[place as f32, -0.5])
}

#[test]
fn every_spelling_has_a_released_name() {
    for spelling in 0..3 {
        let written: Tensors = SPELLINGS
            .iter()
            .enumerate()
            .map(|(place, names)| (names[spelling].to_owned(), at(place)))
            .collect();
        let model_files = one_file(&config(), &written);
        assert_eq!(model_files.names().count(), SPELLINGS.len());
        for (place, names) in SPELLINGS.iter().enumerate() {
            assert!(model_files.contains(names[0]), "{}", names[spelling]);
            assert_eq!(model_files.f32(names[0], &[2]).unwrap(), [place as f32, -0.5]);
        }
    }
}

#[test]
fn experts_of_one_tensor_are_split() {
    let (experts, intermediate, hidden) = (3, 2, 4);
    let of = |count: usize| (0..count).map(|at| at as f32).collect::<Vec<_>>();
    let gate_up = of(experts * 2 * intermediate * hidden);
    let down = of(experts * hidden * intermediate);
    for make in [Made::bf16, Made::f32] {
        let model_files = one_file(
            &config(),
            &tensors([
                ("model.layers.0.mlp.experts.gate_up_proj", make(&[3, 4, 4], &gate_up)),
                ("model.layers.0.ffn.experts.down_proj", make(&[3, 4, 2], &down)),
            ]),
        );
        assert_eq!(model_files.names().count(), 9);
        for expert in 0..experts {
            let weight = |name: &str, shape: &[u64]| {
                model_files
                    .f32(&format!("layers.0.ffn.experts.{expert}.{name}.weight"), shape)
                    .unwrap()
            };
            let rows = intermediate * hidden;
            let first = 2 * expert * rows;
            assert_eq!(weight("w1", &[2, 4]), gate_up[first..first + rows]);
            assert_eq!(weight("w3", &[2, 4]), gate_up[first + rows..first + 2 * rows]);
            assert_eq!(weight("w2", &[4, 2]), down[expert * rows..][..rows]);
        }
    }
}

#[test]
fn shards_are_read_as_one() {
    let first = tensors([("embed.weight", at(0)), ("layers.0.attn_norm.weight", at(1))]);
    let second = tensors([("head.weight", at(2)), ("mtp.0.enorm.weight", at(3))]);
    let map = json!({
        "embed.weight": "one.safetensors", "layers.0.attn_norm.weight": "one.safetensors",
        "head.weight": "two.safetensors", "mtp.0.enorm.weight": "two.safetensors",
    });
    let directory = sharded(&[("one.safetensors", &first), ("two.safetensors", &second)], &map);
    let model_files = ModelFiles::open(directory.path()).unwrap();
    for (place, name) in
        ["embed.weight", "layers.0.attn_norm.weight", "head.weight", "mtp.0.enorm.weight"]
            .iter()
            .enumerate()
    {
        assert_eq!(model_files.f32(name, &[2]).unwrap()[0], place as f32);
    }
    // A file that is not in the index is not read.
    let name = directory.path().join("three.safetensors");
    std::fs::write(name, serialized(&tensors([("other", at(0))]))).unwrap();
    assert!(!ModelFiles::open(directory.path()).unwrap().contains("other"));
}

#[test]
fn a_tensor_is_there_once() {
    let both = tensors([("embed.weight", at(0)), ("model.embed_tokens.weight", at(1))]);
    let error = refusal(directory(&config(), &[("model.safetensors", &serialized(&both))]).path());
    assert!(
        matches!(&error, ModelFileError::Duplicate { name, .. } if name == "embed.weight"),
        "{error}"
    );
    let one = tensors([("norm.weight", at(0))]);
    let two = tensors([("norm.weight", at(0)), ("head.weight", at(1))]);
    let map = json!({ "norm.weight": "one.safetensors", "head.weight": "two.safetensors" });
    let error =
        refusal(sharded(&[("one.safetensors", &one), ("two.safetensors", &two)], &map).path());
    assert!(
        matches!(&error, ModelFileError::Duplicate { name, .. } if name == "norm.weight"),
        "{error}"
    );
    let merged = tensors([
        ("layers.0.ffn.experts.0.w2.weight", Made::f32(&[1, 1], &[1.0])),
        ("layers.0.ffn.experts.down_proj", Made::f32(&[1, 1, 1], &[1.0])),
    ]);
    let error =
        refusal(directory(&config(), &[("model.safetensors", &serialized(&merged))]).path());
    assert!(matches!(error, ModelFileError::Duplicate { .. }), "{error}");
}

/// Draft layers have names of their own.
#[test]
fn layers_behind_the_trunk_are_mtp_layers() {
    let newer: Value =
        serde_json::from_str(include_str!("../../../configs/flash-0731.json")).unwrap();
    let model_files = one_file(&newer, &tensors([("mtp.2.norm.weight", at(0))]));
    let prefixes = [0, 42, 43, 45].map(|layer| model_files.layer_prefix(layer));
    assert_eq!(prefixes, ["layers.0", "layers.42", "mtp.0", "mtp.2"]);
    assert!(model_files.contains(&format!("{}.norm.weight", prefixes[3])));
}

#[test]
fn progress_goes_from_nothing_to_all() {
    let written =
        tensors([("a", at(0)), ("b", Made::f32(&[4], &[0.0; 4])), ("c", Made::i64(&[1], &[7]))]);
    let directory = directory(&config(), &[("model.safetensors", &serialized(&written))]);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let to = Arc::clone(&seen);
    let model_files = ModelFiles::open_with(directory.path(), move |done, total| {
        to.lock().unwrap().push((done, total))
    })
    .unwrap();
    assert_eq!(*seen.lock().unwrap(), []);
    model_files.f32("a", &[2]).unwrap();
    model_files.bf16("b", &[4]).unwrap();
    model_files.f32("b", &[5]).unwrap_err();
    model_files.i64("c", &[1]).unwrap();
    model_files.f32("a", &[2]).unwrap();
    assert_eq!(*seen.lock().unwrap(), [(8, 32), (24, 32), (32, 32), (32, 32)]);
}

/// `DSV4_E2E_DIR` names a checkpoint that transformers wrote, with the same weights as released in `released/`.
#[test]
#[ignore = "compares DSV4_E2E_DIR with DSV4_E2E_DIR/released"]
fn both_spellings_of_a_real_file_are_equal() {
    let directory = PathBuf::from(std::env::var_os("DSV4_E2E_DIR").expect("DSV4_E2E_DIR"));
    let written = ModelFiles::open(&directory).expect("a checkpoint");
    let released = directory.join("released");
    let released = ModelFiles::open(&released).expect("a checkpoint");
    assert_eq!(written.config(), released.config());
    let sorted = |model_files: &ModelFiles| {
        let mut names: Vec<String> = model_files.names().map(str::to_owned).collect();
        names.sort();
        names
    };
    let names = sorted(&written);
    assert_eq!(names, sorted(&released));
    assert!(names.len() > 100);
    for name in &names {
        let shape = written.shape(name).expect("it is there");
        if name.ends_with("tid2eid") {
            assert_eq!(written.i64(name, &shape).unwrap(), released.i64(name, &shape).unwrap());
        } else {
            assert_eq!(
                written.f32(name, &shape).unwrap(),
                released.f32(name, &shape).unwrap(),
                "{name}"
            );
        }
    }
}
