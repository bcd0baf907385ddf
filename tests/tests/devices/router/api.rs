//! `Router`: weights from a checkpoint, batches of every size, capture, and typed refusals.

use std::borrow::Cow;

use dsv4_kv::device::{Backend, Buffer, Device, DeviceError, Stream, bf16};
use dsv4_kv_model_files::{Config, ModelFileError};
use dsv4_kv_router::{
    Batch, ChoiceWeights, Router, RouterConfig, RouterError, RouterWeights, Routing,
};
use dsv4_kv_tests::inputs::{download, upload, upload_bf16};
use dsv4_kv_tests::model_files::{self, Made, Tensors as Weights};
use safetensors::Dtype;
use serde_json::{Value, json};

use crate::router::decode::Case;
use crate::router::selection::Answer;

const HASHED: u32 = 1;
const SCORED: u32 = 2;

/// A configuration of four layers, of which the first two look experts up by token id.
fn file() -> Value {
    let mut config = model_files::config();
    for (field, value) in [
        ("hidden_size", json!(256)),
        ("n_routed_experts", json!(64)),
        ("routed_scaling_factor", json!(2.5)),
        ("vocab_size", json!(40)),
        ("mlp_layer_types", json!(["hash_moe", "hash_moe", "moe", "moe"])),
    ] {
        config[field] = value;
    }
    config
}

fn config() -> RouterConfig {
    RouterConfig::from(&Config::from_json(&file().to_string()).unwrap())
}

fn case(tokens: u32) -> Case {
    let config = config();
    Case::random(config.hidden_size, config.experts, config.selected, tokens, tokens.into())
}

/// Names of the tensors of both layers' routers, and the layer of each.
const NAMES: [(&str, u32); 4] = [
    ("layers.1.ffn.gate.weight", HASHED),
    ("layers.1.ffn.gate.tid2eid", HASHED),
    ("layers.2.ffn.gate.weight", SCORED),
    ("layers.2.ffn.gate.bias", SCORED),
];

/// The tensors of both layers' routers, as a checkpoint has them.
fn tensors(case: &Case) -> Weights {
    let (experts, hidden, selected) =
        (case.experts as usize, case.hidden as usize, case.selected as usize);
    let wide: Vec<i64> = case.table.iter().map(|&id| id.into()).collect();
    let gate = bytemuck::cast_slice(&case.gate).to_vec();
    let gate = Made::new(Dtype::BF16, &[experts, hidden], gate);
    let table = Made::i64(&[40, selected], &wide);
    let bias = Made::f32(&[experts], &case.bias);
    let made = [gate.clone(), table, gate, bias];
    NAMES.iter().zip(made).map(|(&(name, _), made)| (name.to_owned(), made)).collect()
}

/// The router of `layer`, loaded from a checkpoint with these tensors.
fn load<B: Backend>(
    stream: &Stream<B>,
    weights: &Weights,
    layer: u32,
    max_tokens: u32,
) -> Result<Router<B>, RouterError> {
    let model_files = model_files::one_file(&file(), weights);
    Router::of_layer(stream, &model_files, layer, max_tokens)
}

/// The tensors of a batch.
struct Tensors<B: Backend> {
    x: Buffer<B, bf16>,
    token: Buffer<B, i32>,
    ids: Buffer<B, i32>,
    weights: Buffer<B, f32>,
    tokens: u32,
}

impl<B: Backend> Tensors<B> {
    fn new(stream: &Stream<B>, case: &Case) -> Self {
        let selected = u64::from(case.tokens() * case.selected);
        Self {
            x: upload_bf16(stream, &case.x),
            token: upload(stream, &case.token),
            ids: stream.device().allocate("ids", selected).unwrap(),
            weights: stream.device().allocate("weights", selected).unwrap(),
            tokens: case.tokens(),
        }
    }

    fn batch(&self) -> Batch<'_, B> {
        let Self { token, ids, weights, tokens, .. } = self;
        Batch { tokens: *tokens, token, ids, weights }
    }

    fn answer(&self, stream: &Stream<B>) -> Answer {
        let (ids, weights) = (download(stream, &self.ids), download(stream, &self.weights));
        Answer { ids, weights, faults: 0 }
    }
}

