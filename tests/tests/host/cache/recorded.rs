//! Another thread begins a capture of a stream while a call queues work into it. Work that is only recorded must not
//! count as run.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

use dsv4_kv::device::{DeviceError, EmuOptions, Emulator, Memory, Stream};
use dsv4_kv::layer_progress::LayerProgress;
use dsv4_kv::transfer::{MoveError, Parts, PartsMut};
use dsv4_kv::{Accepted, KvError, LayerId, RequestId};
use dsv4_kv_tests::failing::Failing;
use dsv4_kv_tests::fed::{Fed, Padding, Part, begin};
use dsv4_kv_tests::stories::{Formats, Story, config};
use kv_layout::geometry::LayerKind::{Csa, Hca, Swa};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;

type Device = Failing<Emulator>;

const FORMATS: Formats = (MainFormat::Ue8m0, IndexFormat::Mxfp4);
const LAYER: LayerId = LayerId(0);

/// Runs `call`. Inside its call number `question` of `Backend::stream_id`, counted from 0, another thread begins a
/// capture of `stream`, which ends after `call`. Returns the result, and whether there were that many such calls.
fn beside_a_capture<R>(
    stream: &Stream<Device>,
    retained: &[Memory<Device>],
    question: u64,
    call: impl FnOnce() -> R,
) -> (R, bool) {
    beside_a_capture_of(stream, retained, (question, u64::MAX), call)
}

/// As [`beside_a_capture`], with a capture that ends `more` such calls later, or after `call`.
fn beside_a_capture_of<R>(
    stream: &Stream<Device>,
    retained: &[Memory<Device>],
    (question, more): (u64, u64),
    call: impl FnOnce() -> R,
) -> (R, bool) {
    let (captured, retained) = (stream.clone(), retained.to_vec());
    let (end, ends) = mpsc::channel::<()>();
    let (ended, has_ended) = mpsc::channel();
    let begun = Arc::new(AtomicBool::new(false));
    let has_begun = Arc::clone(&begun);
    let backend = stream.device().backend();
    backend.meet(question, move || {
        begun.store(true, Ordering::Relaxed);
        let (tell, told) = mpsc::channel();
        let own = captured.clone();
        thread::spawn(move || {
            let record = || {
                tell.send(()).expect("the other thread waits for it");
                // Waits for the message that ends the capture, or until its sender is dropped.
                let _ = ends.recv();
                Ok::<_, DeviceError>(())
            };
            let graph = own.capture(retained, record);
            ended.send(graph.map(drop)).expect("the other thread waits for it");
        });
        told.recv().expect("nothing else is captured");
        captured.device().backend().meet(more, move || {
            drop(end);
            // This is an error if the call asked for something that a capture forbids.
            let _ = has_ended.recv().expect("it ends");
        });
    });
    let answer = call();
    let has_met = has_begun.load(Ordering::Relaxed);
    if has_met {
        // If the call did not reach the end of the capture, the capture ends now.
        backend.end_meeting();
    } else {
        let _ = backend.has_met();
    }
    (answer, has_met)
}

fn assert_forbidden(error: &KvError) {
    let forbidden = matches!(error, KvError::Device(DeviceError::ForbiddenInCapture { .. }));
    assert!(forbidden, "{error}");
}

/// A capture that begins in an update, before one of its launches, makes the update fail. If no launch was queued
/// before, or the layer has a window alone, the update can be repeated; else the layer has failed, and so has the step.
/// After the capture has ended, updates of other requests run as usual.
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

