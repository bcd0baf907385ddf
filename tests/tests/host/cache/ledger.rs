//! The ledger by itself: every refusal is typed, names value and limit, and changes nothing.

use dsv4_kv::kv_layout::attention::KeyCluster;
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::ledger::Written;
use dsv4_kv::{
    Accepted, BlockId, CacheConfig, KvError, LayerGroup, Ledger, Prompt, RequestId, StepPlan,
    StepRequest,
};

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
    let array = vec![0; ledger.largest_layout().elements()];
    (ledger, array)
}

/// The observable state of a ledger.
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

/// Begins a step of the trunk.
fn begin(
    ledger: &mut Ledger,
    array: &mut [i32],
    step: &[StepRequest],
) -> Result<StepPlan, KvError> {
    ledger.begin_step(LayerGroup::Trunk, step, array)
}

/// Commits a step of the trunk: (request, number of accepted tokens).
fn commit(ledger: &mut Ledger, accepted: &[(RequestId, u32)]) -> Result<(), KvError> {
    let accepted: Vec<_> = accepted.iter().map(|&(id, n)| Accepted::count(id, n)).collect();
    ledger.commit_step(LayerGroup::Trunk, &accepted)
}

/// Asserts that the step is refused, and that neither the ledger nor the array changed. Returns the error.
fn refused(
    ledger: &mut Ledger,
    array: &mut [i32],
    ids: &[RequestId],
    step: &[StepRequest],
) -> KvError {
    let before = (state(ledger, ids), array.to_vec());
    let error = begin(ledger, array, step).unwrap_err();
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
    let plan = begin(&mut ledger, &mut array, &step).unwrap();
    let (tokens, tokens_per_request, context) = (303, 300, 300);
    let (requests, new_blocks, ring_copies) = (2, 3, None);
    let want = StepPlan { tokens, tokens_per_request, requests, context, new_blocks, ring_copies };
    assert_eq!(plan, want);
    commit(&mut ledger, &[(b, 3), (a, 300)]).unwrap();
    let held: Vec<_> = ledger.block_table(a).unwrap().collect();
    assert_eq!(held, [BlockId(0), BlockId(1), BlockId(2)]);
    let step = [StepRequest { id: b, start: 3, tokens: 1 }];
    assert_eq!(begin(&mut ledger, &mut array, &step).unwrap().new_blocks, 1);
    commit(&mut ledger, &[(b, 1)]).unwrap();
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
    begin(&mut ledger, &mut array, &step(0, 130)).unwrap();
    commit(&mut ledger, &[(id, 130)]).unwrap();
    assert_eq!(begin(&mut ledger, &mut array, &step(130, 3)).unwrap().new_blocks, 1);
    commit(&mut ledger, &[(id, 1)]).unwrap();
    assert_eq!(ledger.committed(id).unwrap(), 131);
    assert_eq!(begin(&mut ledger, &mut array, &step(131, 1)).unwrap().new_blocks, 0);
}

/// A rejected step leaves the ledger as it was, down to the order of the free list.
#[test]
fn a_rejected_step_never_was() {
    let (mut ledger, mut array) = ledger();
    let (a, b) = (ledger.admit().unwrap(), ledger.admit().unwrap());
    let step = |id, start, tokens| StepRequest { id, start, tokens };
    begin(&mut ledger, &mut array, &[step(a, 0, 200), step(b, 0, 130)]).unwrap();
    commit(&mut ledger, &[(a, 200), (b, 130)]).unwrap();
    let record = |ledger: &Ledger| serde_json::to_value(ledger).unwrap();
    let before = record(&ledger);
    for _ in 0..3 {
        begin(&mut ledger, &mut array, &[step(b, 130, 600), step(a, 200, 200)]).unwrap();
        assert_ne!(record(&ledger), before);
        ledger.reject_step(LayerGroup::Trunk, Written::Nothing);
        assert_eq!(record(&ledger), before);
    }
    // A rejected step may have written rows of at most `max_draft` + 1 tokens per request; the request can run again.
    begin(&mut ledger, &mut array, &[step(b, 130, 3), step(a, 200, 3)]).unwrap();
    ledger.reject_step(LayerGroup::Trunk, Written::Rows);
    assert_eq!(state(&ledger, &[a, b]).free_blocks, 10 - 2 - 1);
    begin(&mut ledger, &mut array, &[step(b, 130, 2), step(a, 200, 3)]).unwrap();
    // With more tokens the request can only be released.
    ledger.reject_step(LayerGroup::Trunk, Written::Rows);
    begin(&mut ledger, &mut array, &[step(b, 130, 1), step(a, 200, 4)]).unwrap();
    ledger.reject_step(LayerGroup::Trunk, Written::Rows);
    let error = refused(&mut ledger, &mut array, &[a, b], &[step(a, 200, 1)]);
    assert!(matches!(error, KvError::Overwritten { request, .. } if request == a), "{error}");
    begin(&mut ledger, &mut array, &[step(b, 130, 1)]).unwrap();
    commit(&mut ledger, &[(b, 1)]).unwrap();
    ledger.release(a).unwrap();
}

