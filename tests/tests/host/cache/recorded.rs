//! Another thread begins a capture of a stream while a call queues work into it. If the capture began first, the call
//! fails; else the capture is refused. Work that is only recorded never counts as run, and is in no graph.

use std::fmt::Display;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

use dsv4_kv::device::{DeviceError, EmuOptions, Emulator, Memory, Stream, bf16};
use dsv4_kv::layer_progress::LayerProgress;
use dsv4_kv::transfer::{MoveError, Parts, PartsMut};
use dsv4_kv::{Accepted, CacheConfig, LayerId, Layers, RequestId};
use dsv4_kv_tests::failing::Failing;
use dsv4_kv_tests::fed::{Fed, Padding, Part, begin};
use dsv4_kv_tests::stories::{Formats, Story, config, tiny};
use kv_layout::geometry::LayerKind::{Csa, Hca, Swa};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;

type Device = Failing<Emulator>;

const FORMATS: Formats = (MainFormat::Ue8m0, IndexFormat::Mxfp4);
const LAYER: LayerId = LayerId(0);

/// What became of a capture that another thread tried.
#[derive(Debug)]
pub(crate) enum Capture {
    /// It recorded so many launches.
    Ended(u64),
    /// It was refused: the stream is in use.
    Refused,
}

/// Runs `call`. Inside its call number `question` of `Backend::stream_id`, counted from 0, another thread begins a
/// capture of `stream`, which ends after `call`. Returns the result, and what became of the capture, if there were that
/// many such calls.
pub(crate) fn beside_a_capture<R>(
    stream: &Stream<Device>,
    retained: &[Memory<Device>],
    question: u64,
    call: impl FnOnce() -> R,
) -> (R, Option<Capture>) {
    beside_a_capture_of(stream, retained, (question, u64::MAX), call)
}

/// As [`beside_a_capture`], with a capture that ends `more` such calls later, or after `call`.
fn beside_a_capture_of<R>(
    stream: &Stream<Device>,
    retained: &[Memory<Device>],
    (question, more): (u64, u64),
    call: impl FnOnce() -> R,
) -> (R, Option<Capture>) {
    let (captured, retained) = (stream.clone(), retained.to_vec());
    let (end, ends) = mpsc::channel::<()>();
    let outcome = Arc::new(Mutex::new(None));
    let found = Arc::clone(&outcome);
    let is_tried = Arc::new(AtomicBool::new(false));
    let tried = Arc::clone(&is_tried);
    let backend = stream.device().backend();
    backend.meet(question, move || {
        tried.store(true, Ordering::Relaxed);
        let (tell, told) = mpsc::channel();
        let own = captured.clone();
        let thread = thread::spawn(move || {
            let record = || {
                tell.send(()).expect("the other thread waits for it");
                // Waits until its sender is dropped.
                let _ = ends.recv();
                Ok::<_, DeviceError>(())
            };
            let nodes = own.capture(retained, record).map(|graph| graph.nodes());
            // It fails as well if the call asked for something that a capture forbids.
            *found.lock().unwrap() = Some(match nodes {
                Ok(nodes) => Capture::Ended(nodes),
                Err(DeviceError::ForbiddenInCapture { .. }) => Capture::Ended(0),
                Err(DeviceError::StreamInUse) => Capture::Refused,
                Err(other) => panic!("{other:?} instead of a graph"),
            });
        });
        let end = move || {
            drop(end);
            thread.join().expect("it has not failed");
        };
        // The channel is closed if the capture was refused.
        match told.recv() {
            Ok(()) => captured.device().backend().meet(more, end),
            Err(_) => end(),
        }
    });
    let answer = call();
    if is_tried.load(Ordering::Relaxed) {
        // If the call did not reach the end of the capture, the capture ends now.
        backend.end_meeting();
    } else {
        let _ = backend.has_met();
    }
    (answer, outcome.lock().unwrap().take())
}

/// Counts of what [`Self::count`] has seen.
#[derive(Debug, Default)]
struct Counts {
    failed_calls: u32,
    refused_captures: u32,
}

impl Counts {
    /// The result of a call, `None` if it failed because of a capture. A call beside a refused capture succeeds. A graph has
    /// no nodes, whatever the call queued: it would be replayed beside later steps.
    fn count<R, E: Display>(
        &mut self,
        (answer, capture): (Result<R, E>, Option<Capture>),
    ) -> Option<R> {
        self.refused_captures += u32::from(matches!(capture, Some(Capture::Refused)));
        assert!(!matches!(capture, Some(Capture::Ended(1..))), "{capture:?}");
        match answer {
            Ok(answer) => Some(answer),
            Err(error) => {
                assert!(matches!(capture, Some(Capture::Ended(_))), "{error}, {capture:?}");
                assert!(error.to_string().contains("captur"), "{error}");
                self.failed_calls += 1;
                None
            }
        }
    }

