//! Streams: what a device waits for, and what is refused while the program that owns a stream captures it.

use dsv4_kv::device::{DeviceError, EmuOptions};
use dsv4_kv_tests::failing::{Failing, Failure};

/// A device that waits after each launch also waits after the replay of a graph, so that a fault is an error of it.
#[test]
fn a_replay_is_waited_for_like_a_launch() {
    let device = Failing::emulated(EmuOptions::default());
    let stream = device.stream().unwrap();
    let buffer = device.allocate::<u8>("bytes", 4).unwrap();
    let graph = stream.capture(vec![buffer.memory()], || stream.fill(&buffer, 7)).unwrap();
    for waits in [false, true] {
        device.backend().wait_for_launches(waits);
        // The call behind the replay.
        device.backend().fail(1, Failure::Instead);
        let replayed = stream.replay(&graph);
        let failed = device.backend().failed();
        assert_eq!((replayed.is_err(), failed), (waits, waits.then_some("synchronize")));
    }
}

/// Work that has to run, waits and events are refused before anything is queued. Launches and fills are recorded, as
/// the owner wants.
#[test]
fn a_capture_by_the_owner_refuses_what_has_to_run() {
    let device = Failing::emulated(EmuOptions::default());
    let stream = device.stream().unwrap();
    let buffer = device.allocate::<u8>("bytes", 4).unwrap();
    let event = device.event().unwrap();
    let graph = stream.capture(vec![buffer.memory()], || stream.fill(&buffer, 7)).unwrap();
    device.backend().record_streams(true);
    device.backend().fail_nothing();
    let refused = [
        stream.running("a step").map(drop),
        stream.record(&event),
        stream.wait_for(&event),
        stream.synchronize(),
        stream.upload(&[1], &buffer, 0),
        stream.download(&buffer, 0, &mut [0]),
    ];
    for refused in refused {
        let refused = refused.unwrap_err();
        assert!(matches!(refused, DeviceError::ForbiddenInCapture { .. }), "{refused}");
    }
    let refused = stream.replay(&graph).unwrap_err();
    assert!(matches!(refused, DeviceError::NestedCapture), "{refused}");
    assert_eq!(device.backend().calls(), 0, "something was queued");
    stream.fill(&buffer, 1).unwrap();
    device.backend().record_streams(false);
    drop(stream.running("a step").unwrap());
    stream.replay(&graph).unwrap();
}
