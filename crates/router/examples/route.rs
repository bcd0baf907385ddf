//! Routes a batch through two layers of a small model, from its files to experts and weights, and checks the result
//! against the formula.
//!
//! `cargo run --example route -p dsv4-kv-router` runs on a GPU if there is one, else on the CPU.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use anyhow::{Result, ensure};
use dsv4_kv_device::{Backend, CudaOptions, Device, EmuDevice, EmuOptions};
use dsv4_kv_model_files::ModelFiles;
use dsv4_kv_router::{Batch, Router, RouterConfig, Routing, bf16};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

const TOKENS: u32 = 5;
/// A layer that looks experts up by token id, and one that chooses by score.
const HASHED: u32 = 0;
const SCORED: u32 = 1;

fn main() -> Result<()> {
    match dsv4_kv::open_cuda(CudaOptions::default()) {
        Ok(device) => run(&device),
        Err(_) => run(&EmuDevice::new(EmuOptions::default())),
    }
}

fn run<B: Backend>(device: &Device<B>) -> Result<()> {
    // For a real model, call `ModelFiles::open` with its directory.
    let directory = tempfile::tempdir()?;
    let model = write_model(directory.path())?;
    let model_files = ModelFiles::open(directory.path())?;
    let config = RouterConfig::from(model_files.config());
    println!("{}: {} of {} experts", device.info().name, config.selected, config.experts);

    let stream = device.stream()?;
    let x = stream.upload_new("input", &model.hidden)?;
    let token = stream.upload_new("input", &model.tokens)?;
    let answers = u64::from(TOKENS * config.selected);
    let (ids, weights) = (device.allocate("ids", answers)?, device.allocate("weights", answers)?);
    let batch = Batch { tokens: TOKENS, token: &token, ids: &ids, weights: &weights };
    for layer in [HASHED, SCORED] {
        let mut router = Router::of_layer(&stream, &model_files, layer, TOKENS)?;
        router.route(&stream, &x, &batch)?;
        router.check_faults(&stream)?;
        let mut found = (vec![0_i32; answers as usize], vec![0_f32; answers as usize]);
        stream.download(&ids, 0, &mut found.0)?;
        stream.download(&weights, 0, &mut found.1)?;
        println!("layer {layer} ({:?})", router.mode());
        let rows = found.0.chunks(config.selected as usize);
        for (token, (ids, weights)) in
            rows.zip(found.1.chunks(config.selected as usize)).enumerate()
        {
            println!("  token {:>4}: {ids:?} {weights:.3?}", model.tokens[token]);
            model.check(&config, router.mode(), token, ids, weights)?;
        }
    }
    Ok(())
}

/// Writes the files of a random model.
fn write_model(directory: &Path) -> Result<Model> {
    // The configuration that transformers wrote for a tiny model. The file is a symbolic link, so that the package
    // contains its target.
    let json = include_str!("config.json");
    let mut json: Value = serde_json::from_str(json)?;
    json["mlp_layer_types"] = json!(["hash_moe", "moe", "moe", "moe"]);
    let json = json.to_string();
    let config = RouterConfig::from(&dsv4_kv_model_files::Config::from_json(&json)?);
    let model = Model::random(&config);
    fs::write(directory.join("config.json"), json)?;
    fs::write(directory.join("model.safetensors"), model.weights(&config)?)?;
    Ok(model)
}

/// Random weights of a router, and a random batch.
struct Model {
    /// `[TOKENS, hidden]` BF16.
    hidden: Vec<bf16>,
    tokens: Vec<i32>,
    /// `[experts, hidden]` BF16.
    gate: Vec<bf16>,
    bias: Vec<f32>,
    /// `[vocabulary, selected]`.
    table: Vec<i64>,
}

impl Model {
    fn random(config: &RouterConfig) -> Self {
        let mut random = StdRng::seed_from_u64(7);
        let mut bf16s = |count: u32| -> Vec<bf16> {
            (0..count).map(|_| bf16::from_f32(random.random_range(-0.5..0.5))).collect()
        };
        let (hidden, gate) =
            (bf16s(TOKENS * config.hidden_size), bf16s(config.experts * config.hidden_size));
        let experts = i64::from(config.experts);
        let listed = config.vocabulary * config.selected;
        Self {
            hidden,
            gate,
            tokens: (0..TOKENS).map(|_| random.random_range(0..config.vocabulary as i32)).collect(),
            bias: (0..config.experts).map(|_| random.random_range(-0.1..0.1)).collect(),
            table: (0..listed).map(|_| random.random_range(0..experts)).collect(),
        }
    }

    /// The weight file; both layers have the same gate.
    fn weights(&self, config: &RouterConfig) -> Result<Vec<u8>> {
        let [experts, hidden, vocabulary, selected] =
            [config.experts, config.hidden_size, config.vocabulary, config.selected]
                .map(|extent| extent as usize);
        let gate =
            TensorView::new(Dtype::BF16, vec![experts, hidden], bytemuck::cast_slice(&self.gate))?;
        let bias = TensorView::new(Dtype::F32, vec![experts], bytemuck::cast_slice(&self.bias))?;
        let table = TensorView::new(
            Dtype::I64,
            vec![vocabulary, selected],
            bytemuck::cast_slice(&self.table),
        )?;
        let [hashed, scored] = [HASHED, SCORED].map(|layer| format!("layers.{layer}.ffn.gate"));
        let tensors = HashMap::from([
            (format!("{hashed}.weight"), gate.clone()),
            (format!("{hashed}.tid2eid"), table),
            (format!("{scored}.weight"), gate),
            (format!("{scored}.bias"), bias),
        ]);
        Ok(safetensors::serialize(tensors, None)?)
    }

    /// sqrt(softplus(x . w)) of an expert.
    fn activation(&self, config: &RouterConfig, token: usize, expert: usize) -> f32 {
        let row = |values: &[bf16], row: usize| -> Vec<f32> {
            let hidden = config.hidden_size as usize;
            let row = &values[row * hidden..][..hidden];
            row.iter().map(|x| x.to_f32()).collect()
        };
        let (x, w) = (row(&self.hidden, token), row(&self.gate, expert));
        let logit: f32 = x.iter().zip(&w).map(|(x, w)| x * w).sum();
        logit.exp().ln_1p().sqrt()
    }

    fn check(
        &self,
        config: &RouterConfig,
        mode: Routing,
        token: usize,
        ids: &[i32],
        weights: &[f32],
    ) -> Result<()> {
        let all: Vec<f32> = (0..config.experts as usize)
            .map(|expert| self.activation(config, token, expert))
            .collect();
        let want: Vec<i32> = match mode {
            Routing::Hash => {
                let selected = config.selected as usize;
                let at = self.tokens[token] as usize * selected;
                self.table[at..at + selected].iter().map(|&id| id as i32).collect()
            }
            Routing::Learned => {
                let score = |&id: &i32| all[id as usize] + self.bias[id as usize];
                let mut order: Vec<i32> = (0..config.experts as i32).collect();
                order.sort_by(|a, b| score(b).total_cmp(&score(a)));
                order[..config.selected as usize].to_vec()
            }
        };
        ensure!(ids == want, "token {token}: {ids:?}, should be {want:?}");
        let sum: f32 = ids.iter().map(|&id| all[id as usize]).sum();
        for (&id, &weight) in ids.iter().zip(weights) {
            let want = all[id as usize] / sum * config.scaling;
            ensure!((weight - want).abs() < 1e-5, "token {token}: {weight}, should be {want}");
        }
        Ok(())
    }
}
