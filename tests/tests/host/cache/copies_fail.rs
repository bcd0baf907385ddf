//! Every device call of a copy of a request's state fails in turn, before it does its work and after. Nothing has
//! changed then, and the next attempt succeeds.

use dsv4_kv::device::{EmuOptions, Emulator};
use dsv4_kv::transfer::{MoveError, PrefixImport};
use dsv4_kv::{
    Accepted, CacheConfig, KvError, Launches, LayerGroup, Prompt, RequestId, StepRequest, Suspended,
};
use dsv4_kv_tests::failing::{Failing, Failure, each_call};
use dsv4_kv_tests::fed::{Fed, Padding, Part as StepPart, begin};
use dsv4_kv_tests::stories::{Stored, Story, config, tiny};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;

use super::tier;

type Cache = Fed<Failing<Emulator>>;

const FORMATS: (MainFormat, IndexFormat) = (MainFormat::Ue8m0, IndexFormat::Mxfp4);
const TOKENS: usize = 131;

/// The ledger as JSON, without the number of times that each slot changed hands, and what JSON leaves out: the contents
/// of the prefix tree, and the checkpoints that are kept aside for answers.
fn ledger(fed: &Cache) -> (serde_json::Value, String) {
    fn remove(value: &mut serde_json::Value) {
        match value {
            serde_json::Value::Object(map) => {
                map.remove("turns");
                map.values_mut().for_each(remove);
            }
            serde_json::Value::Array(values) => values.iter_mut().for_each(remove),
            _ => {}
        }
    }
    let ledger = fed.manager.ledger();
    let mut json = serde_json::to_value(&*ledger).unwrap();
    remove(&mut json);
    (json, format!("{:?}, {} outputs", ledger.tree_counts(), ledger.output_checkpoints()))
}

/// Runs `work` with each of its device calls failing in turn, until none is left. Returns the result of the attempt
/// that succeeded, and the number of failures.
fn fail_each<T>(
    fed: &mut Cache,
    how: Failure,
    mut work: impl FnMut(&mut Cache) -> Result<T, KvError>,
) -> (T, u64) {
    for (failures, call) in (0..).zip(each_call()) {
        let before = ledger(fed);
        fed.manager.device().backend().fail(call, how);
        let result = work(fed);
        let failed = fed.manager.device().backend().failed();
        fed.manager.device().backend().fail_nothing();
        match result {
            Ok(done) => {
                assert!(failed.is_none(), "the failure of {failed:?} was swallowed");
                return (done, failures);
            }
            Err(KvError::Device(_)) => assert_eq!(ledger(fed), before, "call {call}"),
            Err(error) => panic!("{error}"),
        }
    }
    unreachable!("some attempt makes fewer calls")
}

fn fed() -> (Cache, Story, Vec<Stored>, RequestId) {
    let device = Failing::emulated(EmuOptions::default());
    let base = config(&tiny(), FORMATS, 3);
    let config =
        CacheConfig { num_checkpoints: 1, max_suspended: 1, max_draft: 3, poison: true, ..base };
    let mut fed = Fed::new(&device, config);
    let story = Story::random(&tiny(), 160, 61);
    let stored = story.stored(&device, FORMATS);
    let id = fed.manager.admit().unwrap();
    fed.step(&[StepPart::new(id, &story, 0..TOKENS)], Padding::None);
    (fed, story, stored, id)
}

