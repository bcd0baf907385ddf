//! Models as they are loaded; refusals of an engine, which change nothing; drafts, which an engine bounds, and which leave
//! nothing in the prefix tree; and graphs.

use std::path::Path;
use std::sync::Arc;

use dsv4_kv::device::{DeviceError, EmuDevice, EmuOptions, Emulator, Null, NullDevice};
use dsv4_kv::kv_layout::attention::KeyCluster;
use dsv4_kv_model::generate::{Observer, Summary};
use dsv4_kv_model::sample::GREEDY;
use dsv4_kv_model::sequence::{Continuation, Finish, Generated, Work};
use dsv4_kv_model::{AttentionPlace, Chunk, Engine, EngineLimits, Logits, Model, ModelError};
use dsv4_kv_model_files::{ModelFileError, ModelFiles};
use ndarray::ArrayView2;
use safetensors::SafeTensors;

const LIMITS: EngineLimits = EngineLimits {
    requests: 1,
    context: 128,
    max_total_tokens: 128,
    max_step_tokens: 8,
    max_draft: 0,
    checkpoints: 0,
    host_bytes: 0,
    event_capacity: 0,
    attention_cluster: KeyCluster::TwoBlocks,
};

const CONTINUATION: Continuation = Continuation {
    sampling: GREEDY,
    max_tokens: 5,
    end: Vec::new(),
    drafts: 0,
    top_logprobs: 0,
    prompt_logits: false,
};

fn model() -> Model {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/e2e/hash");
    let model_files = ModelFiles::open(&folder).expect("a model");
    Model::load(&model_files, |_| {}).expect("a model")
}

fn engine(limits: EngineLimits) -> Engine<Emulator> {
    let device = EmuDevice::new(EmuOptions::default());
    Engine::new(&device, Arc::new(model()), limits).expect("an engine")
}

/// An engine for tests of what is decided, not of what is computed, and its device.
fn without_kernels(limits: EngineLimits) -> (Engine<Null>, NullDevice) {
    let device = NullDevice::null(1 << 34);
    (Engine::new(&device, Arc::new(model()), limits).expect("an engine"), device)
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

/// A NaN in a weight is refused when the model is loaded, with the name of the tensor.
#[test]
fn weights_are_numbers() {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/e2e/hash");
    let folder = tempfile::tempdir().expect("a directory");
    let copy = |name: &str| std::fs::copy(from.join(name), folder.path().join(name));
    copy("config.json").expect("room");
    let mut bytes = std::fs::read(from.join("model.safetensors")).expect("a file");
    let (header, metadata) = SafeTensors::read_metadata(&bytes).expect("a model");
    let embedding = metadata.info("model.embed_tokens.weight").expect("there is one");
    let size = embedding.dtype.bitsize() / 8;
    // The last two bytes of an element have its sign and exponent.
    let end = 8 + header + embedding.data_offsets.0 + 100 * size;
    bytes[end - 2..end].copy_from_slice(&[0xC0, 0x7F]);
    std::fs::write(folder.path().join("model.safetensors"), bytes).expect("room");
    let model_files = ModelFiles::open(folder.path()).expect("a model");
    let error = Model::load(&model_files, |_| {}).map(drop).expect_err("a refusal");
    let ModelError::ModelFile(error) = error else { panic!("{error}") };
    let ModelFileError::NotFinite { name, index, value } = *error else { panic!("{error}") };
    assert!(name == "embed.weight" && index == 99 && value.is_nan(), "{name}[{index}] is {value}");
}

/// No expert is without the limit of the configuration, the shared one neither. The stored vectors never reach it there.
#[test]
fn every_expert_has_the_limit() {
    let model = model();
    let limit = model.config.experts.swiglu_limit;
    for layer in &model.layers {
        let mut experts = layer.experts.routed.iter().chain([&layer.experts.shared]);
        assert!(experts.all(|expert| expert.limit == limit));
    }
}

/// Graphs serve only steps of few tokens.
#[test]
fn a_bucket_has_a_size() {
    let mut engine = engine(LIMITS);
    let error = engine.capture(1000, 1).expect_err("a refusal");
    assert!(matches!(error, ModelError::BucketTooLarge { tokens: 1000, most: 1..1000 }), "{error}");
}

/// A step that fits the graphs replays one for each layer. A longer one launches its kernels.
#[test]
fn steps_that_fit_replay_the_graphs() {
    let (mut engine, device) = without_kernels(EngineLimits { max_draft: 1, ..LIMITS });
    engine.capture(1, 2).expect("graphs");
    let layers = engine.model().layers.len() as u64;
    let id = engine.admit().expect("a request");
    for (tokens, replayed) in [(&[1, 2, 3][..], 0), (&[4, 5][..], 1), (&[6][..], 2)] {
        let chunk = Chunk { id, tokens, logits: Logits::Last };
        engine.forward(&[chunk]).expect("a step").commit().expect("its tokens");
        assert_eq!(engine.replayed_steps(), replayed);
        assert_eq!(device.backend().calls().replays, layers * replayed);
    }
}

/// An observer that ends a request at its first token.
struct First;

impl Observer for First {
    fn token(&mut self, _token: &Generated) -> bool {
        false
    }
}

/// A request that its observer ends has no [`Finish`](dsv4_kv_model::sequence::Finish).
#[test]
fn a_request_that_is_interrupted_has_no_reason() {
    let mut engine = engine(LIMITS);
    let summary = engine.generate(&[1, 2], CONTINUATION, 8, &mut First).expect("a token");
    assert_eq!((summary.tokens.len(), summary.finish), (1, None));
}

/// Counts the logits of a request, and refuses tokens.
struct Logs(usize);

impl Observer for Logs {
    fn logits(&mut self, _work: &Work, logits: ArrayView2<'_, f32>, _accepted: u32) {
        self.0 += logits.nrows();
    }

    fn token(&mut self, _token: &Generated) -> bool {
        panic!("none is asked for")
    }
}

/// A prompt is scored without generating anything. Without logits of the prompt nothing is computed.
#[test]
fn a_prompt_is_scored_alone() {
    let mut engine = engine(LIMITS);
    let prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9];
    for (prompt_logits, chunk, logits, steps) in
        [(true, 8, 9, 2), (true, 3, 9, 3), (false, 8, 0, 0)]
    {
        let continuation = Continuation { max_tokens: 0, prompt_logits, ..CONTINUATION };
        let mut observer = Logs(0);
        let summary = engine.generate(&prompt, continuation, chunk, &mut observer).expect("logits");
        assert_eq!((observer.0, summary.steps), (logits, steps));
        assert_eq!((summary.tokens.len(), summary.finish), (0, Some(Finish::Length)));
        assert_eq!((summary.time_to_first_token, summary.decode_time), Default::default());
    }
}

