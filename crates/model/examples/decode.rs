//! A whole model on the cache: prefills a prompt in chunks, then decodes tokens one by one. At the end the same tokens
//! run through a fresh request in one step. Every logit must be equal bit for bit: decoding with the cache gives the
//! same as recomputing from scratch.
//!
//! `cargo run --example decode -p dsv4-kv-model [DIR]`, on a GPU if there is one, else on the CPU. Without `DIR`, the
//! folder of a model, it uses the tiny model of the tests.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Result, ensure};
use dsv4_kv::device::{Backend, CudaOptions, Device, EmuDevice, EmuOptions};
use dsv4_kv::kv_layout::attention::KeyCluster;
use dsv4_kv_model::sample::GREEDY;
use dsv4_kv_model::{Chunk, Engine, EngineLimits, Logits, Model};
use dsv4_kv_model_files::ModelFiles;
use ndarray::{Array2, Axis, concatenate};

/// Tokens of the prompt, tokens of a prefill step, and tokens to decode: enough for the window to slide, and for the
/// first HCA entry to close while decoding.
const PROMPT: usize = 120;
const CHUNK: usize = 50;
const DECODED: usize = 12;

fn main() -> Result<()> {
    let tests = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/e2e/hash");
    let folder = std::env::args_os().nth(1).map_or_else(tests, PathBuf::from);
    let model = Arc::new(Model::load(&ModelFiles::open(&folder)?, |_| {})?);
    match dsv4_kv::open_cuda(CudaOptions::default()) {
        Ok(device) => run(&device, model),
        Err(error) => {
            eprintln!("note: running on the CPU, as there is no usable GPU: {error}");
            run(&EmuDevice::new(EmuOptions::default()), model)
        }
    }
}

fn run<B: Backend>(device: &Device<B>, model: Arc<Model>) -> Result<()> {
    let all = (PROMPT + DECODED) as u32;
    let limits = EngineLimits {
        requests: 2,
        context: all,
        max_total_tokens: 2 * all.next_multiple_of(128),
        max_step_tokens: all,
        max_draft: 0,
        checkpoints: 0,
        host_bytes: 0,
        event_capacity: 0,
        attention_cluster: KeyCluster::TwoBlocks,
    };
    let vocabulary = model.config.vocab_size as usize;
    let prompt = (0..PROMPT).map(|at| (at * at % vocabulary) as u32).collect();
    let mut engine = Engine::new(device, model, limits)?;
    let (tokens, served) = serve(&mut engine, prompt)?;

    let id = engine.admit()?;
    let tokens = &tokens[..PROMPT + DECODED];
    let recomputed =
        engine.forward(&[Chunk { id, tokens, logits: Logits::All }])?.logits(0).to_owned();
    println!("decoded tokens  {:?}", &tokens[PROMPT..]);
    compare(&served, &recomputed)
}

/// Prefills the prompt and decodes. Returns all tokens, and the logits after each but the last.
fn serve<B: Backend>(
    engine: &mut Engine<B>,
    mut tokens: Vec<u32>,
) -> Result<(Vec<u32>, Array2<f32>)> {
    let id = engine.admit()?;
    let (mut served, mut done) = (Vec::new(), 0);
    while done < PROMPT + DECODED {
        let chunk = &tokens[done..tokens.len().min(done + CHUNK)];
        // A step: the next tokens of some requests. If `forward` is dropped instead of committed, the step is rejected.
        let forward = engine.forward(&[Chunk { id, tokens: chunk, logits: Logits::All }])?;
        let logits = forward.logits(0).to_owned();
        forward.commit()?;
        done += chunk.len();
        if done == tokens.len() {
            let last = logits.row(logits.nrows() - 1);
            tokens.push(GREEDY.pick(last, done as u32).token);
        }
        served.push(logits);
    }
    engine.release(id)?;
    let parts: Vec<_> = served.iter().map(|logits| logits.view()).collect();
    Ok((tokens, concatenate(Axis(0), &parts)?))
}

/// Prints at how many positions all logits are equal bit for bit, and fails unless all positions are.
fn compare(served: &Array2<f32>, recomputed: &Array2<f32>) -> Result<()> {
    let equal = |positions: Range<usize>| {
        let bits = |logits: &Array2<f32>, at| logits.row(at).mapv(f32::to_bits);
        positions.filter(|&at| bits(served, at) == bits(recomputed, at)).count()
    };
    let (prompt, decoded) = (equal(0..PROMPT), equal(PROMPT..PROMPT + DECODED));
    println!("                positions    equal to recomputing");
    println!("prompt          {PROMPT:>9}    {prompt:>20}");
    println!("decode          {DECODED:>9}    {decoded:>20}");
    ensure!(prompt + decoded == PROMPT + DECODED, "the cache does not equal recomputing");
    Ok(())
}
