//! One-token decode in one launch a layer: the bytes of the separate kernels.

use dsv4_kv::device::{Backend, Buffer, Device, Stream, bf16};
use dsv4_kv::error::Refusal;
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::kv_layout::geometry::LayerKind;
use dsv4_kv::step::CompressorInputs;
use dsv4_kv::step_meta::Section;
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

/// Tokens of the longest step.
const STEP_TOKENS: usize = 160;

/// Projections for every compressor, more than any step needs, and weights.
struct Inputs<B: Backend> {
    window_kv: Buffer<B, bf16>,
    values: Buffer<B, f32>,
    weights: Buffer<B, f32>,
}

impl<B: Backend> Inputs<B> {
    fn new(stream: &Stream<B>, seed: u64) -> Self {
        Self::around(stream, seed, |_| 0.0)
    }

    /// Projections of which the `i`-th row of 512 numbers is around `centre(i)`.
    fn around(stream: &Stream<B>, seed: u64, centre: impl Fn(usize) -> f32) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let mut values = |count: usize, size: f32| -> Vec<f32> {
            (0..count).map(|_| random.random_range(-size..size)).collect()
        };
        let mut projections = values((STEP_TOKENS + 1) * 1024, 4.0);
        for (i, row) in projections.chunks_exact_mut(512).enumerate() {
            row.iter_mut().for_each(|value| *value += centre(i));
        }
        Self {
            window_kv: upload_bf16(stream, &rows(STEP_TOKENS, seed).concat()),
            values: upload(stream, &projections),
            weights: upload(stream, &values(128 * 512 + 512, 1.5)),
        }
    }

    /// A compressor's inputs of `columns`: overlapping cuts of the same random numbers.
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
        max_requests: 4,
        num_blocks: 12,
        max_context: 1024,
        max_step_tokens: STEP_TOKENS as u32,
        ..CacheConfig::smallest(ModelConfig::preset("tiny").unwrap())
    };
    KvCacheManager::new(device.clone(), config).unwrap()
}

/// Runs one step through every layer, by the separate kernels or, with one token a request, by the
/// decode kernels, and accepts all of it.
fn run_step<B: Backend>(
    manager: &mut KvCacheManager<B>,
    stream: &Stream<B>,
    inputs: &Inputs<B>,
    parts: &[StepRequest],
    fused: bool,
) {
    let config = manager.config();
    let bucket = Bucket {
        tokens: parts.iter().map(|part| part.tokens).sum(),
        tokens_per_request: if fused { 1 } else { STEP_TOKENS as u32 },
        requests: config.max_requests,
        context: config.max_context,
    };
    let all: Vec<_> = parts.iter().map(|part| Accepted::count(part.id, part.tokens)).collect();
    for mut step in begin_requests(manager, stream, parts, &Padding::Bucket(bucket)).unwrap() {
        run_layers(&mut step, inputs).unwrap();
        step.commit(&all).unwrap();
    }
    manager.check_faults(stream).unwrap();
}

fn run_layers<B: Backend>(layers: &mut Layers<'_, B>, inputs: &Inputs<B>) -> Result<(), KvError> {
    let [main, index, hca] = [(1024, 512), (256, 128), (512, 512)]
        .map(|(columns, channels)| inputs.projected(columns, channels));
    for (layer, kind) in layers.ids() {
        let compressors = match kind {
            LayerKind::Swa => vec![],
            LayerKind::Csa => vec![borrow(&main), borrow(&index)],
            LayerKind::Hca => vec![borrow(&hca)],
        };
        update(layers, layer, &inputs.window_kv, &compressors)?.append()?;
    }
    Ok(())
}

/// Every pool of every layer.
fn contents<B: Backend>(manager: &KvCacheManager<B>, stream: &Stream<B>) -> Vec<(String, Vec<u8>)> {
    let layers = (0..manager.schema().layers.len() as u32).map(LayerId);
    let of_layer = |layer| {
        let pools = manager.pools(layer).unwrap();
        pools.map(move |(kind, pool)| (format!("{layer:?} {kind:?}"), download(stream, &pool)))
    };
    layers.flat_map(of_layer).collect()
}

