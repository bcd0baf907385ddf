//! A model takes every weight of its checkpoint. What is left over belongs to another model, or is of no use here.

use std::fs;
use std::path::Path;

use dsv4_kv_model::{Model, ModelError};
use dsv4_kv_model_files::{ModelFileError, ModelFiles};
use dsv4_kv_router::{RouterError, RouterWeights};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};

use dsv4_kv_tests::model_files::{Made, Tensors, directory, serialized};

/// The small checkpoint of the end-to-end tests: its configuration and its tensors.
pub(super) fn small() -> (Value, Tensors) {
    of_folder("hash")
}

fn of_folder(name: &str) -> (Value, Tensors) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("e2e").join(name);
    let read = |name: &str| fs::read(folder.join(name)).expect("a file");
    let bytes = read("model.safetensors");
    let file = SafeTensors::deserialize(&bytes).expect("tensors");
    let made = |(name, tensor): (&str, TensorView<'_>)| {
        (name.to_owned(), Made::new(tensor.dtype(), tensor.shape(), tensor.data().to_vec()))
    };
    let config = serde_json::from_slice(&read("config.json")).expect("JSON");
    (config, file.iter().map(made).collect())
}

/// The configuration without its last layer.
fn two_layers(mut config: Value) -> Value {
    config["num_hidden_layers"] = json!(2);
    for list in ["layer_types", "mlp_layer_types"] {
        config[list].as_array_mut().expect("a list").pop();
    }
    config
}

fn one() -> Made {
    Made::f32(&[1], &[1.0])
}

/// Loads the model in a directory, and counts the layers that were read.
pub(super) fn load_from(directory: &Path, layers: &mut usize) -> Result<(), ModelFileError> {
    match Model::load(&ModelFiles::open(directory)?, |read| *layers = read) {
        Ok(_) => Ok(()),
        Err(ModelError::ModelFile(error)) => Err(*error),
        Err(error) => panic!("{error}"),
    }
}

/// Loads a model of one file, and counts the layers that were read.
fn load_counting(
    config: &Value,
    tensors: &Tensors,
    layers: &mut usize,
) -> Result<(), ModelFileError> {
    let directory = directory(config, &[("model.safetensors", &serialized(tensors))]);
    load_from(directory.path(), layers)
}

fn load(config: &Value, tensors: &Tensors) -> Result<(), ModelFileError> {
    load_counting(config, tensors, &mut 0)
}