#[test]
fn a_failed_copy_changes_nothing() {
    for how in [Failure::Instead, Failure::After] {
        let (mut fed, story, stored, id) = fed();
        let stream = fed.stream.clone();
        let go_on = |fed: &mut Cache, id: RequestId| {
            let start = fed.manager.ledger().committed(id).unwrap() as usize;
            fed.step(&[StepPart::new(id, &story, start..start + 5)], Padding::None);
            fed.assert_holds(id, &story, &stored, start + 5);
        };
        let (saved, failures) = fail_each(&mut fed, how, |fed| {
            Ok(fed.manager.save_checkpoints(&stream, &[(id, 128)])?.remove(0))
        });
        assert!(failures >= 2, "{failures} calls of a save fail");
        let (fork, failures) = fail_each(&mut fed, how, |fed| fed.manager.fork(&stream, id));
        assert!(failures >= 3, "{failures} calls of a fork fail");
        go_on(&mut fed, fork);
        let (suspended, failures) =
            fail_each(&mut fed, how, |fed| fed.manager.suspend(&stream, id));
        assert!(failures >= 2, "{failures} calls of a suspension fail");
        let mut suspended: Option<Suspended> = Some(suspended);
        let (id, failures) = fail_each(&mut fed, how, |fed| {
            let resumed = fed.manager.resume(&stream, suspended.take().expect("it came back"));
            resumed.map_err(|refused| {
                let KvError::Device(_) = refused.error() else { panic!("{refused}") };
                let error = dsv4_kv::device::DeviceError::NotRecorded;
                suspended = Some(refused.into_suspended());
                error.into()
            })
        });
        assert!(failures >= 3, "{failures} calls of a resumption fail");
        go_on(&mut fed, id);
        fed.manager.discard_checkpoint(saved).unwrap();
    }
}

/// A request that is suspended gives the checkpoint of its answer to the prefix tree, but not if the suspension fails.
#[test]
fn a_failed_suspension_keeps_the_answers_checkpoint_aside() {
    for how in [Failure::Instead, Failure::After] {
        let device = Failing::emulated(EmuOptions::default());
        let config = CacheConfig {
            num_checkpoints: 2,
            max_suspended: 1,
            host_bytes: 0,
            keep_outputs: true,
            ..tier::settings()
        };
        let mut fed = Fed::new(&device, config);
        let (tokens, story) = (tier::tokens(), Story::random(&tier::LAYERS, tier::TOKENS, 61));
        let stream = fed.stream.clone();
        let prompt = tier::prompt(&tokens[..129], b"");
        let id = fed.manager.admit_with(&stream, &prompt).unwrap().id;
        tier::run(&mut fed, id, &story, 0);
        assert_eq!(fed.manager.ledger().output_checkpoints(), 1, "that of token 256");
        let (suspended, failures) =
            fail_each(&mut fed, how, |fed| fed.manager.suspend(&stream, id));
        assert!(failures >= 2, "{failures} calls of a suspension fail");
        assert_eq!(fed.manager.ledger().output_checkpoints(), 0);
        let id = fed.manager.resume(&stream, suspended).unwrap();
        fed.manager.release(id).unwrap();
        fed.manager.ledger().audit().unwrap();
    }
}

/// A checkpoint that is due stays due when its copy fails, and while the request is suspended.
#[test]
fn what_is_due_is_saved_after_a_failure() {
    for how in [Failure::Instead, Failure::After] {
        let (mut fed, story, _, _) = fed();
        let stream = fed.stream.clone();
        let id = fed.manager.admit().unwrap();
        fed.step(&[StepPart::new(id, &story, 0..127)], Padding::None);
        fed.manager.want_checkpoint(id, 128).unwrap();
        // A step of few tokens saves no checkpoint itself.
        fed.step(&[StepPart::new(id, &story, 127..129)], Padding::None);
        let (_, failures) = fail_each(&mut fed, how, |fed| {
            let result = fed.manager.save_wanted(&stream);
            assert_eq!(fed.manager.ledger().free_checkpoints(), u32::from(result.is_err()));
            result
        });
        assert!(failures >= 2, "{failures} calls fail");
        let (saved_of, saved) = fed.manager.take_saved().pop().expect("it was saved");
        assert_eq!((saved_of, saved.boundary()), (id, 128));
        fed.manager.save_wanted(&stream).unwrap();
        assert_eq!(fed.manager.take_saved(), [], "once");
        fed.manager.discard_checkpoint(saved).unwrap();

        let id = fed.manager.admit().unwrap();
        fed.step(&[StepPart::new(id, &story, 0..127)], Padding::None);
        fed.manager.want_checkpoint(id, 128).unwrap();
        fed.step(&[StepPart::new(id, &story, 127..129)], Padding::None);
        let suspended = fed.manager.suspend(&stream, id).unwrap();
        fed.manager.save_wanted(&stream).unwrap();
        assert_eq!(fed.manager.take_saved(), [], "it has no slot");
        let id = fed.manager.resume(&stream, suspended).unwrap();
        fed.manager.save_wanted(&stream).unwrap();
        let (saved_of, saved) = fed.manager.take_saved().pop().expect("it was saved");
        assert_eq!((saved_of, saved.boundary()), (id, 128));
        fed.manager.discard_checkpoint(saved).unwrap();
    }
}

