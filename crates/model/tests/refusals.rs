//! What an engine refuses, after which nothing has changed.

use std::path::Path;
use std::sync::Arc;

use dsv4_kv::device::{EmuDevice, EmuOptions};
use dsv4_kv_checkpoint::Checkpoint;
use dsv4_kv_model::{Chunk, Engine, EngineLimits, Logits, Model, ModelError};

#[test]
fn a_step_needs_tokens_of_the_vocabulary() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/e2e/hash");
    let checkpoint = Checkpoint::open(&folder).expect("a checkpoint");
    let model = Arc::new(Model::load(&checkpoint, |_| {}).expect("a model"));
    let limits = EngineLimits {
        requests: 1,
        context: 128,
        cached_tokens: 128,
        step_tokens: 8,
        max_draft: 0,
        checkpoints: 0,
        host_bytes: 0,
    };
    let device = EmuDevice::new(EmuOptions::default());
    let mut engine = Engine::new(&device, model, limits).expect("an engine");
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
