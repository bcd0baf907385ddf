//! Decode with one launch per layer, drafts included: it writes the bytes of the separate kernels.

use dsv4_kv::device::{Backend, Buffer, Device, Stream, bf16};
use dsv4_kv::error::Refusal;
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::kv_layout::geometry::LayerKind;
use dsv4_kv::step::CompressorInputs;
use dsv4_kv::step_meta::{Section, StepLayout};
use dsv4_kv::{
    Accepted, Bucket, CacheConfig, KvCacheManager, KvError, Launches, LayerGroup, LayerId, Layers,
    RequestId, StepRequest,
};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::fed::{Padding, begin_requests, update};
use crate::inputs::{assert_same, download, rows, upload, upload_bf16};

/// Maximum tokens of a step.
const STEP_TOKENS: usize = 160;
/// Maximum drafts of a request.
const DRAFTS: u32 = 4;

/// Weights, and projections for every compressor: more than any step needs.
struct Inputs<B: Backend> {
    window_kv: Buffer<B, bf16>,
    values: Buffer<B, f32>,
    weights: Buffer<B, f32>,
}

impl<B: Backend> Inputs<B> {
    fn new(stream: &Stream<B>, seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let mut values = |count: usize, size: f32| -> Vec<f32> {
            (0..count).map(|_| random.random_range(-size..size)).collect()
        };
        let projections = values((STEP_TOKENS + 1) * 1024, 4.0);
        Self {
            window_kv: upload_bf16(stream, &rows(STEP_TOKENS, seed).concat()),
            values: upload(stream, &projections),
            weights: upload(stream, &values(128 * 512 + 512, 1.5)),
        }
    }

    /// The inputs of a compressor with `columns` columns: overlapping slices of the same random numbers.
    fn projected(&self, columns: u64, channels: u64) -> [Buffer<B, f32>; 4] {
        let all = STEP_TOKENS as u64 * columns;
        [
            self.values.slice(0, all).unwrap(),
            self.values.slice(1024, all).unwrap(),
            self.weights.slice(512, 65536).unwrap(),
            self.weights.slice(0, channels).unwrap(),
        ]
    }
}

fn borrow<B: Backend>([kv, gate, ape, norm]: &[Buffer<B, f32>; 4]) -> CompressorInputs<'_, B> {
    CompressorInputs { kv, gate, ape, norm }
}

fn manager<B: Backend>(
    device: &Device<B>,
    main: MainFormat,
    index: IndexFormat,
) -> KvCacheManager<B> {
    let config = CacheConfig {
        main_format: main,
        index_format: index,
        max_draft: DRAFTS,
        max_requests: 4,
        num_blocks: 16,
        max_context: 1024,
        max_step_tokens: STEP_TOKENS as u32,
        ..CacheConfig::new(ModelConfig::preset("tiny").unwrap())
    };
    KvCacheManager::new(device.clone(), config).unwrap()
}

/// A request in a step: its number of tokens before, its tokens in the step, and how many of these are accepted.
#[derive(Clone, Copy)]
struct Verified {
    id: RequestId,
    start: u32,
    tokens: u32,
    accepted: u32,
}

/// Runs one step through every layer: by the decode kernels if `fused`, which need few tokens per request, else by the
/// separate kernels.
fn run_step<B: Backend>(
    manager: &mut KvCacheManager<B>,
    stream: &Stream<B>,
    inputs: &Inputs<B>,
    verified: &[Verified],
    fused: bool,
) {
    let config = manager.config();
    let bucket = Bucket {
        tokens: verified.iter().map(|part| part.tokens).sum(),
        tokens_per_request: if fused { DRAFTS + 1 } else { STEP_TOKENS as u32 },
        requests: config.max_requests,
        context: config.max_context,
    };
    let part = |&Verified { id, start, tokens, .. }: &_| StepRequest { id, start, tokens };
    let parts: Vec<_> = verified.iter().map(part).collect();
    let all: Vec<_> = verified.iter().map(|of| Accepted::count(of.id, of.accepted)).collect();
    for mut step in begin_requests(manager, stream, &parts, &Padding::Bucket(bucket)).unwrap() {
        run_layers(&mut step, inputs).unwrap();
        step.commit(&all).unwrap();
    }
    manager.check_faults(stream).unwrap();
}

fn run_layers<B: Backend>(layers: &mut Layers<'_, B>, inputs: &Inputs<B>) -> Result<(), KvError> {
    let [main, index, hca] = [(1024, 512), (256, 128), (512, 512)]
        .map(|(columns, channels)| inputs.projected(columns, channels));
    for (layer, kind) in layers.layer_kinds() {
        let compressors = match kind {
            LayerKind::Swa => vec![],
            LayerKind::Csa => vec![borrow(&main), borrow(&index)],
            LayerKind::Hca => vec![borrow(&hca)],
        };
        update(layers, layer, &inputs.window_kv, &compressors)?.append()?;
    }
    Ok(())
}

/// All pools of all layers, with their names.
fn contents<B: Backend>(manager: &KvCacheManager<B>, stream: &Stream<B>) -> Vec<(String, Vec<u8>)> {
    let layers = (0..manager.schema().layers.len() as u32).map(LayerId);
    let of_layer = |layer| {
        let pools = manager.pools(layer).unwrap();
        pools.map(move |(kind, pool)| (format!("{layer:?} {kind:?}"), download(stream, &pool)))
    };
    layers.flat_map(of_layer).collect()
}

