//! A captured decode step of V4-Pro: 61 layers and the multi-token-prediction layer.

use dsv4_kv::device::{Backend, Device, Stream, View};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::step::Group;
use dsv4_kv::{
    Accepted, Bucket, CacheConfig, CapturedStep, Groups, KvCacheManager, KvError, LayerId, Layers,
    RequestId, StepRequest,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::fed::{Padding, begin_requests};
use crate::inputs::{assert_same, download};
use crate::step::gathered::Gathered;
use crate::step::tensors::Tensors;

/// Number of requests, of replays, and of replays between two comparisons of all bytes.
struct Size {
    bucket: u32,
    replays: u32,
    compare_every: u32,
}

/// Number of sets of inputs that steps use in turn; it does not divide a window or a block.
const INPUTS: usize = 7;
/// Maximum tokens of a request before the replays, fed in one step.
const PROMPT: u32 = 128;

/// A cache, and the inputs that attention gathers from it in a step.
struct Side<B: Backend> {
    manager: KvCacheManager<B>,
    out: Vec<Gathered<B>>,
}

impl<B: Backend> Side<B> {
    fn new(stream: &Stream<B>, size: &Size) -> Self {
        let most = PROMPT + size.replays;
        let config = CacheConfig {
            max_requests: size.bucket,
            num_blocks: size.bucket * most.div_ceil(128),
            max_context: most,
            max_step_tokens: PROMPT,
            ..CacheConfig::new(ModelConfig::preset("pro").unwrap())
        };
        let manager = KvCacheManager::new(stream.device().clone(), config).unwrap();
        let out = Gathered::of_layers(&manager, stream, size.bucket, most);
        // NaN marks every row that no kernel writes.
        for (layer, schema) in (0..).map(LayerId).zip(&manager.schema().layers) {
            for pool in &schema.pools {
                stream.fill(&manager.writable_pool(layer, pool.kind).unwrap(), 0xFF).unwrap();
            }
        }
        Self { manager, out }
    }

    fn pools(&self) -> Vec<(String, View<B, u8>)> {
        let of_layer = |layer| {
            let pools = self.manager.pools(layer).unwrap();
            pools.map(move |(kind, pool)| (format!("{layer:?} {kind:?}"), pool))
        };
        (0..self.out.len() as u32).map(LayerId).flat_map(of_layer).collect()
    }

    /// Updates by the separate kernels, for exactly the step's tokens, and gathers.
    fn eager(
        &mut self,
        stream: &Stream<B>,
        tensors: &Tensors<B>,
        parts: &[StepRequest],
        gather: bool,
    ) {
        let config = self.manager.config();
        let tokens = parts.iter().map(|part| part.tokens).sum();
        let (requests, context) = (config.max_requests, config.max_context);
        let bucket = Bucket { tokens, tokens_per_request: PROMPT, requests, context };
        let Self { manager, out } = self;
        for mut step in begin_requests(manager, stream, parts, &Padding::Bucket(bucket)).unwrap() {
            run_layers(&mut step, tensors, out, gather).unwrap();
            step.commit(&all(parts)).unwrap();
        }
    }

    /// Captures fused updates and gathers of both layer groups.
    fn capture(
        &mut self,
        stream: &Stream<B>,
        tensors: &Tensors<B>,
        bucket: &Bucket,
    ) -> Vec<CapturedStep<B>> {
        let Self { manager, out } = self;
        let mut retained = tensors.memory();
        retained.extend(out.iter().flat_map(Gathered::memory));
        let Groups { trunk, draft } = manager.groups();
        let groups = std::iter::once(trunk).chain(draft);
        let capture = |mut group: Group<'_, B>| {
            let record = |layers: &mut Layers<'_, B>| run_layers(layers, tensors, out, true);
            group.capture(stream, bucket, retained.clone(), record).unwrap()
        };
        groups.map(capture).collect()
    }

    fn replay(
        &mut self,
        stream: &Stream<B>,
        parts: &[StepRequest],
        bucket: Bucket,
        graphs: &[CapturedStep<B>],
    ) {
        let padding = Padding::Bucket(bucket);
        let steps = begin_requests(&mut self.manager, stream, parts, &padding).unwrap();
        for (mut step, graph) in steps.into_iter().zip(graphs) {
            step.replay(graph).unwrap();
            step.commit(&all(parts)).unwrap();
        }
    }
}

