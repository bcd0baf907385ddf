//! The ledger by itself: every refusal is typed, names value and limit, and changes nothing.

use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::{BlockId, CacheConfig, KvError, Ledger, RequestId, SlotId, StepRequest};

fn config() -> CacheConfig {
    CacheConfig {
        max_requests: 3,
        num_blocks: 10,
        max_context: 2000,
        max_step_tokens: 1500,
        max_draft: 2,
        ..CacheConfig::for_memory(ModelConfig::preset("tiny").unwrap(), 1 << 30, 3).unwrap()
    }
}

fn ledger() -> (Ledger, Vec<i32>) {
    let ledger = Ledger::new(&config()).unwrap();
    let array = vec![0; ledger.layout().elements()];
    (ledger, array)
}

/// Everything observable of a ledger.
#[derive(Debug, PartialEq)]
struct State {
    free_blocks: u32,
    live_requests: u32,
    /// Committed tokens and block table of each request.
    requests: Vec<(Option<u32>, Option<Vec<BlockId>>)>,
}

fn state(ledger: &Ledger, ids: &[RequestId]) -> State {
    let request =
        |&id| (ledger.committed(id).ok(), ledger.block_table(id).ok().map(Iterator::collect));
    State {
        free_blocks: ledger.free_blocks(),
        live_requests: ledger.live_requests(),
        requests: ids.iter().map(request).collect(),
    }
}

/// The step is refused, and neither the ledger nor the array changed.
fn refused(
    ledger: &mut Ledger,
    array: &mut [i32],
    ids: &[RequestId],
    step: &[StepRequest],
) -> KvError {
    let before = (state(ledger, ids), array.to_vec());
    let error = ledger.prepare_forward(step, array).unwrap_err();
    assert_eq!(before, (state(ledger, ids), array.to_vec()), "{error}");
    error
}

#[test]
fn blocks_follow_the_closed_entries() {
    let (ledger, _) = ledger();
    let needs =
        [(0, 0), (3, 0), (4, 1), (127, 1), (128, 1), (131, 1), (132, 2), (256, 2), (260, 3)];
    for (tokens, blocks) in needs {
        assert_eq!(ledger.blocks_of(tokens), blocks, "{tokens} tokens");
    }
}

#[test]
fn a_request_keeps_its_blocks_and_gives_them_back() {
    let (mut ledger, mut array) = ledger();
    let (a, b) = (ledger.admit().unwrap(), ledger.admit().unwrap());
    let step =
        [StepRequest { id: a, start: 0, tokens: 300 }, StepRequest { id: b, start: 0, tokens: 3 }];
    let plan = ledger.prepare_forward(&step, &mut array).unwrap();
    assert_eq!((plan.tokens, plan.requests, plan.new_blocks), (303, 2, 3));
    ledger.commit(a, 300).unwrap();
    ledger.commit(b, 3).unwrap();
    let held: Vec<_> = ledger.block_table(a).unwrap().collect();
    assert_eq!(held, [BlockId(0), BlockId(1), BlockId(2)]);
    let step = [StepRequest { id: b, start: 3, tokens: 1 }];
    assert_eq!(ledger.prepare_forward(&step, &mut array).unwrap().new_blocks, 1);
    assert_eq!(ledger.block_table(b).unwrap().collect::<Vec<_>>(), [BlockId(3)]);
    ledger.release(a).unwrap();
    assert_eq!(ledger.free_blocks(), 9);
    ledger.release(b).unwrap();
    assert_eq!((ledger.free_blocks(), ledger.live_requests()), (10, 0));
}

#[test]
fn rejected_tokens_keep_their_blocks_for_the_next_step() {
    let (mut ledger, mut array) = ledger();
    let id = ledger.admit().unwrap();
    let step = |start, tokens| [StepRequest { id, start, tokens }];
    ledger.prepare_forward(&step(0, 130), &mut array).unwrap();
    ledger.commit(id, 130).unwrap();
    assert_eq!(ledger.prepare_forward(&step(130, 3), &mut array).unwrap().new_blocks, 1);
    ledger.commit(id, 1).unwrap();
    assert_eq!(ledger.committed(id).unwrap(), 131);
    assert_eq!(ledger.prepare_forward(&step(131, 1), &mut array).unwrap().new_blocks, 0);
}

#[test]
fn slots_run_out_and_come_back_with_a_new_generation() {
    let (mut ledger, _) = ledger();
    let ids: Vec<_> = (0..3).map(|_| ledger.admit().unwrap()).collect();
    assert!(matches!(ledger.admit(), Err(KvError::NoFreeSlot { slots: 3 })));
    ledger.release(ids[1]).unwrap();
    let again = ledger.admit().unwrap();
    assert_eq!((again.slot, again.generation), (ids[1].slot, ids[1].generation + 1));
}

#[test]
fn a_stale_handle_reaches_nobody() {
    let (mut ledger, mut array) = ledger();
    let old = ledger.admit().unwrap();
    ledger.release(old).unwrap();
    let new = ledger.admit().unwrap();
    assert_eq!(old.slot, new.slot);
    let nobody = RequestId { slot: SlotId(77), generation: 0 };
    for id in [old, nobody] {
        let step = [StepRequest { id, start: 0, tokens: 1 }];
        let error = refused(&mut ledger, &mut array, &[new], &step);
        assert!(matches!(error, KvError::UnknownRequest { request } if request == id), "{error}");
        assert!(matches!(ledger.release(id), Err(KvError::UnknownRequest { .. })));
        assert!(matches!(ledger.commit(id, 0), Err(KvError::UnknownRequest { .. })));
        assert!(matches!(ledger.committed(id), Err(KvError::UnknownRequest { .. })));
        assert!(ledger.block_table(id).is_err());
    }
    assert_eq!(ledger.live_requests(), 1);
}

