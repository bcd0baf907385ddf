//! Two devices, on one GPU or both emulated: each refuses the objects of the other.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use dsv4_kv::device::{Backend, Device, DeviceError, Staged};
use dsv4_kv::ops::{self, StepQueries};

use crate::inputs::{download, upload};

/// Asserts that `answer` is a refusal of an object of another device.
fn is_foreign<T>(answer: Result<T, DeviceError>, named: &str, pair: [&Device<impl Backend>; 2]) {
    let error = answer.err().expect("it was accepted");
    let DeviceError::ForeignDevice { what, found, used } = error else { panic!("{error}") };
    assert_eq!((what, found, used), (named, pair[0].id(), pair[1].id()));
}

/// A stream of `other` refuses every object of `one`, and nothing runs.
pub fn foreign_objects_are_refused<B: Backend>(one: &Device<B>, other: &Device<B>) {
    let pair = [one, other];
    let (own, stream) = (one.stream().unwrap(), other.stream().unwrap());
    let theirs = upload(&own, &[1_u32; 16]);
    let ours = other.allocate::<u32>("ours", 16).unwrap();
    let event = one.event().unwrap();
    let graph = own.capture(vec![theirs.memory()], || own.fill(&theirs, 2)).unwrap();
    is_foreign(stream.upload(&[0], &theirs, 0), "buffer", pair);
    is_foreign(stream.download(&theirs, 0, &mut [0]), "buffer", pair);
    is_foreign(stream.fill(&theirs, 3), "buffer", pair);
    is_foreign(stream.copy(&theirs, &ours), "buffer", pair);
    is_foreign(stream.copy(&ours, &theirs), "buffer", pair);
    is_foreign(stream.record(&event), "event", pair);
    is_foreign(stream.wait_for(&event), "event", pair);
    is_foreign(other.event().unwrap().milliseconds_since(&event), "event", pair);
    is_foreign(stream.replay(&graph), "graph", pair);
    is_foreign(stream.capture(vec![theirs.memory()], || Ok(())), "memory", pair);
    let mut staged = Staged::new(one, "staged", 4, 2).unwrap();
    let update = staged.update(&stream, |words: &mut [u32]| {
        words.fill(1);
        Ok::<_, DeviceError>((4, ()))
    });
    is_foreign(update, "pinned memory", pair);
    let selected = other.allocate::<i32>("lengths", 4).unwrap();
    let index = upload(&own, &[0; 4]);
    let queries = StepQueries { position: &index, slot: &index, index: &index, first: 0, count: 4 };
    let launch = ops::count_entries(
        &stream,
        &ops::EntryCounts { queries: &queries, ratio: 4.try_into().unwrap(), lengths: &selected },
    );
    is_foreign(launch, "token_position", pair);
    assert_eq!(download(&own, &theirs), [1; 16], "nothing ran");
    own.replay(&graph).unwrap();
    assert_eq!(download(&own, &theirs), [0x0202_0202; 16]);
}

/// Two threads, each with a device of its own, capture, replay and copy at the same time.
pub fn threads_on_two_devices<B: Backend>(one: &Device<B>, other: &Device<B>) {
    const ROUNDS: u32 = 100;
    let captured = AtomicBool::new(false);
    let run = |device: &Device<B>| {
        let stream = retry(|| device.stream());
        let buffer = retry(|| device.allocate::<u32>("own", 64));
        for round in 0..ROUNDS {
            let byte = round as u8;
            let fill = stream.capture(vec![buffer.memory()], || stream.fill(&buffer, byte));
            match fill {
                Ok(graph) => {
                    stream.replay(&graph).unwrap();
                    captured.store(true, Ordering::Relaxed);
                }
                // The other thread captures, and devices on one GPU share a capture.
                Err(DeviceError::NestedCapture | DeviceError::ForbiddenInCapture { .. }) => {
                    stream.fill(&buffer, byte).unwrap();
                }
                Err(error) => panic!("{error}"),
            }
            let words = retry(|| {
                let mut words = [0; 64];
                stream.download(&buffer, 0, &mut words).map(|()| words)
            });
            assert_eq!(words, [u32::from_ne_bytes([byte; 4]); 64], "round {round}");
        }
    };
    let run = &run;
    thread::scope(|scope| {
        for device in [one, other] {
            scope.spawn(move || run(device));
        }
    });
    assert!(captured.load(Ordering::Relaxed), "nothing was captured");
}

/// Repeats `attempt` as long as a capture of another thread forbids it.
fn retry<T>(attempt: impl Fn() -> Result<T, DeviceError>) -> T {
    loop {
        match attempt() {
            Ok(value) => return value,
            Err(DeviceError::ForbiddenInCapture { .. }) => thread::yield_now(),
            Err(error) => panic!("{error}"),
        }
    }
}