fn all(parts: &[StepRequest]) -> Vec<Accepted<'static>> {
    parts.iter().map(|part| Accepted::count(part.id, part.tokens)).collect()
}

fn run_layers<B: Backend>(
    layers: &mut Layers<'_, B>,
    tensors: &Tensors<B>,
    out: &[Gathered<B>],
    gather: bool,
) -> Result<(), KvError> {
    let tokens = layers.tokens();
    for (layer, kind) in layers.layer_kinds() {
        let updated = tensors.update(layers, layer, kind)?;
        if gather {
            out[layer.0 as usize].gather(&updated, tokens)?;
        }
        updated.append()?;
    }
    Ok(())
}

/// Replays of a captured decode step, fused and padded to its bucket, leave the same bytes in every pool and every
/// gathered tile as eager launches of the separate kernels without padding, while requests cross the ends of entries,
/// windows and blocks.
pub fn replays_equal_eager_steps<B: Backend>(device: &Device<B>) {
    // The emulator takes a tenth of a second for a step.
    let size = match device.info().sm {
        Some(_) => Size { bucket: 32, replays: 1000, compare_every: 50 },
        None => Size { bucket: 4, replays: 16, compare_every: 4 },
    };
    let stream = device.stream().unwrap();
    let layers = ModelConfig::preset("pro").unwrap().layers.len();
    let tensors = |seed| Tensors::random(&stream, PROMPT as usize, layers, seed);
    let (now, inputs): (_, Vec<_>) = (tensors(0), (1..=INPUTS as u64).map(tensors).collect());
    let mut sides = [(); 2].map(|()| Side::new(&stream, &size));
    let mut requests = prompts(&stream, &mut sides, &now, &size);
    let bucket = Bucket::decode(sides[1].manager.config(), size.bucket);
    let graphs = sides[1].capture(&stream, &now, &bucket);
    let mut random = StdRng::seed_from_u64(1);
    for replay in 0..size.replays {
        let batch = random.random_range(1..=size.bucket);
        requests.rotate_left(3);
        let mut parts = [Vec::new(), Vec::new()];
        for (ids, start) in &mut requests[..batch as usize] {
            for (parts, id) in parts.iter_mut().zip(*ids) {
                parts.push(StepRequest { id, start: *start, tokens: 1 });
            }
            *start += 1;
        }
        now.copy_rows(&stream, &inputs[replay as usize % INPUTS]);
        let positions: Vec<usize> = parts[0].iter().map(|part| part.start as usize).collect();
        for side in &sides {
            side.out.iter().for_each(|out| out.reset(&stream, &positions));
        }
        let [eager, captured] = &mut sides;
        eager.eager(&stream, &now, &parts[0], true);
        captured.replay(&stream, &parts[1], bucket, &graphs);
        if (replay + 1) % size.compare_every == 0 {
            compare(&stream, &sides, &format!("replay {replay}, positions {positions:?}"));
        }
    }
    sides.iter().for_each(|side| side.manager.check_faults(&stream).unwrap());
}

/// Admits a request for each row of the bucket in both caches, and feeds it up to 128 tokens.
fn prompts<B: Backend>(
    stream: &Stream<B>,
    sides: &mut [Side<B>; 2],
    tensors: &Tensors<B>,
    size: &Size,
) -> Vec<([RequestId; 2], u32)> {
    let mut requests = Vec::new();
    for tokens in PROMPT - size.bucket..PROMPT {
        let ids = sides.each_mut().map(|side| {
            let id = side.manager.admit().unwrap();
            side.eager(stream, tensors, &[StepRequest { id, start: 0, tokens }], false);
            id
        });
        requests.push((ids, tokens));
    }
    requests
}

fn compare<B: Backend>(stream: &Stream<B>, sides: &[Side<B>; 2], what: &str) {
    let [eager, captured] = sides;
    for ((name, want), (_, got)) in eager.pools().iter().zip(captured.pools()) {
        let (want, got) = (download(stream, want), download(stream, &got));
        assert_same(&got, &want, &format!("{name}, {what}"));
    }
    for (layer, (want, got)) in eager.out.iter().zip(&captured.out).enumerate() {
        let what = format!("gathers of layer {layer}, {what}");
        assert_same(&got.bytes(stream), &want.bytes(stream), &what);
    }
}