#[test]
fn a_step_that_cannot_be_is_refused_whole() {
    let (mut ledger, mut array) = ledger();
    let (a, b) = (ledger.admit().unwrap(), ledger.admit().unwrap());
    let ids = [a, b];
    let good = StepRequest { id: a, start: 0, tokens: 200 };
    let part = |start, tokens| StepRequest { id: b, start, tokens };
    let mut refuse = |step: &[StepRequest]| refused(&mut ledger, &mut array, &ids, step);

    let error = refuse(&[good, part(5, 1)]);
    assert!(matches!(error, KvError::WrongStart { committed: 0, start: 5, .. }), "{error}");
    let error = refuse(&[good, part(0, 0)]);
    assert!(matches!(error, KvError::NoTokens { .. }), "{error}");
    let error = refuse(&[good, part(0, 2001)]);
    assert!(matches!(error, KvError::ContextTooLong { end: 2001, most: 2000, .. }), "{error}");
    let error = refuse(&[good, part(0, u32::MAX)]);
    assert!(matches!(error, KvError::ContextTooLong { .. }), "{error}");
    let error = refuse(&[good, part(0, 1301)]);
    assert!(matches!(error, KvError::StepTooLong { tokens: 1501, most: 1500 }), "{error}");
    let error = refuse(&[good, good]);
    assert!(matches!(error, KvError::DuplicateRequest { request } if request == a), "{error}");
    let error = refuse(&[good, part(0, 1), good, part(0, 1)]);
    assert!(matches!(error, KvError::TooManyRequests { requests: 4, most: 3 }), "{error}");
    let error = refuse(&[good, part(0, 1200)]);
    assert!(matches!(error, KvError::OutOfBlocks { needed: 12, free: 10 }), "{error}");
    assert!(error.to_string().contains("2 short"), "{error}");
}

#[test]
fn commit_takes_what_was_written_and_no_more() {
    let (mut ledger, mut array) = ledger();
    let id = ledger.admit().unwrap();
    ledger.prepare_forward(&[StepRequest { id, start: 0, tokens: 3 }], &mut array).unwrap();
    let error = ledger.commit(id, 4).unwrap_err();
    assert!(matches!(error, KvError::AcceptedTooMany { accepted: 4, written: 3, .. }), "{error}");
    ledger.commit(id, 2).unwrap();
    assert_eq!(ledger.committed(id).unwrap(), 2);
    assert!(matches!(ledger.commit(id, 1), Err(KvError::AcceptedTooMany { written: 0, .. })));
    ledger.prepare_forward(&[StepRequest { id, start: 2, tokens: 4 }], &mut array).unwrap();
    let error = ledger.commit(id, 3).unwrap_err();
    assert!(matches!(error, KvError::NotRollbackable { written: 4, most: 3, .. }), "{error}");
    ledger.commit(id, 4).unwrap();
    assert_eq!(ledger.committed(id).unwrap(), 6);
}

#[test]
fn settings_out_of_range_are_named() {
    let check = |change: fn(&mut CacheConfig), name: &str| {
        let mut config = config();
        change(&mut config);
        let error = Ledger::new(&config).unwrap_err();
        assert!(matches!(error, KvError::Config { setting, .. } if setting == name), "{error}");
    };
    check(|config| config.max_draft = 128, "max_draft");
    check(|config| config.max_requests = 0, "max_requests");
    check(|config| config.num_blocks = 0, "num_blocks");
    check(|config| config.max_context = 2_000_000, "max_context");
    check(|config| config.max_step_tokens = 0, "max_step_tokens");
    check(|config| config.model.layers.clear(), "model.layers");
}

#[test]
fn memory_decides_the_blocks() {
    let flash = || ModelConfig::preset("flash").unwrap();
    let config = CacheConfig::for_memory(flash(), 64 << 30, 64).unwrap();
    let cache = dsv4_kv::Capacity::new(&config);
    let left = (64 << 30) - cache.bytes();
    assert!(left < cache.block_bytes, "another block does not fit");
    let error = CacheConfig::for_memory(flash(), 1 << 20, 64).unwrap_err();
    assert!(matches!(error, KvError::MemoryTooSmall { slots: 64, .. }), "{error}");
}

/// Spec section 3.4: bytes per token of context over all layers, window excluded.
#[test]
fn bytes_per_block_are_those_of_the_released_models() {
    for (model, per_block) in
        [("flash", 21 * 32 * (584 + 68) + 20 * 584), ("pro", 30 * 32 * (584 + 68) + 31 * 584)]
    {
        let config =
            CacheConfig::for_memory(ModelConfig::preset(model).unwrap(), 1 << 40, 1).unwrap();
        assert_eq!(dsv4_kv::schema::Schema::new(&config).block_bytes(), per_block, "{model}");
    }
}

#[test]
fn a_configuration_survives_json() {
    let json = serde_json::to_string(&config()).unwrap();
    assert_eq!(serde_json::from_str::<CacheConfig>(&json).unwrap(), config());
}