/// If the copy of a restore fails, or after it the clearing of the draft layers' windows, the contents of the slot are
/// unknown: steps of both groups refuse its request until it is released or restored. A restore that fails before its
/// copy has changed nothing.
#[test]
fn a_restore_that_fails_half_way_marks_its_request() {
    for how in [Failure::Instead, Failure::After] {
        let (mut fed, story, _, _) = fed();
        let stream = fed.stream.clone();
        let id = fed.manager.admit().unwrap();
        fed.manager.want_checkpoint(id, 128).unwrap();
        fed.step(&[StepPart::new(id, &story, 0..TOKENS)], Padding::None);
        let (_, saved) = fed.manager.take_saved().pop().expect("the chunk saved it");
        assert!(!saved.has_draft(), "the windows of the draft layer are to be cleared");
        let mut lost = Vec::new();
        for call in 0.. {
            let other = fed.manager.admit().unwrap();
            fed.lose(&[StepPart::new(other, &story, 0..128)]);
            let before = ledger(&fed);
            fed.manager.device().backend().fail(call, how);
            let result = fed.manager.restore_from_other(&stream, other, &saved);
            let failed = fed.manager.device().backend().failed();
            fed.manager.device().backend().fail_nothing();
            if result.is_ok() {
                assert!(failed.is_none(), "the failure of {failed:?} was swallowed");
                fed.step(&[StepPart::new(other, &story, 128..133)], Padding::None);
                break;
            }
            lost.push(ledger(&fed) != before);
            let refused = lost.last() == Some(&true);
            assert_eq!(refusals(&mut fed, other), [refused; 2], "{how:?}, call {call}");
            // Nor can it be exported.
            let moves = fed.manager.positions(other);
            let is_lost = matches!(moves, Err(MoveError::Cache(KvError::Overwritten { .. })));
            assert_eq!(is_lost, refused, "{how:?}, call {call}");
            if call % 2 == 0 {
                fed.manager.restore_from_other(&stream, other, &saved).unwrap();
                assert_eq!(refusals(&mut fed, other), [false; 2], "restored, {how:?}, call {call}");
            }
            fed.manager.release(other).unwrap();
        }
        // The copy, and the two planes of the draft layer's window.
        assert!(lost.is_sorted() && !lost[0], "{how:?}: {lost:?}");
        assert_eq!(lost.iter().filter(|&&lost| lost).count(), 3, "{how:?}: {lost:?}");
        fed.manager.discard_checkpoint(saved).unwrap();
    }
}

/// Whether a step of each group is refused because the request has lost rows.
fn refusals(fed: &mut Cache, id: RequestId) -> [bool; 2] {
    LayerGroup::ALL.map(|group| {
        let step = [StepRequest { id, start: 128, tokens: 1 }];
        let stream = fed.stream.clone();
        let mut group = fed.manager.group(group).unwrap();
        match group.begin_step(&stream, Launches::Eager, &step) {
            Ok(_) => false,
            Err(KvError::Overwritten { request, committed: 128, .. }) if request == id => true,
            Err(error) => panic!("{error}"),
        }
    })
}