/// The update of an HCA chunk has two launches that write state rows. A capture that retains no memory refuses the
/// launches in it. If the second launch is refused, the layer has failed, and the state rows have changed; if the first
/// is, the update can be repeated.
#[test]
fn a_refused_second_launch_fails_the_layer() {
    const BEFORE: usize = 10;
    const TOKENS: usize = BEFORE + 8;
    /// After the end of the window, so that the entry has been computed from all its rows.
    const END: usize = 130;
    let device = Failing::emulated(EmuOptions::default());
    let story = Story::random(&[Hca], END, 49);
    let mut fed = Fed::new(&device, config(&[Hca], FORMATS, 1));
    let stored = story.stored(&device, FORMATS);
    let mut failed = 0;
    for question in 0.. {
        let id = fed.manager.admit().unwrap();
        fed.step(&[Part::new(id, &story, 0..BEFORE)], Padding::None);
        let parts = [Part::new(id, &story, BEFORE..TOKENS)];
        let Fed { manager, stream, inputs } = &mut fed;
        inputs.load(stream, &parts, 8);
        let mut step = begin(manager, stream, &parts, Padding::None).unwrap().remove(0);
        let update = || inputs.update(&mut step, LAYER).map(drop);
        let (answer, has_met) = beside_a_capture(stream, &[], question, update);
        if step.progress(LAYER).unwrap() == LayerProgress::Failed {
            answer.expect_err("it was refused");
            failed += 1;
            drop(step);
            let again = begin(manager, stream, &parts, Padding::None).unwrap_err();
            assert!(matches!(again, KvError::Overwritten { .. }), "{again}");
        } else {
            if has_met {
                answer.expect_err("it was refused");
                drop(inputs.update(&mut step, LAYER).unwrap());
            }
            inputs.resume(&mut step, LAYER).unwrap().append().unwrap();
            step.commit(&[Accepted::count(id, 8)]).unwrap();
            fed.step(&[Part::new(id, &story, TOKENS..END)], Padding::None);
            fed.assert_holds(id, &story, &stored, END);
        }
        fed.manager.release(id).unwrap();
        if !has_met {
            break;
        }
    }
    assert!(failed >= 2, "{failed} updates failed");
}

/// A capture that begins in an append makes it fail. The append is repeated until one succeeds.
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

/// A cache with a request of `TOKENS` tokens: two CSA windows, and half of the next.
fn with_request(
    device: &dsv4_kv::device::Device<Device>,
    story: &Story,
) -> (Fed<Device>, RequestId) {
    let mut fed = Fed::new(device, config(&[Csa, Swa], FORMATS, 2));
    let id = fed.manager.admit().unwrap();
    fed.step(&[Part::new(id, story, 0..TOKENS)], Padding::None);
    (fed, id)
}

/// Tokens of the request.
const TOKENS: usize = 10;
/// Number of calls of `stream_id` after which a capture ends: inside the tested call, or after it.
const LENGTHS: [u64; 4] = [0, 1, 3, u64::MAX];

/// Work before the layers of a step, and copies between steps: wherever the capture begins, the call fails, and nothing
/// has changed.
#[test]
fn a_capture_that_begins_in_a_begin_or_a_fork_ends_it() {
    let device = Failing::emulated(EmuOptions::default());
    let story = Story::random(&[Csa, Swa], TOKENS + 8, 49);
    let (mut fed, id) = with_request(&device, &story);
    let (stream, retained) = (fed.stream.clone(), fed.manager.memory());
    let stored = story.stored(&device, FORMATS);
    let (blocks, mut refused) = (fed.manager.ledger().free_blocks(), 0);
    let fork = loop {
        let fork = || fed.manager.fork(&stream, id);
        let (forked, has_met) = beside_a_capture(&stream, &retained, refused, fork);
        if !has_met {
            break forked.unwrap();
        }
        assert_forbidden(&forked.expect_err("it is only recorded"));
        let ledger = fed.manager.ledger();
        assert_eq!((ledger.live_requests(), ledger.free_blocks()), (1, blocks));
        refused += 1;
    };
    assert!(refused > 4, "{refused} forks were refused");
    fed.assert_holds(fork, &story, &stored, TOKENS);

    refused = 0;
    // A chunk that closes windows, so that work lists are computed before its layers.
    let parts = [Part::new(fork, &story, TOKENS..TOKENS + 8)];
    loop {
        let begin = || begin(&mut fed.manager, &stream, &parts, Padding::None).map(drop);
        let (begun, has_met) = beside_a_capture(&stream, &retained, refused, begin);
        if !has_met {
            begun.unwrap();
            break;
        }
        assert_forbidden(&begun.expect_err("it is only recorded"));
        assert_eq!(fed.manager.ledger().committed(fork).unwrap(), TOKENS as u32);
        refused += 1;
    }
    assert!(refused > 4, "{refused} begins were refused");
    fed.step(&parts, Padding::None);
    fed.assert_holds(fork, &story, &stored, TOKENS + 8);
    fed.assert_holds(id, &story, &stored, TOKENS);
}