/// The first tensor that is left over, and the number of such tensors.
fn left_over(config: &Value, tensors: &Tensors) -> (String, usize) {
    match load(config, tensors) {
        Err(ModelFileError::Unused { name, count }) => (name, count),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_weight_that_nothing_reads_is_refused() {
    let (config, tensors) = small();
    load(&config, &tensors).expect("the whole checkpoint");
    for (written, released) in [
        ("model.layers.0.attn.wq_a.bias", "layers.0.attn.wq_a.bias"),
        ("model.layers.1.mlp.gate.e_score_correction_bias", "layers.1.ffn.gate.bias"),
        ("model.layers.1.self_attn.q_a_proj.pre_quant_scale", "layers.1.attn.wq_a.pre_quant_scale"),
        ("layers.2.ffn.experts.3.w1.svdquant_lora_a", "layers.2.ffn.experts.3.w1.svdquant_lora_a"),
        ("layers.0.attn.wq_b.weight_zero_point", "layers.0.attn.wq_b.weight_zero_point"),
        ("layers.0.ffn.experts.32.w1.weight", "layers.0.ffn.experts.32.w1.weight"),
    ] {
        let mut more = tensors.clone();
        more.extend([(written.to_owned(), one()), ("mtp.0.norm.weight".to_owned(), one())]);
        assert_eq!(left_over(&config, &more), (released.to_owned(), 1));
    }
}

/// A configuration that drops a part of each token's keys, or a whole layer.
#[test]
fn a_model_smaller_than_its_checkpoint_is_refused() {
    let (config, tensors) = small();
    let mut windows = config.clone();
    windows["layer_types"][1] = json!("sliding_attention");
    assert_eq!(left_over(&windows, &tensors), ("layers.1.attn.compressor.ape".to_owned(), 10));
    assert_eq!(left_over(&two_layers(config), &tensors).0, "layers.2.attn.attn_sink");
}

/// Some tools number MTP layers behind the others. Such a layer norms the embedding of the next token.
#[test]
fn drafts_may_have_numbers_of_layers() {
    let (config, mut tensors) = small();
    let mut insert = |names: &[&str]| {
        tensors.extend(names.iter().map(|name| ((*name).to_owned(), one())));
        tensors.clone()
    };
    let unmarked = insert(&[
        "model.layers.3.self_attn.q_a_proj.weight",
        "layers.3.ffn.experts.0.w1.weight",
        "layers.4.hnorm.weight",
    ]);
    assert_eq!(left_over(&config, &unmarked), ("layers.3.attn.wq_a.weight".to_owned(), 3));
    let one_marked = insert(&["model.layers.3.enorm.weight"]);
    assert_eq!(left_over(&config, &one_marked), ("layers.4.hnorm.weight".to_owned(), 1));
    let marked = insert(&["layers.4.enorm.weight"]);
    load(&config, &marked).expect("a model");
    // A layer of the trunk is no draft, whether the configuration counts it or not.
    assert_eq!(left_over(&two_layers(config.clone()), &marked).0, "layers.2.attn.attn_sink");
    let in_trunk = insert(&["layers.2.enorm.weight"]);
    assert_eq!(left_over(&config, &in_trunk), ("layers.2.enorm.weight".to_owned(), 1));
}

/// Before all layers were read, where the name of the tensor says enough.
#[test]
fn what_is_left_over_is_refused_early() {
    let (config, tensors) = small();
    for (name, after) in
        [("layers.3.attn.wq_a.bias", 0), ("layers.1.attn.wq_a.bias", 1), ("head.bias", 3)]
    {
        let mut more = tensors.clone();
        more.insert(name.to_owned(), one());
        let mut layers = 0;
        let refused = load_counting(&config, &more, &mut layers);
        assert!(matches!(refused, Err(ModelFileError::Unused { .. })), "{name}: {refused:?}");
        assert_eq!(layers, after, "{name}");
    }
}

#[test]
fn drafts_and_what_is_said_of_activations_may_be_left_over() {
    let (config, mut tensors) = small();
    for name in [
        "mtp.0.enorm.weight",
        "model.mtp.2.markov_head.markov_w1.weight",
        "layers.0.ffn.experts.0.w1.input_scale",
        "model.layers.1.self_attn.q_a_proj.input_global_scale",
        "model.layers.1.self_attn.k_scale",
        "model.layers.1.self_attn.kv_proj.v_scale",
        "layers.0.attn.wkv.output_scale",
        "layers.0.attn.wkv.output_global_scale",
        "model.layers.1.self_attn.q_scale",
        "model.layers.1.self_attn.q_zero_point",
        "model.layers.1.self_attn.q_global_scale",
        "model.layers.1.self_attn.k_global_scale",
        "model.layers.1.self_attn.v_global_scale",
        "layers.2.attn.kv_scale",
        "model.rotary_emb.main_inv_freq",
        "model.layers.1.self_attn.compressor.rotary_emb.compress_inv_freq",
    ] {
        tensors.insert(name.to_owned(), one());
    }
    load(&config, &tensors).expect("a model");
}

/// In checkpoints with vision an embedder that takes the router alone would choose other experts for image tokens.
#[test]
fn a_router_has_no_bias_of_image_tokens() {
    let (config, mut tensors) = of_folder("scored");
    let layer_2 = |tensors: &Tensors| {
        let directory = directory(&config, &[("model.safetensors", &serialized(tensors))]);
        let model_files = ModelFiles::open(directory.path()).expect("files");
        RouterWeights::of_layer(&model_files, 2).map(drop)
    };
    layer_2(&tensors).expect("a router");
    tensors.insert("model.layers.2.ffn.gate.bias_vl".to_owned(), one());
    match layer_2(&tensors) {
        Err(RouterError::ModelFile(ModelFileError::Unused { name, .. })) => {
            assert_eq!(name, "layers.2.ffn.gate.bias_vl");
        }
        found => panic!("{found:?}"),
    }
}

/// Every form in which a matrix is read, with all scales of its tool; and what is no such form.
#[test]
fn scales_are_those_of_their_weight() {
    let (config, mut tensors) = small();
    let name = |expert: usize, end: &str| format!("model.layers.0.ffn.experts.{expert}.w1.{end}");
    let codes = |dtype, columns| Made::new(dtype, &[32, columns], vec![0x11; 32 * columns]);
    let groups = Made::new(Dtype::F8_E4M3, &[32, 2], vec![0x38; 64]);
    let powers = |rows| Made::new(Dtype::F8_E8M0, &[rows, 1], vec![127; rows]);
    let modelopt = vec![
        ("weight", codes(Dtype::U8, 16)),
        ("weight_scale", groups.clone()),
        ("weight_scale_2", one()),
        ("input_scale", one()),
    ];
    let compressed_tensors = vec![
        ("weight_packed", codes(Dtype::U8, 16)),
        ("weight_scale", groups),
        ("weight_global_scale", one()),
        ("input_global_scale", one()),
    ];
    let mxfp4 = vec![("weight", codes(Dtype::I8, 16)), ("scale", powers(32))];
    let fp8 = vec![("weight", codes(Dtype::F8_E4M3, 32)), ("scale", powers(1))];
    let base = vec![("weight", codes(Dtype::F8_E4M3, 32)), ("scale", Made::f32(&[1, 1], &[1.0]))];
    let forms = [modelopt, compressed_tensors, mxfp4, fp8, base];
    for (expert, form) in forms.into_iter().enumerate() {
        tensors.remove(&name(expert, "weight")).expect("its weight");
        tensors.extend(form.into_iter().map(|(end, made)| (name(expert, end), made)));
    }
    load(&config, &tensors).expect("a model");
    for (expert, other) in [
        (0, "weight_global_scale"),
        (1, "scale"),
        (2, "weight_scale_2"),
        (3, "weight_scale"),
        (4, "weight_scale_2"),
        (5, "weight_global_scale"),
    ] {
        let mut more = tensors.clone();
        more.insert(name(expert, other), one());
        let released = format!("layers.0.ffn.experts.{expert}.w1");
        match load(&config, &more) {
            Err(ModelFileError::Unused { name, count: 1 }) if expert < 5 => {
                assert_eq!(name, format!("{released}.{other}"));
            }
            // The last is in BF16, which has no scales.
            Err(ModelFileError::Type { name, found: Dtype::BF16, .. }) if expert == 5 => {
                assert_eq!(name, format!("{released}.weight"));
            }
            found => panic!("{expert}: {found:?}"),
        }
    }
}
