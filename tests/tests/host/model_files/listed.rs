//! Tensors that an index lists and no shard has, and the scales that SGLang's FP8 checkpoints leave beside `wo_a`.

use std::fmt::Debug;

use dsv4_kv_model_files::{ModelFileError, ModelFiles};
use safetensors::Dtype;
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use super::left_over::{load_from, small};
use dsv4_kv_tests::model_files::{
    Made, Tensors, directory, one_file, serialized, sharded, tensors,
};

const SHARD: &str = "model.safetensors";
const WO_A: &str = "layers.0.attn.wo_a.weight";
const WO_A_SCALE: &str = "layers.0.attn.wo_a.scale";
const WQ_A: &str = "layers.0.attn.wq_a.weight";
const WQ_A_SCALE: &str = "layers.0.attn.wq_a.scale";

/// One shard, and an index that lists `more` besides the shard's tensors.
fn listing(config: &Value, tensors: &Tensors, more: &[&str]) -> TempDir {
    let names = tensors.keys().map(String::as_str).chain(more.iter().copied());
    let map: Map<String, Value> = names.map(|name| (name.to_owned(), json!(SHARD))).collect();
    let index = json!({ "weight_map": map }).to_string();
    let index = ("model.safetensors.index.json", index.as_bytes());
    directory(config, &[(SHARD, &serialized(tensors)), index])
}

fn open(tensors: &Tensors, more: &[&str]) -> ModelFiles {
    let directory = listing(&dsv4_kv_tests::model_files::config(), tensors, more);
    ModelFiles::open(directory.path()).expect("a checkpoint")
}

fn assert_absent(found: Result<impl Debug, ModelFileError>, wanted: &str) {
    match found {
        Err(ModelFileError::NotInShard { path, tensor }) => {
            assert!(path.ends_with(SHARD), "{}", path.display());
            assert_eq!(tensor, wanted);
        }
        other => panic!("{wanted}: {other:?}"),
    }
}

fn bf16(values: &[f32]) -> Made {
    Made::bf16(&[1, values.len()], values)
}

/// UE8M0 scales of one row, all 2.
fn twos(columns: usize) -> Made {
    Made::new(Dtype::F8_E8M0, &[1, columns], vec![128; columns])
}

#[test]
fn what_only_the_index_has_is_not_there() {
    let weights = tensors([("embed.weight", bf16(&[1.0]))]);
    let model_files = open(&weights, &["model.norm.weight"]);
    assert!(!model_files.contains("norm.weight"));
    assert_eq!(model_files.shape("norm.weight"), None);
    assert_eq!(model_files.names().collect::<Vec<_>>(), ["embed.weight"]);
    assert_eq!(model_files.unread(), ["embed.weight"]);
    assert_eq!(model_files.f32("embed.weight", &[1, 1]).unwrap(), [1.0]);
    // Only who asks for it is refused, with the name in the index.
    assert_absent(model_files.f32("norm.weight", &[1]), "model.norm.weight");
    assert_absent(model_files.bf16("norm.weight", &[1]), "model.norm.weight");
    assert_absent(model_files.i64("norm.weight", &[1]), "model.norm.weight");
    assert_absent(model_files.check_listed(|_| true), "model.norm.weight");
    model_files.check_listed(|name| name != "norm.weight").expect("all others are there");
    let unlisted = model_files.f32("head.weight", &[1]).unwrap_err();
    assert!(matches!(unlisted, ModelFileError::Missing { .. }), "{unlisted}");
}

/// Other programs find it too: they read all of each shard.
#[test]
fn another_shard_may_have_it() {
    let one = tensors([("embed.weight", bf16(&[1.0]))]);
    let merged = "layers.0.ffn.experts.gate_up_proj";
    let two = tensors([
        ("head.weight", bf16(&[2.0])),
        ("norm.weight", bf16(&[3.0])),
        (merged, Made::bf16(&[1, 2, 1], &[4.0, 5.0])),
    ]);
    let shards = [("one.safetensors", &one), ("two.safetensors", &two)];
    let map = json!({
        "embed.weight": "one.safetensors", "head.weight": "one.safetensors",
        "norm.weight": "two.safetensors", merged: "one.safetensors",
    });
    let model_files = ModelFiles::open(sharded(&shards, &map).path()).expect("a checkpoint");
    model_files.check_listed(|_| true).expect("all are there");
    assert_eq!(model_files.f32("layers.0.ffn.experts.0.w3.weight", &[1, 1]).unwrap(), [5.0]);
    assert_eq!(model_files.f32("head.weight", &[1, 1]).unwrap(), [2.0]);
}