#[test]
fn slots_run_out_and_come_back_with_a_new_generation() {
    let (mut ledger, _) = ledger();
    let ids: Vec<_> = (0..3).map(|_| ledger.admit().unwrap()).collect();
    assert!(matches!(ledger.admit(), Err(KvError::NoFreeSlot { slots: 3 })));
    ledger.release(ids[1]).unwrap();
    let again = ledger.admit().unwrap();
    assert_eq!((again.slot(), again.generation()), (ids[1].slot(), ids[1].generation() + 1));
}

#[test]
fn a_stale_handle_reaches_nobody() {
    let (mut ledger, mut array) = ledger();
    let old = ledger.admit().unwrap();
    ledger.release(old).unwrap();
    let new = ledger.admit().unwrap();
    assert_eq!(old.slot(), new.slot());
    let step = [StepRequest { id: old, start: 0, tokens: 1 }];
    let error = refused(&mut ledger, &mut array, &[new], &step);
    assert!(matches!(error, KvError::UnknownRequest { request } if request == old), "{error}");
    assert!(matches!(ledger.release(old), Err(KvError::UnknownRequest { .. })));
    assert!(matches!(ledger.committed(old), Err(KvError::UnknownRequest { .. })));
    assert!(matches!(ledger.fork(old), Err(KvError::UnknownRequest { .. })));
    assert!(matches!(ledger.want_checkpoint(old, 128), Err(KvError::UnknownRequest { .. })));
    assert!(matches!(ledger.rewind_draft(old, 0), Err(KvError::UnknownRequest { .. })));
    assert!(matches!(ledger.block_table(old), Err(KvError::UnknownRequest { .. })));
    assert_eq!(ledger.live_requests(), 1);
}

/// A block table is read by the id of its request, which has a generation. The id of an ended request is refused,
/// although another has its slot and its very blocks. So is the id of a suspended request, which has both again after
/// it is resumed.
#[test]
fn a_stale_block_table_is_refused() {
    let mut ledger = Ledger::new(&CacheConfig { max_suspended: 1, ..config() }).unwrap();
    let mut array = vec![0; ledger.largest_layout().elements()];
    let mut admitted = |ledger: &mut Ledger| {
        let id = ledger.admit().unwrap();
        let step = [StepRequest { id, start: 0, tokens: 300 }];
        ledger.begin_step(LayerGroup::Trunk, &step, &mut array).unwrap();
        commit(ledger, &[(id, 300)]).unwrap();
        (id, ledger.block_table(id).unwrap().collect::<Vec<_>>())
    };
    let refused = |ledger: &Ledger, id: RequestId| {
        let table = ledger.block_table(id).err();
        assert!(matches!(table, Some(KvError::UnknownRequest { request }) if request == id));
        assert!(matches!(ledger.own_blocks(id).err(), Some(KvError::UnknownRequest { .. })));
    };
    let (old, before) = admitted(&mut ledger);
    ledger.release(old).unwrap();
    let (new, after) = admitted(&mut ledger);
    assert_eq!((new.slot(), &after), (old.slot(), &before), "the same slot and blocks");
    refused(&ledger, old);
    let suspended = ledger.suspend(new).unwrap();
    refused(&ledger, new);
    let resumed = ledger.resume(suspended).unwrap();
    assert_eq!(resumed.slot(), new.slot());
    refused(&ledger, new);
    assert!(ledger.block_table(resumed).unwrap().eq(after), "it has its blocks again");
}

