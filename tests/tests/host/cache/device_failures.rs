//! Every device call of a step, of a capture and of a replay fails in turn, before it does its work and after. Plain
//! admission and release make no device calls. If a call fails before the first kernel of a layer, nothing has changed.
//! After it, other requests hold their bytes, requests with at most `max_draft` + 1 tokens run again, and a request
//! with more can only be released.

use dsv4_kv::device::{EmuOptions, Emulator};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::{Accepted, CacheConfig, KvError, LayerGroup, RequestId};
use dsv4_kv_tests::failing::{Failing, Failure};
use dsv4_kv_tests::fed::{Fed, Padding, Part, begin};
use dsv4_kv_tests::inputs::download;
use dsv4_kv_tests::stories::{Stored, Story, config};
use kv_layout::geometry::LayerKind::{self, Csa, Hca, Swa};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;

type Device = Failing<Emulator>;

/// One layer of each kind, and a draft layer.
const LAYERS: [LayerKind; 4] = [Swa, Csa, Hca, Swa];
/// Tokens of the other request, which must not be disturbed.
const OTHER: usize = 133;
const MAX_DRAFT: u32 = 2;

struct Cache {
    fed: Fed<Device>,
    stories: [Story; 2],
    stored: [Vec<Stored>; 2],
    other: RequestId,
    /// Tokens of the failing request before the step that fails.
    start: usize,
}

/// When a step failed.
enum Left {
    /// Before a kernel of a layer was queued.
    Begin,
    /// Later.
    Layers,
}

impl Cache {
    fn new(start: usize) -> Self {
        let formats = (MainFormat::Ue8m0, IndexFormat::Mxfp4);
        let device = Failing::emulated(EmuOptions::default());
        let base = config(&LAYERS, formats, 3);
        let model = ModelConfig { mtp_layers: 1, ..base.model.clone() };
        let config = CacheConfig { model, max_draft: MAX_DRAFT, num_blocks: 12, ..base };
        let mut fed = Fed::new(&device, config);
        let stories = [1, 2].map(|seed| Story::random(&LAYERS, 300, seed));
        let stored = stories.each_ref().map(|story| story.stored(&device, formats));
        let other = fed.manager.admit().unwrap();
        fed.step(&[Part::new(other, &stories[0], 0..OTHER)], Padding::None);
        Self { fed, stories, stored, other, start }
    }

    /// Admits a request and runs its first tokens.
    fn request(&mut self) -> RequestId {
        let id = self.fed.manager.admit().unwrap();
        self.fed.step(&[Part::new(id, &self.stories[1], 0..self.start)], Padding::None);
        id
    }

    /// The ledger as JSON, without the field that only says which rows kernels may have written.
    fn ledger(&self) -> serde_json::Value {
        let mut ledger = serde_json::to_value(&*self.fed.manager.ledger()).unwrap();
        remove(&mut ledger, "written_to");
        ledger
    }

    /// The device's block table, as far as requests hold blocks.
    fn table(&self) -> Vec<Vec<i32>> {
        let table = download(&self.fed.stream, &self.fed.manager.device_block_table());
        let ledger = self.fed.manager.ledger();
        let width = table.len() / 3;
        let row = |slot: u32| {
            let id = ledger.request_in(dsv4_kv::SlotId(slot));
            let held = id.map_or(0, |id| ledger.block_table(id).unwrap().len());
            table[slot as usize * width..][..held].to_vec()
        };
        (0..3).map(row).collect()
    }

    /// Runs a step of `tokens` tokens of a request in which call `call` fails; `None` if the step makes fewer calls.
    fn fail(&mut self, id: RequestId, tokens: usize, call: u64, how: Failure) -> Option<Left> {
        let parts = [Part::new(id, &self.stories[1], self.start..self.start + tokens)];
        let Fed { manager, stream, inputs } = &mut self.fed;
        inputs.load(stream, &parts, tokens as u32);
        let device = manager.device().clone();
        let backend = device.backend();
        backend.fail(call, how);
        let mut left = Left::Begin;
        let mut run = || -> Result<(), KvError> {
            let mut steps = begin(manager, stream, &parts, Padding::None)?;
            left = Left::Layers;
            for step in &mut steps {
                inputs.run(step, &mut |_, _| Ok(()))?;
            }
            // Accepts no token, so that the next attempt starts at the same position.
            let none = Accepted::count(id, 0);
            steps.into_iter().try_for_each(|step| step.commit(&[none]))
        };
        let result = run();
        let failed = backend.failed();
        backend.fail_nothing();
        match result {
            Err(KvError::Device(_)) => {
                assert!(failed.is_some(), "it fails as it was told to");
                Some(left)
            }
            // The whole step was queued. A long step cannot accept 0 tokens.
            Ok(()) | Err(KvError::NotRollbackable { .. }) => {
                assert!(failed.is_none(), "the failure of {failed:?} was swallowed");
                None
            }
            Err(other) => panic!("call {call}: {other}"),
        }
    }

