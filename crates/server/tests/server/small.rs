//! A small model, and its answers when no other request runs.

use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use dsv4_kv::kv_layout::attention::KeyCluster;
use dsv4_kv_device::{Backend, Device, EmuDevice, EmuOptions, Emulator};
use dsv4_kv_model::generate::Observer;
use dsv4_kv_model::sample::{GREEDY, Sampling};
use dsv4_kv_model::sequence::{Continuation, Finish, Generated};
use dsv4_kv_model::{Engine, EngineLimits, Model};
use dsv4_kv_model_files::ModelFiles;
use dsv4_kv_server::queue::Submission;
use dsv4_kv_tests::failing::Failing;

/// Most drafts of a step.
pub const DRAFTS: u32 = 2;

pub static HASH: LazyLock<Arc<Model>> = LazyLock::new(|| load("hash"));
pub static SCORED: LazyLock<Arc<Model>> = LazyLock::new(|| load("scored"));

pub fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/e2e").join(name)
}

fn load(name: &str) -> Arc<Model> {
    let model_files = ModelFiles::open(&folder(name)).expect("a committed checkpoint");
    Arc::new(Model::load(&model_files, |_| ()).expect("a complete checkpoint"))
}

pub fn emulated() -> EmuDevice {
    EmuDevice::new(EmuOptions { memory: 2 << 30, seed: 1 })
}

/// An emulated device that runs no kernel, for tests of what is decided, not of what is computed.
pub fn without_kernels() -> Device<Failing<Emulator>> {
    let device = Failing::emulated(EmuOptions { memory: 2 << 30, seed: 1 });
    device.backend().skip_launches(true);
    device
}

/// Limits of an engine with `requests` slots and `blocks` blocks of 128 tokens.
pub fn limits(requests: u32, blocks: u32) -> EngineLimits {
    EngineLimits {
        requests,
        context: 1024,
        max_total_tokens: 128 * blocks,
        max_step_tokens: 48,
        max_draft: DRAFTS,
        checkpoints: 0,
        host_bytes: 0,
        event_capacity: 0,
        attention_cluster: KeyCluster::TwoBlocks,
    }
}

pub fn engine<B: Backend>(
    device: &Device<B>,
    model: &Arc<Model>,
    limits: EngineLimits,
) -> Engine<B> {
    Engine::new(device, Arc::clone(model), limits).expect("an engine")
}

pub fn continuation(max_tokens: usize) -> Continuation {
    Continuation {
        sampling: GREEDY,
        max_tokens,
        end: Vec::new(),
        drafts: 0,
        top_logprobs: 2,
        prompt_logits: false,
    }
}

/// A prompt of `shared` tokens that are always the same, and `count` times the token `last`. All have the same
/// salt, which is not empty: shares counted under no salt would be seen.
pub fn sharing(shared: u32, (last, count): (u32, usize), max_tokens: usize) -> Submission {
    let shared = (0..shared).map(|at| at * at % 251);
    let prompt = shared.chain(std::iter::repeat_n(last, count)).collect();
    Submission { prompt, continuation: continuation(max_tokens), salt: b"a".to_vec() }
}

pub fn sampled(seed: u64, max_tokens: usize) -> Continuation {
    let sampling = Sampling { temperature: 1.0, top_p: 0.9, seed };
    Continuation { sampling, ..continuation(max_tokens) }
}

/// Collects all tokens of an answer.
struct Collected(Vec<Generated>);

impl Observer for Collected {
    fn token(&mut self, token: &Generated) -> bool {
        self.0.push(token.clone());
        true
    }
}

/// The answer of the model when no other request runs.
pub fn alone<B: Backend>(
    engine: &mut Engine<B>,
    Submission { prompt, continuation, .. }: &Submission,
) -> (Vec<Generated>, Finish) {
    let mut tokens = Collected(Vec::new());
    let summary = engine.generate(prompt, continuation.clone(), 48, &mut tokens);
    (tokens.0, summary.expect("an answer").finish.expect("an end"))
}