/// An id of another ledger is refused, although slot and generation equal those of a live request.
#[test]
fn an_id_of_another_ledger_is_refused() {
    let ((mut ledger, mut array), (mut other, _)) = (self::ledger(), self::ledger());
    let (own, foreign) = (ledger.admit().unwrap(), other.admit().unwrap());
    assert_eq!((own.slot(), own.generation()), (foreign.slot(), foreign.generation()));
    let step = [StepRequest { id: foreign, start: 0, tokens: 1 }];
    let error = refused(&mut ledger, &mut array, &[own], &step);
    assert!(matches!(error, KvError::ForeignRequest { request } if request == foreign), "{error}");
    assert!(matches!(ledger.release(foreign), Err(KvError::ForeignRequest { .. })));
    assert!(matches!(ledger.committed(foreign), Err(KvError::ForeignRequest { .. })));
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
    assert!(matches!(error, KvError::ContextTooLong { end: 2001, limit: 2000, .. }), "{error}");
    let error = refuse(&[good, part(0, u32::MAX)]);
    assert!(matches!(error, KvError::ContextTooLong { .. }), "{error}");
    let error = refuse(&[good, part(0, 1301)]);
    assert!(matches!(error, KvError::StepTooLong { tokens: 1501, limit: 1500, .. }), "{error}");
    let error = refuse(&[good, good]);
    assert!(matches!(error, KvError::DuplicateRequest { request } if request == a), "{error}");
    let error = refuse(&[good, part(0, 1), good, part(0, 1)]);
    assert!(matches!(error, KvError::TooManyRequests { requests: 4, limit: 3, .. }), "{error}");
    let error = refuse(&[good, part(0, 1200)]);
    assert!(matches!(error, KvError::OutOfBlocks { needed: 12, free: 10 }), "{error}");
    assert!(error.to_string().contains("12 new blocks are needed, and 10 are free"), "{error}");
}

/// A refused commit leaves the step open and changes nothing.
#[test]
fn commit_takes_what_was_written_and_no_more() {
    let (mut ledger, mut array) = ledger();
    let (id, other) = (ledger.admit().unwrap(), ledger.admit().unwrap());
    let error = commit(&mut ledger, &[]).unwrap_err();
    assert!(matches!(error, KvError::NoOpenStep { group: LayerGroup::Trunk }), "{error}");
    let step = |start, tokens| [StepRequest { id, start, tokens }];
    begin(&mut ledger, &mut array, &step(0, 3)).unwrap();
    let before = serde_json::to_value(&ledger).unwrap();
    let mut refuse = |accepted: &[Accepted<'_>]| {
        let error = ledger.commit_step(LayerGroup::Trunk, accepted).unwrap_err();
        assert_eq!(serde_json::to_value(&ledger).unwrap(), before, "{error}");
        error
    };
    let error = refuse(&[Accepted::count(id, 4)]);
    assert!(matches!(error, KvError::AcceptedTooMany { accepted: 4, written: 3, .. }), "{error}");
    let error = refuse(&[]);
    assert!(matches!(error, KvError::CommitMismatch { named: 0, requests: 1 }), "{error}");
    let error = refuse(&[Accepted::count(id, 1), Accepted::count(id, 1)]);
    assert!(matches!(error, KvError::CommitMismatch { named: 2, requests: 1 }), "{error}");
    let error = refuse(&[Accepted::count(other, 0)]);
    assert!(matches!(error, KvError::NotInStep { request, .. } if request == other), "{error}");
    let error = refuse(&[Accepted { id, accepted: 2, tokens: &[7] }]);
    assert!(matches!(error, KvError::TokenCount { accepted: 2, given: 1, .. }), "{error}");
    assert!(matches!(ledger.release(id), Err(KvError::RequestInStep { .. })));

    let told = Accepted { id, accepted: 2, tokens: &[7, 8] };
    ledger.commit_step(LayerGroup::Trunk, &[told]).unwrap();
    assert_eq!(ledger.committed(id).unwrap(), 2);
    begin(&mut ledger, &mut array, &step(2, 4)).unwrap();
    let error = commit(&mut ledger, &[(id, 0)]).unwrap_err();
    assert!(matches!(error, KvError::NotRollbackable { written: 4, limit: 3, .. }), "{error}");
    commit(&mut ledger, &[(id, 4)]).unwrap();
    assert_eq!(ledger.committed(id).unwrap(), 6);
}