    fn assert_both(&self) {
        assert!(self.failed_calls > 0 && self.refused_captures > 0, "{self:?}");
    }
}

/// A capture that begins before the launches of an update makes the update fail, and it can be repeated. No capture begins
/// between them.
#[test]
fn no_capture_begins_in_an_update() {
    for (kind, tokens) in [(Swa, 1), (Csa, 1), (Hca, 1), (Csa, 8), (Hca, 8)] {
        let device = Failing::emulated(EmuOptions::default());
        let story = Story::random(&[kind], tokens, 47);
        let mut fed = Fed::new(&device, config(&[kind], FORMATS, 1));
        let retained = [fed.manager.memory(), fed.inputs.memory()].concat();
        let stored = story.stored(&device, FORMATS);
        let mut counts = Counts::default();
        for question in 0.. {
            let id = fed.manager.admit().unwrap();
            let parts = [Part::new(id, &story, 0..tokens)];
            let Fed { manager, stream, inputs } = &mut fed;
            inputs.load(stream, &parts, tokens as u32);
            let mut step = begin(manager, stream, &parts, Padding::None).unwrap().remove(0);
            let update = || inputs.update(&mut step, LAYER).map(drop);
            let (answer, capture) = beside_a_capture(stream, &retained, question, update);
            let is_last = capture.is_none();
            if counts.count((answer, capture)).is_none() {
                assert_eq!(step.progress(LAYER).unwrap(), LayerProgress::NotStarted, "{kind:?}");
                drop(inputs.update(&mut step, LAYER).unwrap());
            }
            inputs.resume(&mut step, LAYER).unwrap().append().unwrap();
            step.commit(&[Accepted::count(id, tokens as u32)]).unwrap();
            fed.manager.check_faults(&fed.stream).unwrap();
            fed.assert_holds(id, &story, &stored, tokens);
            fed.manager.release(id).unwrap();
            if is_last {
                break;
            }
        }
        counts.assert_both();
    }
}

