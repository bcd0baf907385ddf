//! A server in small: a prompt is prefilled in chunks, then tokens are decoded one by one. At the end
//! the same tokens go through a fresh cache in a single step, and every output of the model must be
//! the same to the last bit: decoding with the cache is recomputing from scratch.
//!
//! `cargo run --example embed -p dsv4-kv`, on a GPU if there is one, else on the CPU.
//!
//! | file | what it shows |
//! |---|---|
//! | `main.rs` | the loop over steps, and the comparison |
//! | `server.rs` | a step: what is asked of the cache, and in which order |
//! | `tiles.rs` | what attention reads |
//! | `model.rs` | the model: random weights in plain Rust. Yours is on the device |

mod model;
mod server;
mod tiles;

use std::ops::Range;

use anyhow::{Result, ensure};
use dsv4_kv::device::{Backend, CudaOptions, Device, EmuDevice, EmuOptions};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::kv_layout::geometry::LayerKind;

use model::{Model, Vectors};
use server::Server;

/// Tokens of the prompt, of a step that prefills it, and to decode: enough for the window to slide,
/// and for the second HCA entry to close while decoding.
const PROMPT: usize = 250;
const CHUNK: usize = 100;
const DECODED: usize = 16;

fn main() -> Result<()> {
    match dsv4_kv::open_cuda(CudaOptions::default()) {
        Ok(device) => run(&device),
        Err(error) => {
            eprintln!("note: running on the CPU, as there is no usable GPU: {error}");
            run(&EmuDevice::new(EmuOptions::default()))
        }
    }
}

fn run<B: Backend>(device: &Device<B>) -> Result<()> {
    // Without draft layers, so that a step is one of all layers.
    let layers = vec![LayerKind::Swa, LayerKind::Csa, LayerKind::Hca, LayerKind::Csa];
    let tiny = ModelConfig::preset("tiny").expect("a preset");
    let config = ModelConfig { layers, mtp_layers: 0, ..tiny };
    let model = Model::random(&config.layers, 1);
    let mut tokens: Vec<usize> = (0..PROMPT).map(|at| at * at % model::VOCABULARY).collect();

    let mut server = Server::new(device, &config, &model)?;
    let mut served = Vectors::new();
    for chunk in tokens.chunks(CHUNK) {
        served.extend(server.step(chunk)?);
    }
    for _ in 0..DECODED {
        let next = model.next_token(&served[served.len() - 1]);
        tokens.push(next);
        served.extend(server.step(&[next])?);
    }
    server.finish()?;

    let mut fresh = Server::new(device, &config, &model)?;
    let recomputed = fresh.step(&tokens)?;
    fresh.finish()?;

    println!("decoded tokens  {:?}", &tokens[PROMPT..]);
    compare(&served, &recomputed)
}

/// Prints how many outputs are equal, bit for bit, and fails unless all are.
fn compare(served: &Vectors, recomputed: &Vectors) -> Result<()> {
    let bits = |output: &[f32]| output.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    let equal = |positions: Range<usize>| {
        positions.filter(|&at| bits(&served[at]) == bits(&recomputed[at])).count()
    };
    let (prompt, decoded) = (equal(0..PROMPT), equal(PROMPT..PROMPT + DECODED));
    println!("                positions    equal to recomputing");
    println!("prompt          {PROMPT:>9}    {prompt:>20}");
    println!("decode          {DECODED:>9}    {decoded:>20}");
    ensure!(served.iter().flatten().all(|value| value.is_finite()), "an output is not a number");
    ensure!(prompt + decoded == recomputed.len(), "the cache does not equal recomputing");
    Ok(())
}