/// Draft layers have positions of their own, need no blocks, and go back as far as their rings allow.
#[test]
fn draft_layers_run_ahead_and_back() {
    let (mut ledger, mut array) = ledger();
    let id = ledger.admit().unwrap();
    let group = LayerGroup::Draft;
    let mut draft = |ledger: &mut Ledger, start, tokens| {
        let step = [StepRequest { id, start, tokens }];
        let plan = ledger.begin_step(group, &step, &mut array).unwrap();
        assert_eq!(plan.new_blocks, 0);
        ledger.commit_step(group, &[Accepted::count(id, tokens)]).unwrap();
    };
    draft(&mut ledger, 0, 200);
    (200..203).for_each(|position| draft(&mut ledger, position, 1));
    let at = |ledger: &Ledger| ledger.committed_in(group, id).unwrap();
    assert_eq!((at(&ledger), ledger.committed(id).unwrap(), ledger.free_blocks()), (203, 0, 10));
    let to = |ledger: &mut Ledger, to| ledger.rewind_draft(id, to).unwrap_err().to_string();
    let advice = |to| {
        let reason = match to {
            204 => "that is beyond the last one they have, and rewinding only goes back",
            _ => "rows that earlier positions need are overwritten, or never were in its slot",
        };
        format!(
            "{id}: the draft layers can go back to between 200 and 203 tokens, not to {to}: {reason}"
        )
    };
    assert_eq!(to(&mut ledger, 204), advice(204));
    assert_eq!(to(&mut ledger, 199), advice(199));
    ledger.rewind_draft(id, 201).unwrap();
    // The limit depends on the tokens that were written, 203, not on those that are final.
    assert!(matches!(ledger.rewind_draft(id, 199), Err(KvError::CannotRewind { .. })));
    ledger.rewind_draft(id, 200).unwrap();
    draft(&mut ledger, 200, 2);
    assert_eq!(at(&ledger), 202);
    assert!(matches!(ledger.rewind_draft(id, 199), Err(KvError::CannotRewind { .. })));
}

/// A request that continues from a checkpoint has the window rows for that position. Its draft layers cannot go back
/// before it, where they would read rows of the slot's last request.
#[test]
fn draft_layers_stay_behind_no_checkpoint() {
    let config = CacheConfig { num_checkpoints: 4, ..config() };
    let mut ledger = Ledger::new(&config).unwrap();
    let mut array = vec![0; ledger.largest_layout().elements()];
    let tokens: Vec<u32> = (0..300).collect();
    let prompt = Prompt { tokens: &tokens, salt: b"", adapter: b"" };
    let first = ledger.admit_with(&prompt).unwrap().id;
    let step = [StepRequest { id: first, start: 0, tokens: 300 }];
    ledger.begin_step(LayerGroup::Trunk, &step, &mut array).unwrap();
    let accepted = [Accepted { id: first, accepted: 300, tokens: &tokens }];
    ledger.commit_step(LayerGroup::Trunk, &accepted).unwrap();
    let second = ledger.admit_with(&prompt).unwrap();
    assert_eq!(second.reused, 256);
    for position in [0, 253, 255] {
        let error = ledger.rewind_draft(second.id, position).unwrap_err();
        assert!(
            matches!(error, KvError::CannotRewind { committed: 256, earliest: 256, .. }),
            "{error}"
        );
    }
    ledger.rewind_draft(second.id, 256).unwrap();
    // Inside the tokens that it has computed itself it goes back as usual.
    let step = [StepRequest { id: second.id, start: 256, tokens: 6 }];
    ledger.begin_step(LayerGroup::Draft, &step, &mut array).unwrap();
    ledger.commit_step(LayerGroup::Draft, &[Accepted::count(second.id, 6)]).unwrap();
    let refused = ledger.rewind_draft(second.id, 258).unwrap_err();
    assert!(matches!(refused, KvError::CannotRewind { earliest: 259, .. }), "{refused}");
    ledger.rewind_draft(second.id, 259).unwrap();
}