    fn holds(&self, id: RequestId, which: usize, tokens: usize) {
        self.fed.assert_holds(id, &self.stories[which], &self.stored[which], tokens);
    }
}

fn remove(value: &mut serde_json::Value, key: &str) {
    match value {
        serde_json::Value::Object(map) => {
            map.remove(key);
            map.values_mut().for_each(|value| remove(value, key));
        }
        serde_json::Value::Array(values) => values.iter_mut().for_each(|value| remove(value, key)),
        _ => {}
    }
}

/// Fails each call of a step that closes entries in every compressed layer and takes a block.
fn check(start: usize, tokens: usize) {
    let mut cache = Cache::new(start);
    let long = tokens > MAX_DRAFT as usize + 1;
    for how in [Failure::Instead, Failure::After] {
        let mut failures = [0, 0];
        let mut id = cache.request();
        for call in 0.. {
            let (ledger, table) = (cache.ledger(), cache.table());
            let before = serde_json::to_value(&*cache.fed.manager.ledger()).unwrap();
            let Some(left) = cache.fail(id, tokens, call, how) else { break };
            assert_eq!(cache.ledger(), ledger, "{how:?}, call {call}");
            assert_eq!(cache.table(), table, "{how:?}, call {call}");
            let next = [Part::new(id, &cache.stories[1], start..start + 1)];
            let Fed { manager, stream, .. } = &mut cache.fed;
            let next = begin(manager, stream, &next, Padding::None).map(drop);
            match (left, next) {
                (Left::Begin, next) => {
                    next.unwrap();
                    let after = serde_json::to_value(&*cache.fed.manager.ledger()).unwrap();
                    assert_eq!(after, before, "{how:?}, call {call}");
                    failures[0] += 1;
                }
                (Left::Layers, Ok(())) => failures[1] += 1,
                (Left::Layers, Err(KvError::Overwritten { request, .. })) => {
                    assert!(long && request == id, "{how:?}, call {call}");
                    failures[1] += 1;
                    cache.fed.manager.release(id).unwrap();
                    id = cache.request();
                }
                (Left::Layers, Err(other)) => panic!("{how:?}, call {call}: {other}"),
            }
            cache.holds(cache.other, 0, OTHER);
            cache.holds(id, 1, start);
        }
        assert!(failures[0] > 4 && failures[1] > 3, "{how:?}: {failures:?}");
        // The rows that failed steps left do not show in the final contents of the request.
        if long {
            // The last attempt, which did not fail, was rejected.
            cache.fed.manager.release(id).unwrap();
            id = cache.request();
        }
        let end = start + tokens;
        cache.fed.step(&[Part::new(id, &cache.stories[1], start..end)], Padding::None);
        for position in end..260 {
            let part = Part::new(id, &cache.stories[1], position..position + 1);
            cache.fed.step(&[part], Padding::None);
        }
        cache.holds(id, 1, 260);
        cache.holds(cache.other, 0, OTHER);
        cache.fed.manager.release(id).unwrap();
    }
    cache.fed.manager.check_faults(&cache.fed.stream).unwrap();
}

#[test]
fn a_short_step_that_fails_can_run_again() {
    check(126, 3);
}

#[test]
fn a_decode_step_that_fails_can_run_again() {
    check(127, 1);
}

#[test]
fn a_long_step_that_fails_harms_its_request_alone() {
    check(126, 100);
}

/// Admission and release make no device call, so nothing can fail.
#[test]
fn admission_and_release_make_no_device_call() {
    let mut cache = Cache::new(127);
    let device = cache.fed.manager.device().clone();
    device.backend().fail_nothing();
    let id = cache.fed.manager.admit().unwrap();
    cache.fed.manager.release(id).unwrap();
    assert_eq!(device.backend().calls(), 0);
}