/// Batches that take one launch, and batches that take a tiled product whose last tile is not full.
pub fn batches_of_every_size_equal_the_oracle<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    for (layer, mode) in [(HASHED, Routing::Hash), (SCORED, Routing::Learned)] {
        for tokens in [1, 64, 65, 260] {
            let case = case(tokens);
            let mut router = load(&stream, &tensors(&case), layer, 260).unwrap();
            assert_eq!(router.mode(), mode);
            let tensors = Tensors::new(&stream, &case);
            router.route(&stream, &tensors.x, &tensors.batch()).unwrap();
            router.check_faults(&stream).unwrap();
            let hash = mode == Routing::Hash;
            let clear = case.check(&tensors.answer(&stream), hash);
            assert!(hash || 10 * clear >= 8 * tokens as usize, "{clear} of {tokens} are clear");
        }
    }
}

/// Hidden sizes that end inside a stage of the tiled product, and numbers of experts that end inside a tile.
pub fn products_end_where_the_matrices_do<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    for (hidden, experts) in [(32, 96), (160, 32), (224, 288), (2112, 64)] {
        let config = RouterConfig { hidden_size: hidden, experts, ..config() };
        let case = Case::random(hidden, experts, config.selected, 130, hidden.into());
        let weights = RouterWeights {
            gate: Cow::Borrowed(bytemuck::cast_slice(&case.gate)),
            choice: ChoiceWeights::Bias(Cow::Borrowed(&case.bias)),
        };
        let mut router = Router::new(&stream, &config, &weights, 130).unwrap();
        let tensors = Tensors::new(&stream, &case);
        router.route(&stream, &tensors.x, &tensors.batch()).unwrap();
        case.check(&tensors.answer(&stream), false);
    }
}

pub fn captured_routing_equals_eager<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    for layer in [HASHED, SCORED] {
        for tokens in [33, 70] {
            let case = case(tokens);
            let mut router = load(&stream, &tensors(&case), layer, 70).unwrap();
            let tensors = Tensors::new(&stream, &case);
            router.route(&stream, &tensors.x, &tensors.batch()).unwrap();
            let eager = tensors.answer(&stream);
            let Tensors { x, token, ids, weights, .. } = &tensors;
            let mut retained = router.memory();
            retained.extend([x.memory(), token.memory(), ids.memory(), weights.memory()]);
            let record = || router.route(&stream, x, &tensors.batch());
            let graph = stream.capture(retained, record).unwrap();
            for _ in 0..3 {
                stream.fill(ids, 0xAB).unwrap();
                stream.fill(weights, 0xAB).unwrap();
                stream.replay(&graph).unwrap();
                assert_eq!(tensors.answer(&stream), eager);
            }
            router.check_faults(&stream).unwrap();
        }
    }
}

/// Errors name the defect of a checkpoint, and nothing of such a checkpoint reaches the device.
pub fn wrong_files_are_refused<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let good = tensors(&case(1));
    let refused = |layer: u32, break_it: &dyn Fn(&mut Weights)| {
        let mut weights = good.clone();
        break_it(&mut weights);
        load(&stream, &weights, layer, 1).err().expect("a refusal")
    };
    for (name, layer) in NAMES {
        let error = refused(layer, &|weights| drop(weights.remove(name)));
        let missing = matches!(&error, RouterError::ModelFile(ModelFileError::Missing { name: n })
            if n == name);
        assert!(missing, "{error}");
        let error = refused(layer, &|weights| {
            let Made { dtype, shape, bytes } = weights.get_mut(name).unwrap();
            shape[0] -= 1;
            bytes.truncate(shape.iter().product::<usize>() * dtype.bitsize() / 8);
        });
        let shaped = matches!(&error,
            RouterError::ModelFile(ModelFileError::Shape { name: n, found, expected })
            if n == name && found[0] + 1 == expected[0]);
        assert!(shaped, "{error}");
        let error = refused(layer, &|weights| {
            let Made { dtype, bytes, .. } = weights.get_mut(name).unwrap();
            let half = bytes.len() * 8 / dtype.bitsize();
            (*dtype, *bytes) = (Dtype::F16, vec![0; 2 * half]);
        });
        let typed = matches!(&error,
            RouterError::ModelFile(ModelFileError::Type { name: n, found: Dtype::F16, .. })
            if n == name);
        assert!(typed, "{error}");
    }
    for expert in [-1_i64, 64, i64::MAX] {
        let error = refused(HASHED, &|weights| {
            let table = &mut weights.get_mut(NAMES[1].0).unwrap().bytes;
            table[8 * (6 * 7 + 2)..][..8].copy_from_slice(&expert.to_le_bytes());
        });
        let named = matches!(error, RouterError::NoSuchExpert { token: 7, expert: e, experts: 64, .. }
            if e == expert);
        assert!(named, "{error}");
    }
    let error = refused(4, &|_| ());
    assert!(matches!(error, RouterError::NoSuchLayer { layer: 4, layers: 4 }), "{error}");
}