/// Exports and imports through host memory and device memory: wherever the capture begins, either the call fails and
/// nothing has changed, or the bytes are right.
#[test]
fn a_capture_that_begins_in_a_move_ends_it() {
    let device = Failing::emulated(EmuOptions::default());
    let [story, other] = [50, 51].map(|seed| Story::random(&[Csa, Swa], TOKENS, seed));
    let (mut fed, id) = with_request(&device, &story);
    let (stream, mut retained) = (fed.stream.clone(), fed.manager.memory());
    let mut port = fed.manager.open_port().unwrap();
    let at = fed.manager.positions(id).unwrap();
    let mut payload = vec![0; port.layout().bytes(at) as usize];
    fed.manager.export(&stream, &mut port, id).unwrap().all(&mut payload).unwrap();
    let memory = device.allocate::<u8>("a payload", payload.len() as u64).unwrap();
    retained.push(memory.memory());
    let blocks = fed.manager.ledger().free_blocks();
    for on_device in [false, true] {
        let mut refused = 0;
        for question in 0.. {
            let length = LENGTHS[question as usize % LENGTHS.len()];
            let at_question = (question / LENGTHS.len() as u64, length);
            let mut found = vec![0xA5; payload.len()];
            stream.upload(&found, &memory, 0).unwrap();
            let export = || {
                let mut export = fed.manager.export(&stream, &mut port, id)?;
                if !on_device {
                    return export.all(&mut found);
                }
                let of_blocks =
                    export.layout().block_bytes() * u64::from(export.layout().blocks(at.trunk));
                let state = memory.slice(of_blocks, memory.len() - of_blocks).unwrap();
                let held = memory.slice(0, of_blocks).unwrap();
                export.blocks_to(0..export.layout().blocks(at.trunk), PartsMut::Device(held))?;
                export.state_to(PartsMut::Device(state))
            };
            let (exported, has_met) = beside_a_capture_of(&stream, &retained, at_question, export);
            match exported {
                Err(error) => {
                    assert!(error.to_string().contains("captur"), "{error}");
                    refused += 1;
                }
                Ok(()) => {
                    if on_device {
                        stream.download(&memory.view(), 0, &mut found).unwrap();
                    }
                    assert!(found == payload, "what was exported, question {question}");
                }
            }
            if !has_met {
                break;
            }
        }
        assert!(refused > 4, "{refused} exports were refused");
        refused = 0;
        stream.upload(&payload, &memory, 0).unwrap();
        for question in 0.. {
            let length = LENGTHS[question as usize % LENGTHS.len()];
            let at_question = (question / LENGTHS.len() as u64, length);
            // Fills the slot and blocks with bytes of another request, which an import that did not run would leave
            // there.
            let before = fed.manager.admit().unwrap();
            fed.step(&[Part::new(before, &other, 0..TOKENS)], Padding::None);
            fed.manager.release(before).unwrap();
            let import = || {
                let room = fed.manager.reserve(at)?;
                let parts = match on_device {
                    false => Parts::Host(&payload),
                    true => Parts::Device(memory.clone()),
                };
                let loaded = fed.manager.load_from(&stream, &mut port, room, parts)?;
                Ok::<_, MoveError>(fed.manager.enter(loaded).expect("its own room"))
            };
            let (imported, has_met) = beside_a_capture_of(&stream, &retained, at_question, import);
            match imported {
                Err(error) => {
                    assert!(error.to_string().contains("captur"), "{error}");
                    refused += 1;
                }
                Ok(came) => {
                    let mut found = vec![0; payload.len()];
                    fed.manager.export(&stream, &mut port, came).unwrap().all(&mut found).unwrap();
                    assert!(found == payload, "what was imported, question {question}");
                    fed.manager.release(came).unwrap();
                }
            }
            let ledger = fed.manager.ledger();
            assert_eq!((ledger.live_requests(), ledger.free_blocks()), (1, blocks));
            if !has_met {
                break;
            }
        }
        assert!(refused > 4, "{refused} imports were refused");
    }
}