/// An observer that panics at the first token.
struct Panics;

impl Observer for Panics {
    fn token(&mut self, _token: &Generated) -> bool {
        panic!("on purpose")
    }
}

/// A panic of an observer passes through, and its request holds no slot and no block afterwards.
#[test]
fn a_request_whose_observer_panics_is_released() {
    let mut engine = engine(LIMITS);
    let run = || engine.generate(&[1, 2], CONTINUATION, 8, &mut Panics);
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).expect_err("a panic");
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"on purpose"));
    // The only slot is free.
    let summary = engine.generate(&[1, 2], CONTINUATION, 8, &mut First).expect("a token");
    assert_eq!(summary.tokens.len(), 1);
}

/// An observer that ends a request at a token of this number, and counts its tokens.
struct Until {
    last: usize,
    tokens: usize,
}

impl Observer for Until {
    fn token(&mut self, _token: &Generated) -> bool {
        self.tokens += 1;
        self.tokens != self.last
    }
}

/// A step with accepted drafts has several tokens. An observer that ends the request at one of them gets no later one.
#[test]
fn an_interrupted_request_ends_inside_a_step() {
    let device = EmuDevice::new(EmuOptions::default());
    let limits = EngineLimits { max_draft: 2, ..LIMITS };
    let mut engine = Engine::new(&device, Arc::new(model()), limits).expect("an engine");
    let mut run = |prompt: &[u32], max_tokens, last| {
        let continuation = Continuation { max_tokens, drafts: 2, ..CONTINUATION };
        let mut observer = Until { last, tokens: 0 };
        let summary = engine.generate(prompt, continuation, 8, &mut observer);
        (summary.expect("tokens"), observer.tokens)
    };
    // Only the last tokens repeat earlier ones, so that drafts are accepted. They are the same after the others as prompt.
    let begin = [1, 2, 1, 2, 1];
    let (whole, _) = run(&begin, 24, 0);
    let (before, after) = whole.tokens.split_at(16);
    let prompt = [&begin[..], before].concat();
    let (rest, _) = run(&prompt, after.len(), 0);
    assert!(rest.accepted > 0 && rest.tokens == after, "{rest:?}, after {whole:?}");
    for last in 1..=4 {
        let (summary, tokens) = run(&prompt, after.len(), last);
        assert_eq!((tokens, &summary.tokens[..]), (last, &after[..last]));
        assert_eq!(summary.finish, None);
    }
}

/// An observer that ends a request before its second step.
struct OneStep(bool);

impl Observer for OneStep {
    fn goes_on(&mut self) -> bool {
        std::mem::replace(&mut self.0, false)
    }

    fn token(&mut self, _token: &Generated) -> bool {
        true
    }
}

/// A prompt of several chunks can be interrupted between them.
#[test]
fn a_prompt_is_interrupted_between_its_chunks() {
    let mut engine = engine(LIMITS);
    let mut observer = OneStep(true);
    let summary = engine.generate(&[1, 2, 3, 4], CONTINUATION, 2, &mut observer).expect("a step");
    assert_eq!((summary.steps, summary.tokens.len(), summary.finish), (1, 0, None));
}

/// An empty prompt is refused, and the only slot is free afterwards.
#[test]
fn a_prompt_has_a_token() {
    let mut engine = engine(LIMITS);
    let error = engine.generate(&[], CONTINUATION, 8, &mut First).map(drop).expect_err("a refusal");
    assert!(matches!(error, ModelError::EmptyPrompt), "{error}");
    engine.admit().expect("a free slot");
}