/// Without its scales a weight would be read as another type, or as the numbers of its codes.
#[test]
fn scales_that_only_the_index_has_are_missed() {
    let e4m3 = Made::new(Dtype::F8_E4M3, &[1, 32], vec![0x11; 32]);
    for (weight, scale) in [(WO_A, WO_A_SCALE), (WQ_A, WQ_A_SCALE)] {
        let model_files = open(&tensors([(weight, e4m3.clone())]), &[scale]);
        assert_absent(model_files.f32(weight, &[1, 32]), scale);
        assert_absent(model_files.check_listed(|_| true), scale);
    }
    let model_files = open(&tensors([(WQ_A, bf16(&[1.0, 2.0]))]), &[WQ_A_SCALE]);
    assert_absent(model_files.f32(WQ_A, &[1, 2]), WQ_A_SCALE);
    assert_absent(model_files.bf16(WQ_A, &[1, 2]), WQ_A_SCALE);
    // NVFP4 that has lost its scales would be MXFP4, and a factor that is lost would be a divisor.
    let e2m1 = (WQ_A, Made::new(Dtype::U8, &[1, 16], vec![0x11; 16]));
    let groups = "layers.0.attn.wq_a.weight_scale";
    let model_files = open(&tensors([e2m1.clone(), (WQ_A_SCALE, twos(1))]), &[groups]);
    assert_absent(model_files.f32(WQ_A, &[1, 32]), groups);
    assert_absent(model_files.nvfp4(WQ_A, [1, 32]), groups);
    let factor = "layers.0.attn.wq_a.weight_scale_2";
    let divisor = ("layers.0.attn.wq_a.weight_global_scale", Made::f32(&[1], &[2.0]));
    let scales = (groups, Made::new(Dtype::F8_E4M3, &[1, 2], vec![0x38; 2]));
    let model_files = open(&tensors([e2m1, scales, divisor]), &[factor]);
    assert_absent(model_files.f32(WQ_A, &[1, 32]), factor);
}

/// `wo_a` of SGLang's FP8 checkpoints was multiplied by its scales: they are not applied twice.
#[test]
fn a_wo_a_in_bf16_may_have_scales_left() {
    let weight = (WO_A, bf16(&[1.0, -3.0]));
    let listed = open(&tensors([weight.clone()]), &[WO_A_SCALE]);
    let stored = open(&tensors([weight, (WO_A_SCALE, twos(1))]), &[]);
    for model_files in [listed, stored] {
        model_files.check_listed(|_| true).expect("what is listed only is not needed");
        assert_eq!(model_files.f32(WO_A, &[1, 2]).unwrap(), [1.0, -3.0]);
        assert_eq!(model_files.bf16(WO_A, &[1, 2]).unwrap().len(), 2);
        assert!(model_files.unread().is_empty(), "its scales count as read");
    }
    let other = "layers.0.attn.wo_a.weight_scale";
    for (weight, scale, made) in [
        (WQ_A, WQ_A_SCALE, bf16(&[1.0, 2.0])),
        (WO_A, other, bf16(&[1.0, 2.0])),
        (WO_A, WO_A_SCALE, Made::f32(&[1, 2], &[1.0, 2.0])),
    ] {
        let both = tensors([(weight, made), (scale, twos(1))]);
        let refused = one_file(&dsv4_kv_tests::model_files::config(), &both).f32(weight, &[1, 2]);
        match refused {
            Err(ModelFileError::Type { name, .. }) => assert_eq!(name, weight),
            found => panic!("{scale}: {found:?}"),
        }
    }
}

#[test]
fn a_model_loads_without_what_it_does_not_need() {
    let (config, mut tensors) = small();
    let load = |tensors: &Tensors, more: &[&str]| {
        let mut layers = 0;
        (load_from(listing(&config, tensors, more).path(), &mut layers), layers)
    };
    let needless = [
        "model.layers.0.attn.wo_a.scale",
        "layers.1.attn.wo_a.scale",
        "model.layers.2.self_attn.o_a_proj.scale",
        "mtp.0.attn.wo_a.scale",
        "mtp.0.norm.weight",
        "layers.0.ffn.experts.0.w1.input_scale",
    ];
    load(&tensors, &needless).0.expect("a model");
    for lost in ["model.layers.2.attn.wq_a.bias", "model.layers.1.attn.wq_a.scale"] {
        let (refused, layers) = load(&tensors, &[lost]);
        assert_absent(refused, lost);
        assert_eq!(layers, 0, "{lost}");
    }
    let lost = "model.layers.2.attn.wo_a.weight";
    let weight = tensors.remove(lost).expect("a weight");
    let (refused, layers) = load(&tensors, &[lost, "model.layers.2.attn.wo_a.scale"]);
    assert!(matches!(refused, Err(ModelFileError::NotInShard { .. })), "{refused:?}");
    assert_eq!(layers, 0, "before anything is read");
    tensors.extend([(lost.to_owned(), weight)]);
    for layer in 0..3 {
        tensors.insert(format!("model.layers.{layer}.attn.wo_a.scale"), twos(1));
    }
    load(&tensors, &[]).0.expect("a model whose scales of wo_a are left");
}
