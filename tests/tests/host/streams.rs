//! Streams: what a device waits for, and what is refused while the program that owns a stream captures it.

use dsv4_kv::device::{
    Buffer, Device, DeviceError, EmuOptions, Emulator, HostCopies, HostPool, Staged, Stream,
};
use dsv4_kv::ops::{self, BlockTable, TableUpdate};
use dsv4_kv_tests::failing::{Failing, Failure};
use dsv4_kv_tests::inputs::download;

type Emulated = Failing<Emulator>;

/// A device that fails on demand, a stream, and a buffer of four bytes.
fn device() -> (Device<Emulated>, Stream<Emulated>, Buffer<Emulated, u8>) {
    let device = Failing::emulated(EmuOptions::default());
    let (stream, buffer) = (device.stream().unwrap(), device.allocate("bytes", 4).unwrap());
    (device, stream, buffer)
}

/// A device that waits after each launch also waits after the replay of a graph, so that a fault is an error of it.
#[test]
fn a_replay_is_waited_for_like_a_launch() {
    let (device, stream, buffer) = device();
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

/// A driver lets one thread at a time replay a graph. The device below panics at two.
#[test]
fn threads_that_replay_one_graph_take_turns() {
    let (device, stream, buffer) = device();
    let fills = || (0..64).try_for_each(|byte| stream.fill(&buffer, byte));
    let graph = stream.capture(vec![buffer.memory()], fills).unwrap();
    let replays = || {
        let stream = device.stream().unwrap();
        (0..100).for_each(|_| stream.replay(&graph).unwrap());
    };
    std::thread::scope(|threads| (0..4).for_each(|_| drop(threads.spawn(replays))));
}

/// Work that has to run, waits and events are refused before anything is queued. Launches and fills are recorded, as
/// the owner wants.
#[test]
fn a_capture_by_the_owner_refuses_what_has_to_run() {
    let (device, stream, buffer) = device();
    let event = device.event().unwrap();
    let pool = HostPool::new(&device, 2, 4).unwrap();
    let mut staged = Staged::<_, u8>::new(&device, "staged", 4, 1).unwrap();
    let mut copies = [0, 1].map(|_| HostCopies::new(&stream).unwrap());
    let unit = std::sync::Arc::new(pool.take(1).unwrap().remove(0));
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
        stream.upload_new("new", &[1_u8]).map(drop),
        copies[0].store(&buffer.view(), pool.take(1).unwrap()),
        copies[1].load([unit], &buffer),
    ];
    for refused in refused {
        let refused = refused.unwrap_err();
        assert!(matches!(refused, DeviceError::ForbiddenInCapture { .. }), "{refused}");
    }
    let refused = stream.replay(&graph).unwrap_err();
    assert!(matches!(refused, DeviceError::NestedCapture), "{refused}");
    drop(copies);
    assert_eq!(pool.free(), 2, "nothing was copied");
    assert_eq!(device.backend().calls(), 0, "something was queued, or waited for");
    let refused = staged.update(&stream, |_| Ok::<_, DeviceError>((4, ()))).unwrap_err();
    assert!(matches!(refused, DeviceError::ForbiddenInCapture { .. }), "{refused}");
    assert_eq!(device.backend().calls(), 1, "only the copy before it was waited for");
    device.backend().wait_for_launches(true);
    stream.fill(&buffer, 1).unwrap();
    device.backend().record_streams(false);
    drop(stream.running("a step").unwrap());
    stream.replay(&graph).unwrap();
}

/// Fills all of a staged array with sevens.
fn sevens(array: &mut [u8]) -> Result<(usize, ()), DeviceError> {
    array.fill(7);
    Ok((array.len(), ()))
}

/// An update that was refused, because its stream is another device's, leaves nothing to wait for. A wait for that stream
/// would fail, and fail the capture too.
#[test]
fn a_refused_update_keeps_no_stream_of_another_device() {
    let (here, own, _) = device();
    let (_, foreign, buffer) = device();
    let mut staged = Staged::<_, u8>::new(&here, "staged", 4, 1).unwrap();
    let refused = staged.update(&foreign, sevens).unwrap_err();
    assert!(matches!(refused, DeviceError::ForeignDevice { .. }), "{refused}");
    let graph = foreign.capture(vec![buffer.memory()], || {
        // A thread that captures may wait for no device.
        std::thread::scope(|scope| scope.spawn(|| staged.update(&own, sevens)).join().unwrap())?;
        foreign.fill(&buffer, 1)
    });
    assert_eq!(graph.unwrap().nodes(), 1);
    assert_eq!(download(&own, staged.buffer()), [7; 4]);
}

/// Nor does one that was refused because its stream is captured: the host does not wait for the work before it.
#[test]
fn a_refused_update_is_not_waited_for() {
    let device = Failing::late(EmuOptions::default());
    let (stream, ran) = (device.stream().unwrap(), device.event().unwrap());
    let buffer = device.allocate::<u8>("bytes", 4).unwrap();
    let mut staged = Staged::<_, u8>::new(&device, "staged", 4, 1).unwrap();
    device.backend().record_streams(true);
    let refused = staged.update(&stream, sevens).unwrap_err();
    assert!(matches!(refused, DeviceError::ForbiddenInCapture { .. }), "{refused}");
    device.backend().record_streams(false);
    stream.fill(&buffer, 1).unwrap();
    stream.record(&ran).unwrap();
    staged.update(&stream, sevens).unwrap();
    assert!(!ran.has_passed().unwrap(), "the host waited for the stream");
    assert_eq!(download(&stream, staged.buffer()), [7; 4]);
}

/// What a capture forbids fails that capture, even if its error is ignored. The driver tells of every capture of a stream,
/// also of this one.
#[test]
fn a_capture_fails_by_what_it_forbids() {
    let (device, stream, buffer) = device();
    let event = device.event().unwrap();
    let works: [&dyn Fn() -> Result<(), DeviceError>; 4] = [
        &|| stream.upload(&[1], &buffer, 0),
        &|| stream.synchronize(),
        &|| stream.record(&event),
        &|| stream.wait_for(&event),
    ];
    for work in works {
        let captured = stream.capture(vec![buffer.memory()], || {
            device.backend().record_streams(true);
            let _ = work();
            stream.fill(&buffer, 7)
        });
        device.backend().record_streams(false);
        let refused = captured.map(drop).unwrap_err();
        assert!(matches!(refused, DeviceError::ForbiddenInCapture { .. }), "{refused}");
    }
}

/// A device that waits after each launch does not wait while the owner of the stream captures it: that would end the
/// capture.
#[test]
fn a_recorded_launch_is_not_waited_for() {
    let device = Failing::emulated(EmuOptions::default());
    device.backend().wait_for_launches(true);
    let stream = device.stream().unwrap();
    let [index, block, table] =
        ["index", "block", "table"].map(|label| device.allocate::<i32>(label, 1).unwrap());
    let (index, block) = (index.view(), block.view());
    let table = BlockTable { table: &table, slots: 1, max_blocks: 1 };
    let update = TableUpdate { index: &index, block: &block, table: &table, count: 1 };
    for (recorded, calls) in [(false, 2), (true, 1)] {
        device.backend().record_streams(recorded);
        device.backend().fail_nothing();
        ops::update_table(&stream, &update).unwrap();
        assert_eq!(device.backend().calls(), calls, "recorded: {recorded}");
    }
}