#[test]
fn a_step_needs_tokens_of_the_vocabulary() {
    let mut engine = engine(LIMITS);
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

/// A step of a model whose products leave the range of f32 is an error, and gives no logits.
#[test]
fn logits_are_numbers() {
    let mut model = model();
    model.head.weight.fill(f32::NAN);
    let mut engine =
        Engine::new(&NullDevice::null(1 << 34), Arc::new(model), LIMITS).expect("an engine");
    let id = engine.admit().expect("a request");
    for logits in [Logits::None, Logits::Last] {
        let chunk = Chunk { id, tokens: &[1], logits };
        let ran = engine.forward(&[chunk]).map(drop);
        assert_eq!(matches!(ran, Err(ModelError::NotANumber)), logits == Logits::Last, "{ran:?}");
    }
    assert_eq!(engine.cache().ledger().committed(id).expect("a request"), 0);
}

/// Continues a prompt for which prompt lookup finds two drafts, in chunks of `chunk` tokens. Its last token is a chunk
/// of its own, with the drafts.
fn continued(limits: EngineLimits, continuation: Continuation, chunk: usize) -> Summary {
    let mut engine = engine(limits);
    let mut observer = Until { last: 0, tokens: 0 };
    engine.generate(&[1, 2, 1, 2, 1], continuation, chunk, &mut observer).expect("tokens")
}

/// No step has more drafts than the engine can reject, nor more tokens than it may have.
#[test]
fn drafts_are_bounded_by_the_engine() {
    let continuation = |drafts| Continuation { max_tokens: 4, drafts, ..CONTINUATION };
    let tokens = continued(LIMITS, continuation(0), 4).tokens;
    for (max_draft, max_step_tokens) in [(0, 8), (1, 8), (2, 2)] {
        let limits = EngineLimits { max_draft, max_step_tokens, ..LIMITS };
        let chunk = 4.min(max_step_tokens as usize);
        let summary = continued(limits, continuation(31), chunk);
        assert_eq!(summary.tokens, tokens);
        assert_eq!(summary.drafts > 0, max_draft > 0, "{summary:?}");
        let most = max_draft.min(max_step_tokens - 1);
        assert!(summary.drafts <= summary.steps * most, "{summary:?}");
    }
}

/// Of two requests in a step each is told its own tokens, without drafts that were rejected: later prompts find the
/// blocks of both in the prefix tree.
#[test]
fn rejected_drafts_are_told_to_nobody() {
    let limits = EngineLimits { requests: 2, max_step_tokens: 256, max_draft: 2, ..LIMITS };
    let limits = EngineLimits { context: 256, max_total_tokens: 1024, checkpoints: 4, ..limits };
    let (mut engine, _) = without_kernels(limits);
    let of = |factor: u32| Vec::from_iter((0..129_u32).map(|at| factor * at % 251));
    let [first, second] = [of(1), of(2)];
    let admit = |engine: &mut Engine<Null>, tokens: usize| {
        [&first, &second].map(|all| engine.admit_with(&all[..tokens], b"").expect("a request"))
    };
    let ids = admit(&mut engine, 127).map(|admission| admission.id);
    // The step that ends the first block has two drafts of each. Both of the first request are wrong, and one of the
    // second.
    let drafted = [[first[127], 250, 251], [second[127], second[128], 250]];
    for (parts, accepted) in [
        ([&first[..127], &second[..127]], [127, 127]),
        ([&drafted[0][..], &drafted[1][..]], [1, 2]),
    ] {
        let chunk = |(id, tokens)| Chunk { id, tokens, logits: Logits::None };
        let chunks = Vec::from_iter(ids.into_iter().zip(parts).map(chunk));
        let forward = engine.forward(&chunks).expect("a step");
        forward.commit_some(&accepted).expect("its tokens");
    }
    for id in ids {
        engine.release(id).expect("a request");
    }
    assert_eq!(admit(&mut engine, 129).map(|admission| admission.reused), [128; 2]);
}

/// `chunk` bounds the tokens of the prompt in a step, not the drafts.
#[test]
fn a_prompt_of_one_token_per_step_is_continued_with_drafts() {
    let limits = EngineLimits { max_draft: 2, ..LIMITS };
    let continuation = Continuation { max_tokens: 3, drafts: 2, ..CONTINUATION };
    assert!(continued(limits, continuation, 1).drafts >= 2);
}

/// A request that ends before its context is full also ends there with drafts.
#[test]
fn drafts_stay_inside_the_context() {
    let first = Continuation { max_tokens: 1, ..CONTINUATION };
    let end = continued(LIMITS, first, 4).tokens;
    // The token that ends it is not fed.
    let limits = EngineLimits { context: 5, max_draft: 2, ..LIMITS };
    let continuation = Continuation { end: end.clone(), drafts: 2, ..CONTINUATION };
    let summary = continued(limits, continuation, 4);
    assert_eq!((summary.tokens, summary.finish), (end, Some(Finish::End)));
}