/// A capture that begins before the launch of an append makes it fail, and it can be repeated.
#[test]
fn no_capture_begins_in_an_append() {
    const TOKENS: usize = 8;
    let device = Failing::emulated(EmuOptions::default());
    let story = Story::random(&[Swa], TOKENS, 48);
    let mut fed = Fed::new(&device, config(&[Swa], FORMATS, 1));
    let retained = [fed.manager.memory(), fed.inputs.memory()].concat();
    let stored = story.stored(&device, FORMATS);
    let mut counts = Counts::default();
    for question in 0.. {
        let id = fed.manager.admit().unwrap();
        let parts = [Part::new(id, &story, 0..TOKENS)];
        let Fed { manager, stream, inputs } = &mut fed;
        inputs.load(stream, &parts, TOKENS as u32);
        let mut step = begin(manager, stream, &parts, Padding::None).unwrap().remove(0);
        drop(inputs.update(&mut step, LAYER).unwrap());
        let append = || inputs.resume(&mut step, LAYER)?.append();
        let (answer, capture) = beside_a_capture(stream, &retained, question, append);
        let is_last = capture.is_none();
        if counts.count((answer, capture)).is_none() {
            assert_eq!(step.progress(LAYER).unwrap(), LayerProgress::Updated);
            inputs.resume(&mut step, LAYER).unwrap().append().unwrap();
        }
        step.commit(&[Accepted::count(id, TOKENS as u32)]).unwrap();
        fed.assert_holds(id, &story, &stored, TOKENS);
        fed.manager.release(id).unwrap();
        if is_last {
            break;
        }
    }
    counts.assert_both();
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

/// Work before the layers of a step, and copies between steps: if the capture begins first, the call fails, and nothing
/// has changed; else the capture is refused.
#[test]
fn no_capture_begins_in_a_begin_or_a_fork() {
    let device = Failing::emulated(EmuOptions::default());
    let story = Story::random(&[Csa, Swa], TOKENS + 8, 49);
    let (mut fed, id) = with_request(&device, &story);
    let (stream, retained) = (fed.stream.clone(), fed.manager.memory());
    let stored = story.stored(&device, FORMATS);
    let blocks = fed.manager.ledger().free_blocks();
    let mut counts = Counts::default();
    for question in 0.. {
        let fork = || fed.manager.fork(&stream, id);
        let (answer, capture) = beside_a_capture(&stream, &retained, question, fork);
        let is_last = capture.is_none();
        if let Some(fork) = counts.count((answer, capture)) {
            fed.assert_holds(fork, &story, &stored, TOKENS);
            fed.manager.release(fork).unwrap();
        }
        let ledger = fed.manager.ledger();
        assert_eq!((ledger.live_requests(), ledger.free_blocks()), (1, blocks));
        if is_last {
            break;
        }
    }
    counts.assert_both();

    counts = Counts::default();
    for question in 0.. {
        let fork = fed.manager.fork(&stream, id).unwrap();
        // A chunk that closes windows, so that work lists are computed before its layers.
        let parts = [Part::new(fork, &story, TOKENS..TOKENS + 8)];
        let begin = || begin(&mut fed.manager, &stream, &parts, Padding::None).map(drop);
        let (answer, capture) = beside_a_capture(&stream, &retained, question, begin);
        let is_last = capture.is_none();
        counts.count((answer, capture));
        assert_eq!(fed.manager.ledger().committed(fork).unwrap(), TOKENS as u32);
        fed.step(&parts, Padding::None);
        fed.assert_holds(fork, &story, &stored, TOKENS + 8);
        fed.manager.release(fork).unwrap();
        if is_last {
            break;
        }
    }
    counts.assert_both();
    fed.assert_holds(id, &story, &stored, TOKENS);
}

/// A restore of a checkpoint without the windows of draft layers queues a copy, and fills of these windows: if the capture
/// begins first, the call fails, and nothing has changed; else the capture is refused.
#[test]
fn no_capture_begins_in_a_restore() {
    const BOUNDARY: usize = 128;
    let device = Failing::emulated(EmuOptions::default());
    let story = Story::random(&tiny(), BOUNDARY, 52);
    let settings = CacheConfig { num_checkpoints: 1, ..config(&tiny(), FORMATS, 1) };
    let mut fed = Fed::new(&device, settings);
    let id = fed.manager.admit().unwrap();
    fed.manager.want_checkpoint(id, BOUNDARY as u32).unwrap();
    fed.lose(&[Part::new(id, &story, 0..BOUNDARY)]);
    let (_, saved) = fed.manager.take_saved().pop().expect("the chunk saved it");
    assert!(!saved.has_draft(), "the windows of the draft layer are to be cleared");
    let (stream, retained) = (fed.stream.clone(), fed.manager.memory());
    let ledger = |fed: &Fed<Device>| serde_json::to_value(&*fed.manager.ledger()).unwrap();
    let mut counts = Counts::default();
    for question in 0.. {
        let before = ledger(&fed);
        let restore = || fed.manager.restore_checkpoint(&stream, id, &saved);
        let (answer, capture) = beside_a_capture(&stream, &retained, question, restore);
        let is_last = capture.is_none();
        if counts.count((answer, capture)).is_none() {
            assert_eq!(ledger(&fed), before, "question {question}");
        }
        if is_last {
            break;
        }
    }
    counts.assert_both();
    fed.manager.discard_checkpoint(saved).unwrap();
}

/// The replay of a captured step, and of recorded reads: if a kernel fails, they reset the counters of attention, which a
/// capture would only record.
#[test]
fn no_capture_begins_in_a_replay() {
    let device = Failing::emulated(EmuOptions::default());
    let story = Story::random(&[Swa], 2, 53);
    let mut fed = Fed::new(&device, config(&[Swa], FORMATS, 1));
    let tile = device.allocate::<bf16>("tile", 128 * 512).unwrap();
    let lengths = device.allocate::<i32>("lengths", 1).unwrap();
    let of_reads = [fed.inputs.memory(), vec![tile.memory(), lengths.memory()]].concat();
    let (stream, retained) = (fed.stream.clone(), fed.manager.memory());
    let stored = story.stored(&device, FORMATS);
    let bucket = fed.bucket(1, 1);
    let graph = fed.capture(bucket, &[], &mut |_, _| Ok(())).remove(0);
    let mut counts = [Counts::default(), Counts::default()];
    for question in 0.. {
        let id = fed.manager.admit().unwrap();
        let parts = [Part::new(id, &story, 0..1)];
        let Fed { manager, inputs, .. } = &mut fed;
        inputs.load(&stream, &parts, 1);
        let mut step = begin(manager, &stream, &parts, bucket).unwrap().remove(0);
        let replay = || step.replay(&graph);
        let (answer, capture) = beside_a_capture(&stream, &retained, question, replay);
        let is_last = capture.is_none();
        if counts[0].count((answer, capture)).is_none() {
            assert_eq!(step.progress(LAYER).unwrap(), LayerProgress::NotStarted);
            step.replay(&graph).unwrap();
        }
        step.commit(&[Accepted::count(id, 1)]).unwrap();

        let parts = [Part::new(id, &story, 1..2)];
        inputs.load(&stream, &parts, 1);
        let mut step = begin(manager, &stream, &parts, Padding::None).unwrap().remove(0);
        drop(inputs.update(&mut step, LAYER).unwrap());
        let gather = |layers: &mut Layers<'_, Device>| {
            inputs.resume(layers, LAYER)?.gather_window(0..1, &tile, &lengths)
        };
        let reads = step.record_reads(of_reads.clone(), gather).unwrap();
        let replay = || reads.replay();
        let (answer, capture) = beside_a_capture(&stream, &retained, question, replay);
        let is_last = is_last && capture.is_none();
        if counts[1].count((answer, capture)).is_none() {
            reads.replay().unwrap();
        }
        drop(reads);
        inputs.resume(&mut step, LAYER).unwrap().append().unwrap();
        step.commit(&[Accepted::count(id, 1)]).unwrap();
        fed.assert_holds(id, &story, &stored, 2);
        fed.manager.release(id).unwrap();
        if is_last {
            break;
        }
    }
    counts.iter().for_each(Counts::assert_both);
}