/// A request leaves this cache and returns under another id, while the device fails in the copies of both moves.
#[test]
fn a_failed_move_changes_nothing() {
    let cache_error = |error| match error {
        MoveError::Cache(error) => error,
        error => panic!("{error}"),
    };
    for how in [Failure::Instead, Failure::After] {
        let (mut fed, story, stored, id) = fed();
        let stream = fed.stream.clone();
        let mut staging = fed.manager.new_transfer_staging().unwrap();
        let at = fed.manager.positions(id).unwrap();
        let mut payload = vec![0; staging.layout().bytes(at) as usize];
        let ((), failures) = fail_each(&mut fed, how, |fed| {
            let export = fed.manager.export(&stream, &mut staging, id);
            export.and_then(|mut export| export.all(&mut payload)).map_err(cache_error)
        });
        assert!(failures > 5, "{failures} calls failed");
        let (moved, failures) = fail_each(&mut fed, how, |fed| {
            fed.manager.import(&stream, &mut staging, (at, &payload)).map_err(cache_error)
        });
        assert!(failures > 5, "{failures} calls failed");
        for id in [id, moved] {
            fed.step(&[StepPart::new(id, &story, TOKENS..TOKENS + 5)], Padding::None);
            fed.assert_holds(id, &story, &stored, TOKENS + 5);
        }
        fed.manager.check_poison(&stream).unwrap();
    }
}

/// A prefix leaves one cache and enters another, while the device fails in the copies of both.
#[test]
fn a_failed_prefix_changes_nothing() {
    let cache_error = |error| match error {
        MoveError::Cache(error) => error,
        error => panic!("{error}"),
    };
    let story = Story::random(&tiny(), 257, 31);
    let tokens: Vec<u32> = (0..257).collect();
    let prompt = Prompt { tokens: &tokens, salt: b"salt", adapter: b"" };
    let new = |max_draft| {
        let base = config(&tiny(), FORMATS, 3);
        let config = CacheConfig { num_checkpoints: 2, max_draft, poison: true, ..base };
        Fed::new(&Failing::emulated(EmuOptions::default()), config)
    };
    let counts = |fed: &Cache| fed.manager.ledger().tree_counts();
    for how in [Failure::Instead, Failure::After] {
        let (mut fed, mut other) = (new(3), new(0));
        let stream = fed.stream.clone();
        let (mut staging, mut others) = (
            fed.manager.new_transfer_staging().unwrap(),
            other.manager.new_transfer_staging().unwrap(),
        );
        let id = fed.manager.admit_with(&stream, &prompt).unwrap().id;
        for from in [0, 128] {
            let parts = [StepPart::new(id, &story, from..from + 128)];
            fed.inputs.load(&stream, &parts, 128);
            let mut steps = begin(&mut fed.manager, &stream, &parts, Padding::None).unwrap();
            for step in &mut steps {
                fed.inputs.run(step, &mut |_, _| Ok(())).unwrap();
            }
            let accepted = Accepted { id, accepted: 128, tokens: &tokens[from..from + 128] };
            steps.into_iter().for_each(|step| step.commit(&[accepted]).unwrap());
            fed.manager.save_wanted(&stream).unwrap();
        }
        let before = counts(&fed);
        let ((at, payload), failures) = fail_each(&mut fed, how, |fed| {
            let export = fed.manager.export_prefix(&stream, &mut staging, &prompt);
            let mut export = export.map_err(cache_error)?.expect("a checkpoint is there");
            let mut payload = vec![0; export.layout().prefix_bytes(export.positions()) as usize];
            export.all(&mut payload).map_err(cache_error)?;
            Ok((export.positions(), payload))
        });
        assert!(failures > 5 && counts(&fed) == before, "{failures} calls failed");
        let stream = other.stream.clone();
        let prompt = Prompt { tokens: &tokens[..256], ..prompt };
        let (came, failures) = fail_each(&mut other, how, |other| {
            if other.manager.ledger().tree_counts().segments > 0 {
                panic!("what failed has left something");
            }
            let parts = (at, &payload[..]);
            other.manager.import_prefix(&stream, &mut others, &prompt, parts).map_err(cache_error)
        });
        assert!(failures > 5, "{failures} calls failed");
        assert_eq!(came, Some(PrefixImport { blocks: 2, checkpoint: true }));
        let again = other.manager.export_prefix(&stream, &mut others, &prompt).unwrap();
        let mut got = vec![0; payload.len()];
        again.expect("it came").all(&mut got).unwrap();
        assert!(got == payload, "every byte");
        other.manager.ledger().audit().unwrap();
        other.manager.check_poison(&stream).unwrap();
    }
}
