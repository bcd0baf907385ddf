//! What an engine refuses, after which nothing has changed.

use std::path::Path;
use std::sync::Arc;

use dsv4_kv::device::{DeviceError, EmuDevice, EmuOptions};
use dsv4_kv::kv_layout::attention::KeySplit;
use dsv4_kv_checkpoint::Checkpoint;
use dsv4_kv_model::{AttentionPlace, Chunk, Engine, EngineLimits, Logits, Model, ModelError};

const LIMITS: EngineLimits = EngineLimits {
    requests: 1,
    context: 128,
    cached_tokens: 128,
    step_tokens: 8,
    max_draft: 0,
    checkpoints: 0,
    host_bytes: 0,
    event_capacity: 0,
    attention_split: KeySplit::TwoBlocks,
};

fn model() -> Model {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/e2e/hash");
    let checkpoint = Checkpoint::open(&folder).expect("a checkpoint");
    Model::load(&checkpoint, |_| {}).expect("a model")
}

#[test]
fn attention_on_the_device_takes_128_heads() {
    let mut model = model();
    model.config.heads = 129;
    let (model, device) = (Arc::new(model), EmuDevice::new(EmuOptions::default()));
    let engine = |place| Engine::with_attention(&device, Arc::clone(&model), LIMITS, place);
    let error = engine(AttentionPlace::Device).map(drop).expect_err("a refusal");
    let ModelError::Device(DeviceError::Argument { what, value, most, .. }) = error else {
        panic!("{error}")
    };
    assert_eq!((what, value, most), ("heads", 129, 128));
    engine(AttentionPlace::Host).map(drop).expect("the host takes any number");
}

#[test]
fn a_step_needs_tokens_of_the_vocabulary() {
    let device = EmuDevice::new(EmuOptions::default());
    let mut engine = Engine::new(&device, Arc::new(model()), LIMITS).expect("an engine");
    let id = engine.admit().expect("a request");
    let refused = |result: Result<_, ModelError>| result.map(|_| ()).expect_err("a refusal");

    assert!(matches!(refused(engine.forward(&[]).map(drop)), ModelError::EmptyStep));
    let tokens = [1, 256];
    let chunk = Chunk { id, tokens: &tokens, logits: Logits::Last };
    let error = refused(engine.forward(&[chunk]).map(drop));
    assert!(matches!(error, ModelError::TokenOutOfVocabulary { token: 256, vocabulary: 256 }));
    let ledger = engine.cache().ledger();
    assert_eq!((ledger.committed(id).expect("a request"), ledger.free_blocks()), (0, 1));
}
