//! Another thread begins a capture of a step's stream while a layer is updated or appended: what is only recorded does not count as run.

use std::sync::mpsc;
use std::thread;

use dsv4_kv::device::{DeviceError, EmuOptions, Emulator, Memory, Stream};
use dsv4_kv::layer_progress::LayerProgress;
use dsv4_kv::{Accepted, KvError, LayerId};
use dsv4_kv_tests::failing::Failing;
use dsv4_kv_tests::fed::{Fed, Padding, Part, begin};
use dsv4_kv_tests::stories::{Formats, Story, config};
use kv_layout::geometry::LayerKind::{Csa, Hca, Swa};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;

type Device = Failing<Emulator>;

const FORMATS: Formats = (MainFormat::Ue8m0, IndexFormat::Mxfp4);
const LAYER: LayerId = LayerId(0);

/// The answer of `call`, within which another thread begins a capture of `stream`, at question `question` of those that `call` asks the
/// backend for the stream's identity, and ends it behind the call; and whether the call asked so often.
fn beside_a_capture<R>(
    stream: &Stream<Device>,
    retained: &[Memory<Device>],
    question: u64,
    call: impl FnOnce() -> R,
) -> (R, bool) {
    let (captured, retained) = (stream.clone(), retained.to_vec());
    let (end, ends) = mpsc::channel::<()>();
    let (ended, has_ended) = mpsc::channel();
    let backend = stream.device().backend();
    backend.meet(question, move || {
        let (begun, has_begun) = mpsc::channel();
        thread::spawn(move || {
            let record = || {
                begun.send(()).expect("the other thread waits for it");
                // Until the other end is dropped.
                let _ = ends.recv();
                Ok::<_, DeviceError>(())
            };
            let graph = captured.capture(retained, record);
            ended.send(graph.map(drop)).expect("the other thread waits for it");
        });
        has_begun.recv().expect("nothing else is captured");
    });
    let answer = call();
    let has_met = backend.has_met();
    drop(end);
    if has_met {
        has_ended.recv().expect("it ends").expect("what it records is allowed");
    }
    (answer, has_met)
}

fn assert_forbidden(error: &KvError) {
    let forbidden = matches!(error, KvError::Device(DeviceError::ForbiddenInCapture { .. }));
    assert!(forbidden, "{error}");
}

/// A capture that begins in an update, before whichever launch, makes the update fail. If none of its launches was queued before, it can be
/// asked for again, and so can that of a layer with a window alone; else the layer has failed, and the step with it. Once the capture has
/// ended other requests are updated as ever.
#[test]
fn a_capture_that_begins_in_an_update_ends_it() {
    for (kind, tokens, entry_launches) in
        [(Swa, 1, 0), (Csa, 1, 1), (Hca, 1, 1), (Csa, 8, 2), (Hca, 8, 2)]
    {
        let what = format!("{kind:?}, {tokens} tokens");
        let device = Failing::emulated(EmuOptions::default());
        let story = Story::random(&[kind], tokens, 47);
        let mut fed = Fed::new(&device, config(&[kind], FORMATS, 1));
        let retained = [fed.manager.memory(), fed.inputs.memory()].concat();
        let parts = |id| [Part::new(id, &story, 0..tokens)];
        let mut failed = 0;
        for question in 0.. {
            let id = fed.manager.admit().unwrap();
            let Fed { manager, stream, inputs } = &mut fed;
            inputs.load(stream, &parts(id), tokens as u32);
            let mut step = begin(manager, stream, &parts(id), Padding::None).unwrap().remove(0);
            let update = || inputs.update(&mut step, LAYER).map(drop);
            let (answer, has_met) = beside_a_capture(stream, &retained, question, update);
            let progress = step.progress(LAYER).unwrap();
            if has_met {
                assert_forbidden(&answer.expect_err(&what));
                if progress == LayerProgress::Failed {
                    failed += 1;
                    let error = inputs.update(&mut step, LAYER).map(drop).unwrap_err();
                    assert!(matches!(error, KvError::LayerRepeated { .. }), "{what}: {error}");
                    drop(step);
                    fed.manager.release(id).unwrap();
                    continue;
                }
                assert_eq!(progress, LayerProgress::NotStarted, "{what}");
                inputs.update(&mut step, LAYER).unwrap().append().unwrap();
            } else {
                answer.unwrap();
                inputs.resume(&mut step, LAYER).unwrap().append().unwrap();
            }
            step.commit(&[Accepted::count(id, tokens as u32)]).unwrap();
            fed.manager.check_faults(&fed.stream).unwrap();
            fed.assert_holds(id, &story, &story.stored(&device, FORMATS), tokens);
            fed.manager.release(id).unwrap();
            if !has_met {
                break;
            }
        }
        assert!(failed >= entry_launches, "{what}: {failed} updates failed");
    }
}

/// A capture that begins in an append makes it fail; it is repeated until one runs.
#[test]
fn a_capture_that_begins_in_an_append_ends_it() {
    const TOKENS: usize = 8;
    let device = Failing::emulated(EmuOptions::default());
    let story = Story::random(&[Swa], TOKENS, 48);
    let mut fed = Fed::new(&device, config(&[Swa], FORMATS, 1));
    let retained = [fed.manager.memory(), fed.inputs.memory()].concat();
    let id = fed.manager.admit().unwrap();
    let parts = [Part::new(id, &story, 0..TOKENS)];
    let Fed { manager, stream, inputs } = &mut fed;
    inputs.load(stream, &parts, TOKENS as u32);
    let mut step = begin(manager, stream, &parts, Padding::None).unwrap().remove(0);
    drop(inputs.update(&mut step, LAYER).unwrap());
    for question in 0.. {
        let append = || inputs.resume(&mut step, LAYER)?.append();
        let (answer, has_met) = beside_a_capture(stream, &retained, question, append);
        if !has_met {
            answer.unwrap();
            assert!(question >= 2, "one before the check, one before the launch");
            break;
        }
        assert_forbidden(&answer.expect_err("it is only recorded"));
        assert_eq!(step.progress(LAYER).unwrap(), LayerProgress::Updated);
    }
    step.commit(&[Accepted::count(id, TOKENS as u32)]).unwrap();
    fed.assert_holds(id, &story, &story.stored(&device, FORMATS), TOKENS);
}
