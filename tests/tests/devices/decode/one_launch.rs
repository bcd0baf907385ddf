//! One-token decode in one launch a layer: the bytes of the separate kernels.

use dsv4_kv::device::{Backend, Buffer, Device, Stream};
use dsv4_kv::handle::Projected;
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::kv_layout::geometry::LayerKind;
use dsv4_kv::schema::PoolKind;
use dsv4_kv::{CacheConfig, KvCacheManager, KvError, LayerId, RequestId, StepRequest};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::inputs::{assert_same, download, rows, upload};

/// Tokens of the longest step.
const STEP_TOKENS: usize = 160;

/// Projections for every compressor, more than any step needs, and weights.
struct Inputs<B: Backend> {
    window_kv: Buffer<B, u16>,
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
            window_kv: upload(stream, &rows(STEP_TOKENS, seed).concat()),
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

fn borrow<B: Backend>([kv, gate, ape, norm]: &[Buffer<B, f32>; 4]) -> Projected<'_, B> {
    Projected { kv, gate, ape, norm }
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

/// Runs one step through every layer, by the separate kernels or by the decode kernels.
fn run_step<B: Backend>(
    manager: &KvCacheManager<B>,
    stream: &Stream<B>,
    inputs: &Inputs<B>,
    fused: bool,
) -> Result<(), KvError> {
    let [main, index, hca] = [(1024, 512), (256, 128), (512, 512)]
        .map(|(columns, channels)| inputs.projected(columns, channels));
    if !fused {
        manager.build_plan(stream)?;
    }
    for layer in 0..manager.schema().layers.len() {
        let handle = manager.layer(LayerId(layer as u32))?;
        let kv = &inputs.window_kv;
        match (handle.schema().kind, fused) {
            (LayerKind::Swa, _) => handle.append_swa(stream, kv)?,
            (LayerKind::Csa, true) => {
                handle.decode_csa(stream, kv, &borrow(&main), &borrow(&index))?;
            }
            (LayerKind::Hca, true) => handle.decode_hca(stream, kv, &borrow(&hca))?,
            (LayerKind::Csa, false) => {
                handle.append_swa(stream, kv)?;
                handle.update_csa(stream, &borrow(&main), &borrow(&index))?;
            }
            (LayerKind::Hca, false) => {
                handle.append_swa(stream, kv)?;
                handle.update_hca(stream, &borrow(&hca))?;
            }
        }
    }
    Ok(())
}

/// Every pool of every layer.
fn contents<B: Backend>(manager: &KvCacheManager<B>, stream: &Stream<B>) -> Vec<(String, Vec<u8>)> {
    let mut all = Vec::new();
    for layer in 0..manager.schema().layers.len() {
        let handle = manager.layer(LayerId(layer as u32)).unwrap();
        let mut take = |what: &str, buffer: &Buffer<B, u8>| {
            let bytes = download(stream, buffer);
            all.push((format!("layer {layer} {what}"), bytes));
        };
        take("window data", handle.swa().data);
        take("window scale", handle.swa().scale);
        if let Ok(entries) = handle.entries() {
            take("entry data", entries.data);
            take("entry scale", entries.scale);
        }
        if let Ok(keys) = handle.index_keys() {
            take("key code", keys.code);
            take("key scale", keys.scale);
        }
        for pool in [PoolKind::MainState, PoolKind::IndexState] {
            if let Ok(state) = handle.state(pool) {
                take("state", &state.rows.cast().unwrap());
            }
        }
    }
    all
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
        let mut requests: Vec<(RequestId, u32)> = Vec::new();
        for prompt in [1, 124, 127] {
            let inputs = Inputs::new(&stream, u64::from(prompt));
            let id = separate.admit().unwrap();
            assert_eq!(fused.admit().unwrap(), id);
            for manager in [&mut separate, &mut fused] {
                let step = [StepRequest { id, start: 0, tokens: prompt }];
                manager.prepare_forward(&stream, &step).unwrap();
                run_step(manager, &stream, &inputs, false).unwrap();
                manager.commit(id, prompt).unwrap();
            }
            requests.push((id, prompt));
        }
        for round in 0..10 {
            let inputs = Inputs::new(&stream, 1000 + round);
            let step: Vec<StepRequest> =
                requests.iter().map(|&(id, start)| StepRequest { id, start, tokens: 1 }).collect();
            for (manager, one_launch) in [(&mut separate, false), (&mut fused, true)] {
                manager.prepare_forward(&stream, &step).unwrap();
                run_step(manager, &stream, &inputs, one_launch).unwrap();
                step.iter().for_each(|part| manager.commit(part.id, 1).unwrap());
                manager.check_faults(&stream).unwrap();
            }
            requests.iter_mut().for_each(|(_, tokens)| *tokens += 1);
        }
        let (got, want) = (contents(&fused, &stream), contents(&separate, &stream));
        for ((name, got), (_, want)) in got.iter().zip(&want) {
            assert_same(got, want, &format!("{main:?} {index:?} {name}"));
        }
        assert!(want.iter().any(|(name, bytes)| {
            name.contains("entry data") && bytes.iter().any(|&byte| byte != 0)
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
    let model =
        ModelConfig { layers: vec![LayerKind::Hca], ..ModelConfig::preset("tiny").unwrap() };
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
            manager.prepare_forward(&stream, &[StepRequest { id, start: 0, tokens }]).unwrap();
            run_step(&manager, &stream, &prompts[request / 32], false).unwrap();
            manager.commit(id, tokens).unwrap();
        }
        for step in 0..3 {
            let part = |(request, &id): (usize, &RequestId)| StepRequest {
                id,
                start: prompt(request) + step,
                tokens: 1,
            };
            let last = REQUESTS - step as usize;
            let parts: Vec<StepRequest> = ids.iter().enumerate().take(last).map(part).collect();
            manager.prepare_forward(&stream, &parts).unwrap();
            run_step(&manager, &stream, &inputs, one_launch).unwrap();
            parts.iter().for_each(|part| manager.commit(part.id, 1).unwrap());
            manager.check_faults(&stream).unwrap();
        }
        contents(&manager, &stream)
    });
    for ((name, got), (_, want)) in shared.iter().zip(&separate) {
        assert_same(got, want, name);
    }
    assert!(separate.iter().any(|(name, bytes)| {
        name.contains("entry data") && bytes.iter().any(|&byte| byte != 0)
    }));
}

/// A step with two tokens of a request must not pass for decode: it is refused on the device, in each of
/// two layers.
pub fn a_request_with_two_tokens_is_refused<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let inputs = Inputs::new(&stream, 5);
    let kinds = [(LayerKind::Csa, "decode_csa_ue8m0_mxfp4"), (LayerKind::Hca, "decode_hca_ue8m0")];
    for (kind, refused_by) in kinds {
        let model = ModelConfig { layers: vec![kind; 2], ..ModelConfig::preset("tiny").unwrap() };
        let config =
            CacheConfig { max_requests: 2, max_step_tokens: 2, ..CacheConfig::smallest(model) };
        let mut manager = KvCacheManager::new(device.clone(), config).unwrap();
        let id = manager.admit().unwrap();
        manager.prepare_forward(&stream, &[StepRequest { id, start: 0, tokens: 2 }]).unwrap();
        run_step(&manager, &stream, &inputs, true).unwrap();
        let error = manager.check_faults(&stream).unwrap_err();
        let KvError::KernelRefused { kernel, count } = error else { panic!("{error}") };
        assert_eq!((kernel, count), (refused_by, 2));
    }
}
