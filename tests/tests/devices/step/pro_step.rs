//! A captured decode step of V4-Pro: 61 layers and the multi-token-prediction layer.

use dsv4_kv::device::{Backend, Buffer, Device, Stream};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::{
    CacheConfig, CapturedStep, KvCacheManager, KvError, LayerId, RequestId, StepRequest,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::inputs::{assert_same, download};
use crate::step::gathered::Gathered;
use crate::step::tensors::Tensors;
use crate::stories::pools_of;

/// Requests, replays, and replays between two comparisons of all bytes.
struct Size {
    bucket: u32,
    replays: u32,
    compare_every: u32,
}

/// Sets of inputs that steps use in turn; no divisor of a window or a block.
const INPUTS: usize = 7;
/// Most tokens of a request before the replays, fed in one step.
const PROMPT: u32 = 128;

/// A cache, and what attention reads of it in a step.
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
            ..CacheConfig::smallest(ModelConfig::preset("pro").unwrap())
        };
        let manager = KvCacheManager::new(stream.device().clone(), config).unwrap();
        let out = Gathered::of_layers(&manager, stream, size.bucket, most);
        let side = Self { manager, out };
        side.pools().iter().for_each(|(_, pool)| stream.fill(pool, 0xFF).unwrap());
        side
    }

    fn layers(&self) -> impl Iterator<Item = LayerId> + use<B> {
        (0..self.out.len() as u32).map(LayerId)
    }

    fn pools(&self) -> Vec<(String, Buffer<B, u8>)> {
        let of_layer = |layer| {
            let pools = pools_of(&self.manager.layer(layer).unwrap());
            pools.into_iter().map(move |(kind, pool)| (format!("{layer:?} {kind:?}"), pool))
        };
        self.layers().flat_map(of_layer).collect()
    }

    fn gather(&self, stream: &Stream<B>, tensors: &Tensors<B>, bucket: u32) -> Result<(), KvError> {
        let mut layers = self.layers().zip(&self.out);
        layers.try_for_each(|(layer, out)| {
            out.gather(&self.manager, stream, layer, bucket, &tensors.kv_of(layer))
        })
    }

    /// Work lists, updates and gathers by the separate kernels, for exactly the step's tokens.
    fn eager(&self, stream: &Stream<B>, tensors: &Tensors<B>, tokens: u32) {
        self.manager.build_plan_for(stream, tokens).unwrap();
        for layer in self.layers() {
            tensors.update(&self.manager, stream, layer, tokens, false).unwrap();
        }
    }

    fn capture(&self, stream: &Stream<B>, tensors: &Tensors<B>, bucket: u32) -> CapturedStep<B> {
        let mut retained = tensors.memory();
        retained.extend(self.out.iter().flat_map(Gathered::memory));
        let record = |manager: &KvCacheManager<B>| {
            for layer in self.layers() {
                tensors.update(manager, stream, layer, bucket, true)?;
            }
            self.gather(stream, tensors, bucket)
        };
        self.manager.capture(stream, bucket, retained, record).unwrap()
    }

    fn commit(&mut self, step: &[StepRequest]) {
        step.iter().for_each(|part| self.manager.commit(part.id, part.tokens).unwrap());
    }
}

/// Replays of a captured decode step, fused and padded to its bucket, leave in every pool and every
/// gathered tile the bytes of eager launches of the separate kernels without padding, while requests
/// cross the ends of entries, windows and blocks.
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
    let graph = sides[1].capture(&stream, &now, size.bucket);
    let mut random = StdRng::seed_from_u64(1);
    for replay in 0..size.replays {
        let batch = random.random_range(1..=size.bucket);
        requests.rotate_left(3);
        let step: Vec<_> = requests[..batch as usize]
            .iter_mut()
            .map(|(id, start)| {
                *start += 1;
                StepRequest { id: *id, start: *start - 1, tokens: 1 }
            })
            .collect();
        now.copy_rows(&stream, &inputs[replay as usize % INPUTS]);
        let positions: Vec<usize> = step.iter().map(|part| part.start as usize).collect();
        for side in &mut sides {
            side.manager.prepare_forward(&stream, &step).unwrap();
            side.out.iter().for_each(|out| out.reset(&stream, &positions));
        }
        let [eager, captured] = &mut sides;
        eager.eager(&stream, &now, batch);
        eager.gather(&stream, &now, batch).unwrap();
        captured.manager.replay(&stream, &graph).unwrap();
        sides.iter_mut().for_each(|side| side.commit(&step));
        if (replay + 1) % size.compare_every == 0 {
            compare(&stream, &sides, &format!("replay {replay}, positions {positions:?}"));
        }
    }
    sides.iter().for_each(|side| side.manager.check_faults(&stream).unwrap());
}

/// Admits a request for each row of the bucket and feeds it up to 128 tokens.
fn prompts<B: Backend>(
    stream: &Stream<B>,
    sides: &mut [Side<B>; 2],
    tensors: &Tensors<B>,
    size: &Size,
) -> Vec<(RequestId, u32)> {
    let mut requests = Vec::new();
    for start in PROMPT - size.bucket..PROMPT {
        let ids = sides.each_mut().map(|side| {
            let id = side.manager.admit().unwrap();
            let step = [StepRequest { id, start: 0, tokens: start }];
            side.manager.prepare_forward(stream, &step).unwrap();
            side.eager(stream, tensors, start);
            side.commit(&step);
            id
        });
        assert_eq!(ids[0], ids[1], "both caches go the same way");
        requests.push((ids[0], start));
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