/// Exports and imports through host memory and device memory: wherever the capture begins, either the call fails and
/// nothing has changed, or the bytes are right.
#[test]
fn no_capture_begins_in_a_move() {
    let device = Failing::emulated(EmuOptions::default());
    let [story, other] = [50, 51].map(|seed| Story::random(&[Csa, Swa], TOKENS, seed));
    let (mut fed, id) = with_request(&device, &story);
    let (stream, mut retained) = (fed.stream.clone(), fed.manager.memory());
    let mut staging = fed.manager.new_transfer_staging().unwrap();
    let at = fed.manager.positions(id).unwrap();
    let mut payload = vec![0; staging.layout().bytes(at) as usize];
    fed.manager.export(&stream, &mut staging, id).unwrap().all(&mut payload).unwrap();
    let memory = device.allocate::<u8>("a payload", payload.len() as u64).unwrap();
    retained.push(memory.memory());
    let blocks = fed.manager.ledger().free_blocks();
    for on_device in [false, true] {
        let mut counts = Counts::default();
        for question in 0.. {
            let length = LENGTHS[question as usize % LENGTHS.len()];
            let at_question = (question / LENGTHS.len() as u64, length);
            let mut found = vec![0xA5; payload.len()];
            stream.upload(&found, &memory, 0).unwrap();
            let export = || {
                let mut export = fed.manager.export(&stream, &mut staging, id)?;
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
            let (answer, capture) = beside_a_capture_of(&stream, &retained, at_question, export);
            let is_last = capture.is_none();
            if counts.count((answer, capture)).is_some() {
                if on_device {
                    stream.download(&memory.view(), 0, &mut found).unwrap();
                }
                assert!(found == payload, "what was exported, question {question}");
            }
            if is_last {
                break;
            }
        }
        counts.assert_both();
        counts = Counts::default();
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
                let reserved = fed.manager.reserve(at)?;
                let parts = match on_device {
                    false => Parts::Host(&payload),
                    true => Parts::Device(memory.clone()),
                };
                let loaded = fed.manager.load_from(&stream, &mut staging, reserved, parts)?;
                Ok::<_, MoveError>(fed.manager.enter(loaded).expect("its own reservation"))
            };
            let (answer, capture) = beside_a_capture_of(&stream, &retained, at_question, import);
            let is_last = capture.is_none();
            if let Some(came) = counts.count((answer, capture)) {
                let mut found = vec![0; payload.len()];
                fed.manager.export(&stream, &mut staging, came).unwrap().all(&mut found).unwrap();
                assert!(found == payload, "what was imported, question {question}");
                fed.manager.release(came).unwrap();
            }
            let ledger = fed.manager.ledger();
            assert_eq!((ledger.live_requests(), ledger.free_blocks()), (1, blocks));
            if is_last {
                break;
            }
        }
        counts.assert_both();
    }
}