/// The pools of two caches after the same prompts and `rounds`. The first is decoded by the separate kernels, the
/// second with one launch per layer. A round gives the tokens of each request, and how many are accepted.
fn both<B: Backend>(
    stream: &Stream<B>,
    config: &CacheConfig,
    prompts: &[u32],
    rounds: &[Vec<(u32, u32)>],
) -> [Vec<(String, Vec<u8>)>; 2] {
    [false, true].map(|fused| {
        let mut manager = KvCacheManager::new(stream.device().clone(), config.clone()).unwrap();
        let admit = |_: &u32| manager.admit().unwrap();
        let ids: Vec<RequestId> = prompts.iter().map(admit).collect();
        let mut starts = prompts.to_vec();
        for (at, (&id, &prompt)) in ids.iter().zip(prompts).enumerate() {
            let inputs = Inputs::new(stream, at as u64);
            let whole = Verified { id, start: 0, tokens: prompt, accepted: prompt };
            run_step(&mut manager, stream, &inputs, &[whole], false);
        }
        for (round, tokens) in (1000..).zip(rounds) {
            let inputs = Inputs::new(stream, round);
            let parts = ids.iter().zip(&starts).zip(tokens);
            let part = |((&id, &start), &(tokens, accepted)): ((&RequestId, &u32), &(u32, u32))| {
                Verified { id, start, tokens, accepted }
            };
            let step: Vec<_> = parts.map(part).filter(|part| part.tokens > 0).collect();
            run_step(&mut manager, stream, &inputs, &step, fused);
            starts.iter_mut().zip(tokens).for_each(|(start, (_, accepted))| *start += accepted);
        }
        contents(&manager, stream)
    })
}

fn assert_same_pools([want, got]: &[Vec<(String, Vec<u8>)>; 2], what: &str) {
    for ((name, got), (_, want)) in got.iter().zip(want) {
        assert_same(got, want, &format!("{what} {name}"));
    }
    let is_written = |(name, bytes): &(String, Vec<u8>)| {
        name.contains("EntryData") && bytes.iter().any(|&byte| byte != 0)
    };
    assert!(want.iter().any(is_written), "{what}: no entry");
}

/// Requests that start 0 to 3 tokens before the end of a CSA window, some of them shortly before the end of a block.
/// They are decoded token by token, and with drafts some of which are rejected, in every combination of formats.
pub fn one_launch_equals_the_separate_kernels<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let formats =
        MainFormat::ALL.into_iter().flat_map(|main| IndexFormat::ALL.map(|index| (main, index)));
    let mut random = StdRng::seed_from_u64(7);
    for (main, index) in formats {
        let config = manager(device, main, index).config().clone();
        let mut round = |most: u32| {
            let mut tokens = |_| random.random_range(1..=most);
            let tokens: Vec<u32> = (0..3).map(&mut tokens).collect();
            tokens.into_iter().map(|n| (n, random.random_range(1..=n))).collect::<Vec<_>>()
        };
        let alone = (0..6).map(|_| vec![(1, 1); 3]);
        let rounds: Vec<_> = alone.chain((0..8).map(|_| round(DRAFTS + 1))).collect();
        let pools = both(&stream, &config, &[1, 124, 127], &rounds);
        assert_same_pools(&pools, &format!("{main:?} {index:?}"));
    }
}

/// Every number of drafts, at every distance from the end of a window: one window that closes inside the step or at its
/// end, or two windows.
pub fn drafts_across_every_boundary<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let tiny = manager(device, MainFormat::Ue8m0, IndexFormat::Mxfp4).config().clone();
    let model = ModelConfig {
        layers: vec![LayerKind::Csa, LayerKind::Hca],
        mtp_layers: 0,
        ..ModelConfig::preset("tiny").unwrap()
    };
    let config = CacheConfig { max_requests: 7, num_blocks: 16, model, ..tiny };
    for tokens in 2..=DRAFTS + 1 {
        let prompts: Vec<u32> = (122..129).collect();
        for accepted in [0, tokens / 2, tokens] {
            let rounds = [vec![(tokens, accepted); 7], vec![(DRAFTS + 1, 1); 7]];
            let pools = both(&stream, &config, &prompts, &rounds);
            assert_same_pools(&pools, &format!("{accepted} of {tokens} accepted"));
        }
    }
}

/// A token whose StepMeta says that more tokens of its request precede it than the rings can lose must not pass for
/// decode. The kernel refuses it, in each of two layers.
pub fn a_second_token_of_a_request_is_refused<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let inputs = Inputs::new(&stream, 5);
    let kinds = [(LayerKind::Csa, "decode_csa_ue8m0_mxfp4"), (LayerKind::Hca, "decode_hca_ue8m0")];
    for (kind, refused_by) in kinds {
        let tiny = ModelConfig::preset("tiny").unwrap();
        let model = ModelConfig { layers: vec![kind; 2], mtp_layers: 0, ..tiny };
        let config = CacheConfig { max_requests: 2, max_step_tokens: 2, ..CacheConfig::new(model) };
        let mut manager = KvCacheManager::new(device.clone(), config).unwrap();
        let id = manager.admit().unwrap();
        let index = StepLayout::new(1, 0).range(Section::Index).start as u64;
        let step_meta = manager.writable_step_meta(LayerGroup::Trunk).unwrap();
        let step = [StepRequest { id, start: 0, tokens: 1 }];
        let mut step = manager.begin_step(&stream, Launches::Eager, &step).unwrap();
        stream.upload(&[1], &step_meta, index).unwrap();
        run_layers(&mut step, &inputs).unwrap();
        step.commit(&[Accepted::count(id, 1)]).unwrap();
        let error = manager.check_faults(&stream).unwrap_err();
        let KvError::KernelRefused { refusals } = error else { panic!("{error}") };
        assert_eq!(refusals, [Refusal { kernel: refused_by, count: 2, writes: true }]);
    }
}