pub fn wrong_calls_are_refused<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let case = case(80);
    let weights = |gate: &[u16], bias: &[f32]| RouterWeights {
        gate: Cow::Owned(bytemuck::cast_slice(gate).to_vec()),
        choice: ChoiceWeights::Bias(Cow::Owned(bias.to_vec())),
    };
    let (short_gate, short_bias) = (&case.gate[1..], &case.bias[1..]);
    for weights in [weights(short_gate, &case.bias), weights(&case.gate, short_bias)] {
        let error = Router::new(&stream, &config(), &weights, 8).err().expect("a refusal");
        assert!(matches!(error, RouterError::Shape { .. }), "{error}");
    }
    let mut router = load(&stream, &tensors(&case), SCORED, 79).unwrap();
    let tensors = Tensors::new(&stream, &case);
    let error = router.route(&stream, &tensors.x, &tensors.batch()).unwrap_err();
    assert!(matches!(error, RouterError::TooManyTokens { tokens: 80, most: 79 }), "{error}");
    // A batch whose results do not fit, with one launch and with two: nothing is written.
    for tokens in [60, 79] {
        let short = tensors.ids.slice(0, u64::from(tokens) * 6 - 1).unwrap();
        let batch = Batch { tokens, ids: &short, ..tensors.batch() };
        let error = router.route(&stream, &tensors.x, &batch).unwrap_err();
        let named = matches!(error, RouterError::Device(DeviceError::Length { needed, .. })
            if needed == u64::from(tokens) * 6);
        assert!(named, "{error}");
    }
    assert!(tensors.answer(&stream).ids.iter().all(|&id| id == 0));
    // A NaN in the hidden state of a token is reported once.
    let mut poisoned = case.x.clone();
    poisoned[0] = 0x7FC0;
    let x = upload_bf16(&stream, &poisoned);
    let batch = Batch { tokens: 8, ..tensors.batch() };
    router.route(&stream, &x, &batch).unwrap();
    let error = router.check_faults(&stream).unwrap_err();
    assert!(matches!(error, RouterError::Refused { count: 64 }), "{error}");
    router.check_faults(&stream).unwrap();
}

/// Calls in two streams by turns, and replays in a third. Each runs after the one before, so that the arrival counters
/// of one launch never count blocks of another.
pub fn streams_follow_each_other<B: Backend>(device: &Device<B>) {
    let streams = [(); 3].map(|()| device.stream().unwrap());
    let [one, other, replayed] = &streams;
    for layer in [HASHED, SCORED] {
        let case = case(50);
        let mut router = load(one, &tensors(&case), layer, 50).unwrap();
        let tensors = Tensors::new(one, &case);
        router.route(one, &tensors.x, &tensors.batch()).unwrap();
        let alone = tensors.answer(one);
        let answers: Vec<_> = (0..6).map(|_| Tensors::new(one, &case)).collect();
        for (call, tensors) in answers.iter().enumerate() {
            let stream = if call % 2 == 0 { one } else { other };
            router.route(stream, &tensors.x, &tensors.batch()).unwrap();
        }
        let mut retained = router.memory();
        let Tensors { x, token, ids, weights, .. } = &tensors;
        retained.extend([x.memory(), token.memory(), ids.memory(), weights.memory()]);
        let record = || router.route(replayed, x, &tensors.batch());
        let graph = replayed.capture(retained, record).unwrap();
        for stream in [replayed, one, replayed] {
            router.follow(stream).unwrap();
            stream.replay(&graph).unwrap();
        }
        router.check_faults(other).unwrap();
        for tensors in answers.iter().chain([&tensors]) {
            assert_eq!(tensors.answer(other), alone);
        }
    }
}
