//! The same weights under the names of released checkpoints, with a released `config.json`.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use dsv4_kv::device::{Backend, Device};
use dsv4_kv_model::Model;
use dsv4_kv_model_files::ModelFiles;
use dsv4_kv_tests::model_files::{Made, Tensors, directory, serialized};
use half::bf16;
use libtest_mimic::Failed;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Map, Value, json};

use crate::reference::Reference;
use crate::whole_model;

/// Names that transformers writes differently, besides its prefix `model.`, and the released names.
const RENAMED: [(&str, &str); 7] = [
    ("embed_tokens.weight", "embed.weight"),
    ("lm_head.weight", "head.weight"),
    ("hc_head.hc_fn", "hc_head_fn"),
    ("hc_head.hc_base", "hc_head_base"),
    ("hc_head.hc_scale", "hc_head_scale"),
    (".attn.norm.weight", ".attn.kv_norm.weight"),
    (".compressor.kv_norm.weight", ".compressor.norm.weight"),
];
/// Fields of `config.json` that released files do not have.
const NOT_RELEASED: [&str; 9] = [
    "layer_types",
    "mlp_layer_types",
    "compress_rates",
    "rope_parameters",
    "partial_rotary_factor",
    "dtype",
    "mlp_bias",
    "output_router_logits",
    "transformers_version",
];

/// Tokens and logits equal the reference's.
pub fn decodes_the_same_tokens<B: Backend>(
    device: &Device<B>,
    reference: &Reference,
) -> Result<(), Failed> {
    let model = load(&reference.folder, &stored(&reference.folder)?)?;
    let released = reference.mutated(Arc::new(model));
    whole_model::decodes_the_same_tokens(device, &released)?;
    whole_model::logits(device, &released)
}

/// The tensors of a folder's checkpoint under released names.
pub fn stored(folder: &Path) -> Result<Tensors> {
    let file = fs::read(folder.join("model.safetensors"))?;
    Ok(tensors(&SafeTensors::deserialize(&file)?))
}

/// The model with these tensors, and with a released `config.json` that says the same as the folder's.
pub fn load(folder: &Path, tensors: &Tensors) -> Result<Model> {
    let config = serde_json::from_slice(&fs::read(folder.join("config.json"))?)?;
    let files = [("model.safetensors", &serialized(tensors)[..])];
    let written = directory(&Value::Object(released_config(config)?), &files);
    Ok(Model::load(&ModelFiles::open(written.path())?, |_| {})?)
}

/// The tensors under released names; the weights of norms are BF16.
fn tensors(file: &SafeTensors<'_>) -> Tensors {
    let released = |(name, tensor): (&str, safetensors::tensor::TensorView<'_>)| {
        let name = name.strip_prefix("model.").unwrap_or(name);
        let renamed = RENAMED.iter().find_map(|(end, other)| {
            let start = name.strip_suffix(end)?;
            Some(format!("{start}{other}"))
        });
        let name = renamed.unwrap_or_else(|| name.to_owned());
        let bytes = tensor.data();
        let is_norm = name.ends_with("norm.weight") && tensor.dtype() == Dtype::F32;
        let made = if is_norm {
            let elements = bytes.as_chunks().0.iter();
            let rounded = elements.map(|&b| bf16::from_f32(f32::from_le_bytes(b)).to_le_bytes());
            Made::new(Dtype::BF16, tensor.shape(), rounded.flatten().collect())
        } else {
            Made::new(tensor.dtype(), tensor.shape(), bytes.to_vec())
        };
        (name, made)
    };
    file.iter().map(released).collect()
}

/// `compress_ratios`, `num_hash_layers` and `rope_scaling` instead of lists of layer types and RoPE parameters.
fn released_config(mut config: Map<String, Value>) -> Result<Map<String, Value>> {
    let list = |name: &str| config[name].as_array().cloned().context("a list");
    let ratio = |kind: Value| match kind.as_str() {
        Some("compressed_sparse_attention") => 4,
        Some("heavily_compressed_attention") => 128,
        _ => 0,
    };
    let ratios: Vec<u32> = list("layer_types")?.into_iter().map(ratio).collect();
    let hashed = list("mlp_layer_types")?.iter().filter(|kind| **kind == "hash_moe").count();
    let yarn = &config["rope_parameters"]["compress"];
    let scaling = json!({
        "type": "yarn", "beta_fast": yarn["beta_fast"], "beta_slow": yarn["beta_slow"], "factor": yarn["factor"],
        "original_max_position_embeddings": yarn["original_max_position_embeddings"],
    });
    NOT_RELEASED.iter().for_each(|name| drop(config.remove(*name)));
    let released = json!({
        "compress_ratios": ratios, "num_hash_layers": hashed, "rope_scaling": scaling,
        "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    });
    config.extend(released.as_object().cloned().context("an object")?);
    Ok(config)
}