/// However often slots change hands between two steps of a poisoned cache, the next step poisons each slot once.
#[test]
fn a_slot_that_changes_hands_is_poisoned_once() {
    let calls_after = |releases: usize| {
        let device = Failing::emulated(EmuOptions::default());
        let formats = (MainFormat::Ue8m0, IndexFormat::Mxfp4);
        let config = CacheConfig { poison: true, ..config(&LAYERS[..3], formats, 3) };
        let mut fed = Fed::new(&device, config);
        for _ in 0..releases {
            let id = fed.manager.admit().unwrap();
            fed.manager.release(id).unwrap();
        }
        let Fed { manager, stream, .. } = &mut fed;
        device.backend().fail_nothing();
        drop(begin(manager, stream, &[], Padding::None).unwrap());
        device.backend().calls()
    };
    let (none, one, many) = (calls_after(0), calls_after(1), calls_after(100_000));
    assert!(one > none, "a slot is poisoned: {none} calls, then {one}");
    assert_eq!(one, many);
}

/// A capture that fails leaves the cache as it was. A replay that fails leaves a step that can run again.
#[test]
fn a_capture_or_a_replay_that_fails_can_be_repeated() {
    for how in [Failure::Instead, Failure::After] {
        let start = 127;
        let mut cache = Cache::new(start);
        let id = cache.request();
        let padding = cache.fed.bucket(2, 1);
        let Padding::Bucket(bucket) = padding else { unreachable!() };
        let (ledger, table, bytes) = (cache.ledger(), cache.table(), cache.fed.pool_bytes());
        let device = cache.fed.manager.device().clone();
        let retained = cache.fed.inputs.memory();
        let mut failed = 0;
        let graph = loop {
            let Fed { manager, stream, inputs } = &mut cache.fed;
            device.backend().fail(failed, how);
            let graph = manager.capture(stream, &bucket, retained.clone(), |layers| {
                inputs.run(layers, &mut |_, _| Ok(()))
            });
            let call = device.backend().failed();
            device.backend().fail_nothing();
            match graph {
                Ok(graph) => {
                    assert!(call.is_none(), "the failure of {call:?} was swallowed");
                    break graph;
                }
                Err(KvError::Device(_)) => failed += 1,
                Err(other) => panic!("{other}"),
            }
            assert_eq!((cache.ledger(), cache.table()), (ledger.clone(), table.clone()));
            assert!(cache.fed.pool_bytes() == bytes, "a capture runs nothing");
        };
        assert!(failed > 4, "{failed}");

        let parts = [Part::new(id, &cache.stories[1], start..start + 1)];
        cache.fed.inputs.load(&cache.fed.stream, &parts, 2);
        let mut steps = begin(&mut cache.fed.manager, &cache.fed.stream, &parts, padding).unwrap();
        device.backend().fail(0, how);
        assert!(matches!(steps[0].replay(&graph), Err(KvError::Device(_))));
        device.backend().fail_nothing();
        drop(steps);
        assert_eq!((cache.ledger(), cache.table()), (ledger, table));
        cache.fed.step(&parts, padding);
        cache.holds(id, 1, start + 1);
        cache.holds(cache.other, 0, OTHER);
    }
}

/// A replayed step that is dropped has written rows, like a step whose layers were updated one by one. With more tokens
/// than can be taken back, its request is refused. A step that was only begun has written nothing.
#[test]
fn a_replayed_step_that_is_dropped_has_written_its_rows() {
    const START: usize = 130;
    let device = Failing::emulated(EmuOptions::default());
    let base = config(&LAYERS[..3], (MainFormat::Ue8m0, IndexFormat::Mxfp4), 1);
    let mut fed = Fed::new(&device, CacheConfig { max_draft: 0, ..base });
    let story = Story::random(&LAYERS[..3], START + 2, 3);
    let id = fed.manager.admit().unwrap();
    fed.step(&[Part::new(id, &story, 0..START)], Padding::None);
    let padding = fed.bucket(2, 2);
    let graphs = fed.capture(padding, &[], &mut |_, _| Ok(()));
    let parts = [Part::new(id, &story, START..START + 2)];
    fed.inputs.load(&fed.stream, &parts, 2);
    let Fed { manager, stream, .. } = &mut fed;
    drop(begin(manager, stream, &parts, padding).unwrap());
    let mut steps = begin(manager, stream, &parts, padding).unwrap();
    for (step, graph) in steps.iter_mut().zip(&graphs) {
        step.replay(graph).unwrap();
    }
    drop(steps);
    let error = begin(manager, stream, &parts, padding).err().unwrap();
    assert!(
        matches!(error, KvError::Overwritten { request, group: LayerGroup::Trunk, committed: 130 }
            if request == id),
        "{error}"
    );
}