/// A chunk of one request makes a step save checkpoints, also that of another request with few tokens in it, not all of
/// which are accepted. If these do not reach the position, nothing is saved, the checkpoint is free again, and a later
/// step saves it.
#[test]
fn what_was_not_accepted_is_not_saved() {
    for accepted in 0..=3 {
        let mut ledger = Ledger::new(&CacheConfig { num_checkpoints: 1, ..config() }).unwrap();
        let mut array = vec![0; ledger.largest_layout().elements()];
        let (long, short) = (ledger.admit().unwrap(), ledger.admit().unwrap());
        let mut run = |ledger: &mut Ledger, parts: &[(RequestId, u32, u32)], accepted: &[u32]| {
            let part = |&(id, start, tokens)| StepRequest { id, start, tokens };
            begin(ledger, &mut array, &parts.iter().map(part).collect::<Vec<_>>()).unwrap();
            let free = ledger.free_checkpoints();
            let accepted = parts.iter().zip(accepted).map(|(&(id, ..), &accepted)| (id, accepted));
            commit(ledger, &accepted.collect::<Vec<_>>()).unwrap();
            free
        };
        run(&mut ledger, &[(short, 0, 126)], &[126]);
        ledger.want_checkpoint(short, 128).unwrap();
        let free = run(&mut ledger, &[(long, 0, 100), (short, 126, 3)], &[100, accepted]);
        assert_eq!(free, 0, "the step writes the checkpoint");
        let mut saved: Vec<_> = ledger.take_saved().collect();
        if accepted < 2 {
            assert_eq!((saved.len(), ledger.free_checkpoints()), (0, 1), "{accepted} accepted");
            let start = 126 + accepted;
            run(&mut ledger, &[(long, 100, 100), (short, start, 3)], &[100, 3]);
            saved = ledger.take_saved().collect();
        }
        let (id, saved) = saved.pop().expect("it is saved once its tokens are final");
        assert_eq!((id, saved.boundary(), ledger.free_checkpoints()), (short, 128, 0));
        ledger.discard_checkpoint(saved).unwrap();
    }
}

/// A request in an open step of either group cannot be released, forked, suspended, exported or rewound: each refusal
/// names the group, and changes nothing.
#[test]
fn a_request_in_a_step_stays_as_it_is() {
    type Call = (&'static str, fn(&mut Ledger, RequestId) -> Option<KvError>);
    let calls: [Call; 5] = [
        ("release", |ledger, id| ledger.release(id).err()),
        ("fork", |ledger, id| ledger.fork(id).err()),
        ("suspend", |ledger, id| ledger.suspend(id).err()),
        ("positions", |ledger, id| ledger.positions(id).err()),
        ("rewind_draft", |ledger, id| ledger.rewind_draft(id, 130).err()),
    ];
    for open in LayerGroup::ALL {
        let mut ledger = Ledger::new(&CacheConfig { max_suspended: 1, ..config() }).unwrap();
        let mut array = vec![0; ledger.largest_layout().elements()];
        let id = ledger.admit().unwrap();
        for group in LayerGroup::ALL {
            let step = [StepRequest { id, start: 0, tokens: 130 }];
            ledger.begin_step(group, &step, &mut array).unwrap();
            ledger.commit_step(group, &[Accepted::count(id, 130)]).unwrap();
        }
        let step = [StepRequest { id, start: 130, tokens: 1 }];
        ledger.begin_step(open, &step, &mut array).unwrap();
        let before = serde_json::to_value(&ledger).unwrap();
        for (name, call) in calls {
            // Rewinding concerns the draft layers alone, so an open step of the trunk does not forbid it.
            let is_refused = name != "rewind_draft" || open == LayerGroup::Draft;
            let refused = call(&mut ledger, id);
            let is_right = match refused {
                Some(KvError::RequestInStep { request, group }) => (request, group) == (id, open),
                Some(_) => false,
                None => !is_refused,
            };
            assert!(is_right, "{name} in a step of {open:?}: {refused:?}");
            assert_eq!(serde_json::to_value(&ledger).unwrap(), before, "{name}");
        }
        ledger.commit_step(open, &[Accepted::count(id, 1)]).unwrap();
        assert_eq!(ledger.committed_in(open, id).unwrap(), 131);
    }
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
    check(|config| config.checkpoint_interval = 133, "checkpoint_interval (a multiple of 128)");
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
    assert!(matches!(&error, KvError::MemoryTooSmall(error) if error.slots == 64), "{error}");
}

/// Bytes per block over all layers, without windows.
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
    // Under its name until December 2026.
    let one_block = CacheConfig { attention_cluster: KeyCluster::OneBlock, ..config() };
    let json =
        serde_json::to_string(&one_block).unwrap().replace("attention_cluster", "attention_split");
    assert_eq!(serde_json::from_str::<CacheConfig>(&json).unwrap(), one_block);
}
