//! Admissions that share blocks, on a device that fails: the request is admitted completely or not at all.

use dsv4_kv::device::{EmuOptions, Emulator};
use dsv4_kv::{Accepted, CacheConfig, KvError, Ledger, Prompt, RequestId};
use dsv4_kv_tests::failing::{Failing, Failure, each_call};
use dsv4_kv_tests::fed::{Fed, Padding, Part, begin};
use dsv4_kv_tests::stories::{Story, config};
use kv_layout::geometry::LayerKind::{self, Csa, Hca, Swa};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;

const FORMATS: (MainFormat, IndexFormat) = (MainFormat::Ue8m0, IndexFormat::Mxfp4);
/// One layer of each kind.
const LAYERS: [LayerKind; 3] = [Swa, Csa, Hca];
const TOKENS: usize = 300;

fn counts(ledger: &Ledger) -> [u32; 5] {
    let counts = ledger.tree_counts();
    let free = [ledger.free_blocks(), ledger.free_checkpoints(), ledger.live_requests()];
    [free[0], free[1], free[2], counts.blocks, counts.evictable_blocks]
}

/// Each device call of an admission fails in turn. Nothing is held then, and the request that is finally admitted has
/// the bytes of its tokens.
#[test]
fn an_admission_that_fails_leaves_nothing() {
    let device = Failing::emulated(EmuOptions::default());
    let settings = CacheConfig { num_checkpoints: 2, poison: true, ..config(&LAYERS, FORMATS, 2) };
    let mut fed = Fed::new(&device, settings);
    let story = Story::random(&LAYERS, TOKENS, 351);
    let stored = story.stored(&device, FORMATS);
    let tokens: Vec<u32> = (0..TOKENS as u32).collect();
    let prompt = Prompt { tokens: &tokens, salt: b"", adapter: b"" };
    let run = |fed: &mut Fed<Failing<Emulator>>, id: RequestId, from: usize| {
        let parts = [Part::new(id, &story, from..TOKENS)];
        fed.inputs.load(&fed.stream, &parts, (TOKENS - from) as u32);
        let mut steps = begin(&mut fed.manager, &fed.stream, &parts, Padding::None).unwrap();
        for step in &mut steps {
            fed.inputs.run(step, &mut |_, _| Ok(())).unwrap();
        }
        let told = Accepted { id, accepted: (TOKENS - from) as u32, tokens: &tokens[from..] };
        steps.into_iter().for_each(|step| step.commit(&[told]).unwrap());
    };
    let first = fed.manager.admit_with(&fed.stream, &prompt).unwrap();
    run(&mut fed, first.id, 0);
    fed.manager.release(first.id).unwrap();
    for how in [Failure::Instead, Failure::After] {
        let before = counts(&fed.manager.ledger());
        let (mut failures, mut calls) = (0, each_call());
        let admitted = loop {
            let call = calls.next().expect("without end");
            device.backend().fail(call, how);
            let result = fed.manager.admit_with(&fed.stream, &prompt);
            let failed = device.backend().failed();
            device.backend().fail_nothing();
            match result {
                Ok(admission) => {
                    assert!(failed.is_none(), "the failure of {failed:?} was swallowed");
                    break admission;
                }
                Err(KvError::Device(_)) => assert!(failed.is_some()),
                Err(error) => panic!("{error}"),
            }
            assert_eq!(counts(&fed.manager.ledger()), before, "{how:?}, call {call}");
            fed.manager.ledger().audit().unwrap();
            failures += 1;
        };
        assert!(failures > 4, "{failures} calls can fail");
        assert_eq!(admitted.reused, 256);
        run(&mut fed, admitted.id, 256);
        fed.assert_holds(admitted.id, &story, &stored, TOKENS);
        fed.manager.release(admitted.id).unwrap();
    }
    fed.manager.check_faults(&fed.stream).unwrap();
}