/// Requests that start at 0 to 3 tokens before a boundary of entries, windows and blocks, decoded
/// past it, in every combination of formats.
pub fn one_launch_equals_the_separate_kernels<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let formats = [
        (MainFormat::Ue8m0, IndexFormat::Mxfp4),
        (MainFormat::Ue8m0, IndexFormat::Nvfp4),
        (MainFormat::F32, IndexFormat::Fp8),
        (MainFormat::F32, IndexFormat::Mxfp4),
    ];
    for (main, index) in formats {
        let mut separate = manager(device, main, index);
        let mut fused = manager(device, main, index);
        let mut requests: Vec<([RequestId; 2], u32)> = Vec::new();
        for prompt in [1, 124, 127] {
            let inputs = Inputs::new(&stream, u64::from(prompt));
            let ids = [separate.admit().unwrap(), fused.admit().unwrap()];
            for (manager, id) in [&mut separate, &mut fused].into_iter().zip(ids) {
                let step = [StepRequest { id, start: 0, tokens: prompt }];
                run_step(manager, &stream, &inputs, &step, false);
            }
            requests.push((ids, prompt));
        }
        for round in 0..10 {
            let inputs = Inputs::new(&stream, 1000 + round);
            for (at, manager) in [&mut separate, &mut fused].into_iter().enumerate() {
                let part = |&(ids, start): &([RequestId; 2], u32)| StepRequest {
                    id: ids[at],
                    start,
                    tokens: 1,
                };
                let step: Vec<_> = requests.iter().map(part).collect();
                run_step(manager, &stream, &inputs, &step, at == 1);
            }
            requests.iter_mut().for_each(|(_, tokens)| *tokens += 1);
        }
        let (got, want) = (contents(&fused, &stream), contents(&separate, &stream));
        for ((name, got), (_, want)) in got.iter().zip(&want) {
            assert_same(got, want, &format!("{main:?} {index:?} {name}"));
        }
        assert!(want.iter().any(|(name, bytes)| {
            name.contains("EntryData") && bytes.iter().any(|&byte| byte != 0)
        }));
    }
}

/// More requests than an HCA layer has shares, so that blocks have several tokens: none or up to three of
/// which close a window. In the last steps some shares have a token less.
pub fn shares_of_several_tokens_equal_the_separate_kernels<B: Backend>(device: &Device<B>) {
    const REQUESTS: usize = 70;
    // Requests of the first two of 32 shares close a window with their first token.
    let prompt = |request: usize| if request % 32 < 2 { 127 } else { 2 };
    let stream = device.stream().unwrap();
    let model = ModelConfig {
        layers: vec![LayerKind::Hca],
        mtp_layers: 0,
        ..ModelConfig::preset("tiny").unwrap()
    };
    let config = CacheConfig {
        max_requests: REQUESTS as u32,
        num_blocks: REQUESTS as u32 + 16,
        max_context: 256,
        max_step_tokens: STEP_TOKENS as u32,
        ..CacheConfig::smallest(model)
    };
    // Of a share's windows the second has its largest scores in its last token alone, and all those of the
    // third are far below those of the first.
    let prompts = [0.0, -300.0, -300.0].map(|centre| Inputs::around(&stream, 11, |_| centre));
    let of_request = |row: usize| [0.0, 300.0, -300.0, 0.0][(row / 32).min(3)];
    let inputs = Inputs::around(&stream, 12, of_request);
    let [separate, shared] = [false, true].map(|one_launch| {
        let mut manager = KvCacheManager::new(device.clone(), config.clone()).unwrap();
        let ids: Vec<RequestId> = (0..REQUESTS).map(|_| manager.admit().unwrap()).collect();
        for (request, &id) in ids.iter().enumerate() {
            let tokens = prompt(request);
            let step = [StepRequest { id, start: 0, tokens }];
            run_step(&mut manager, &stream, &prompts[request / 32], &step, false);
        }
        for step in 0..3 {
            let part = |(request, &id): (usize, &RequestId)| StepRequest {
                id,
                start: prompt(request) + step,
                tokens: 1,
            };
            let last = REQUESTS - step as usize;
            let parts: Vec<StepRequest> = ids.iter().enumerate().take(last).map(part).collect();
            run_step(&mut manager, &stream, &inputs, &parts, one_launch);
        }
        contents(&manager, &stream)
    });
    for ((name, got), (_, want)) in shared.iter().zip(&separate) {
        assert_same(got, want, name);
    }
    assert!(separate.iter().any(|(name, bytes)| {
        name.contains("EntryData") && bytes.iter().any(|&byte| byte != 0)
    }));
}

/// A token that follows another of its request must not pass for decode: it is refused on the device,
/// in each of two layers.
pub fn a_second_token_of_a_request_is_refused<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let inputs = Inputs::new(&stream, 5);
    let kinds = [(LayerKind::Csa, "decode_csa_ue8m0_mxfp4"), (LayerKind::Hca, "decode_hca_ue8m0")];
    for (kind, refused_by) in kinds {
        let tiny = ModelConfig::preset("tiny").unwrap();
        let model = ModelConfig { layers: vec![kind; 2], mtp_layers: 0, ..tiny };
        let config =
            CacheConfig { max_requests: 2, max_step_tokens: 2, ..CacheConfig::smallest(model) };
        let mut manager = KvCacheManager::new(device.clone(), config).unwrap();
        let id = manager.admit().unwrap();
        let index = manager.ledger().layout().range(Section::Index).start as u64;
        let step_meta = manager.writable_step_meta(LayerGroup::Trunk).unwrap();
        let step = [StepRequest { id, start: 0, tokens: 1 }];
        let mut step = manager.begin_step(&stream, Launches::Eager, &step).unwrap();
        stream.upload(&[1], &step_meta, index).unwrap();
        run_layers(&mut step, &inputs).unwrap();
        step.commit(&[Accepted::count(id, 1)]).unwrap();
        let error = manager.check_faults(&stream).unwrap_err();
        let KvError::KernelRefused { refusals } = error else { panic!("{error}") };
        assert_eq!(refusals, [Refusal { kernel: refused_by, count: 2 }]);
    }
}
