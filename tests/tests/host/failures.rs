//! Devices that fail, and devices that defer their work: the guarantees of `dsv4_kv::device` on them.

use std::sync::Arc;

use dsv4_kv::device::{
    Backend, Device, DeviceError, EmuOptions, Emulator, HostCopies, HostPool, Staged,
};
use dsv4_kv_tests::failing::{Failing, Failure};
use dsv4_kv_tests::inputs::download;

const OPTIONS: EmuOptions = EmuOptions { memory: 1 << 20, seed: 1 };

/// Makes the first call with this name that `attempt` makes fail.
fn fail_first<B: Backend, E>(
    device: &Device<Failing<B>>,
    name: &str,
    how: Failure,
    mut attempt: impl FnMut() -> Result<(), E>,
) {
    for call in 0.. {
        device.backend().fail(call, how);
        let answer = attempt();
        let failed = device.backend().failed().expect("no such call");
        if failed == name {
            assert!(answer.is_err(), "the failure of {name} was swallowed");
            break;
        }
    }
    device.backend().fail_nothing();
}

/// A device that defers its work runs nothing before a wait. The next tests rely on this.
#[test]
fn a_late_device_is_late() {
    let device = Failing::late(OPTIONS);
    let stream = device.stream().unwrap();
    let [from, to] = ["from", "to"].map(|label| device.allocate::<u8>(label, 4).unwrap());
    stream.fill(&from, 1).unwrap();
    stream.copy(&from, &to).unwrap();
    let other = device.stream().unwrap();
    assert_eq!(download(&other, &to), [0; 4], "nobody waited for the stream");
    assert_eq!(download(&stream, &to), [1; 4]);
}

/// A stream that waits for an event runs later work only after the work before that event.
#[test]
fn a_late_stream_waits_for_an_event() {
    let device = Failing::late(OPTIONS);
    let (first, second) = (device.stream().unwrap(), device.stream().unwrap());
    let [from, to] = ["from", "to"].map(|label| device.allocate::<u8>(label, 4).unwrap());
    let event = device.event().unwrap();
    first.fill(&from, 7).unwrap();
    first.record(&event).unwrap();
    first.fill(&from, 8).unwrap();
    second.wait_for(&event).unwrap();
    second.copy(&from, &to).unwrap();
    assert_eq!(download(&second, &to), [7; 4]);
}

/// Updates that are queued one after the other reach the device one by one, also if there are more of them than arrays.
#[test]
fn late_updates_arrive_in_order() {
    let device = Failing::late(OPTIONS);
    let stream = device.stream().unwrap();
    let mut staged = Staged::<_, u32>::new(&device, "staged", 64, 2).unwrap();
    let seen = [1, 2, 3, 4, 5].map(|value| {
        let fill = |array: &mut [u32]| {
            array.fill(value);
            Ok::<_, DeviceError>((array.len(), ()))
        };
        staged.update(&stream, fill).unwrap();
        let seen = device.allocate::<u32>("seen", 64).unwrap();
        stream.copy(staged.buffer(), &seen).unwrap();
        seen
    });
    for (value, seen) in (1..).zip(&seen) {
        assert_eq!(download(&stream, seen), [value; 64]);
    }
}

/// If the event after a copy cannot be recorded, the array in flight is not rewritten before it was copied.
#[test]
fn a_staged_array_in_flight_is_not_rewritten() {
    for (name, how) in
        [("record", Failure::Instead), ("record", Failure::After), ("upload", Failure::After)]
    {
        let device = Failing::late(OPTIONS);
        let stream = device.stream().unwrap();
        let mut staged = Staged::<_, u32>::new(&device, "staged", 64, 2).unwrap();
        let seen = device.allocate::<u32>("seen", 64).unwrap();
        let fill = |value: u32| {
            move |array: &mut [u32]| {
                array.fill(value);
                Ok::<_, DeviceError>((array.len(), ()))
            }
        };
        let mut value = 0;
        fail_first(&device, name, how, || {
            value += 1;
            staged.update(&stream, fill(value))
        });
        stream.copy(staged.buffer(), &seen).unwrap();
        staged.update(&stream, fill(value + 1)).unwrap();
        staged.update(&stream, fill(value + 2)).unwrap();
        assert_eq!(download(&stream, &seen), [value; 64], "{name}, {how:?}");
        assert_eq!(download(&stream, staged.buffer()), [value + 2; 64], "{name}, {how:?}");
    }
}

/// Units of host memory cannot be taken by others during a copy, whatever call fails, and are free again after it.
#[test]
fn units_in_flight_are_held() {
    let device = Failing::late(OPTIONS);
    let (stream, aside) = (device.stream().unwrap(), device.stream().unwrap());
    let pool = HostPool::new(&device, 4, 256).unwrap();
    let [from, to] = ["from", "to"].map(|label| device.allocate::<u8>(label, 512).unwrap());
    stream.upload(&[7; 512], &from, 0).unwrap();
    let mut copies = HostCopies::new(&aside).unwrap();
    copies.store(&from.view(), pool.take(2).unwrap()).unwrap();
    copies.end().unwrap();
    assert!(!copies.is_done().unwrap(), "nobody waited");
    assert_eq!(pool.free(), 2);
    // A failed wait releases no unit; the next wait does.
    device.backend().fail(0, Failure::Instead);
    let unsettled = copies.settle().err().expect("the wait failed");
    assert_eq!(pool.free(), 2);
    let units = unsettled.copies.settle().ok().expect("it was waited for");
    assert!(units.iter().all(|unit| unit.bytes() == [7; 256]));
    // Dropping copies waits for them.
    let units: Vec<_> = units.into_iter().map(Arc::new).collect();
    let mut copies = HostCopies::new(&aside).unwrap();
    copies.load(units.iter().cloned(), &to).unwrap();
    drop(copies);
    assert_eq!(download(&stream, &to), [7; 512]);
    // Units for which a wait failed are never handed out again.
    let mut copies = HostCopies::new(&aside).unwrap();
    copies.store(&from.view(), pool.take(2).unwrap()).unwrap();
    device.backend().fail(0, Failure::Instead);
    drop(copies);
    drop(units);
    assert_eq!(pool.free(), 2);
}

/// After a failed wait it is unknown whether a copy has ended, so it must not access the caller's memory any more.
#[test]
fn a_failed_copy_leaves_borrowed_memory_alone() {
    let device = Failing::late(OPTIONS);
    let stream = device.stream().unwrap();
    let buffer = device.allocate::<u32>("buffer", 64).unwrap();
    let mut values = [7; 64];
    fail_first(&device, "synchronize", Failure::Instead, || stream.upload(&values, &buffer, 0));
    values.fill(9);
    assert_eq!(download(&stream, &buffer), [7; 64], "the values when they were borrowed");
    fail_first(&device, "synchronize", Failure::Instead, || {
        stream.download(&buffer, 0, &mut values)
    });
    values.fill(9);
    stream.synchronize().unwrap();
    assert_eq!(values, [9; 64], "nobody writes them any more");
}

/// Any call of a capture or a replay may fail: then the capture has ended, the device is usable, and its memory is
/// freed.
#[test]
fn any_call_may_fail() {
    for how in [Failure::Instead, Failure::After] {
        let device = Failing::emulated(OPTIONS);
        let run = || -> Result<Vec<u32>, DeviceError> {
            let (stream, event) = (device.stream()?, device.event()?);
            let buffer = device.allocate::<u32>("buffer", 64)?;
            let mut staged = Staged::new(&device, "staged", 64, 2)?;
            staged.update(&stream, |array: &mut [u32]| {
                array.fill(5);
                Ok::<_, DeviceError>((array.len(), ()))
            })?;
            let retained = vec![buffer.memory(), staged.buffer().memory()];
            let graph = stream.capture(retained, || {
                stream.fill(&buffer, 1)?;
                stream.copy(staged.buffer(), &buffer)
            })?;
            stream.replay(&graph)?;
            stream.record(&event)?;
            stream.wait_for(&event)?;
            event.wait()?;
            let mut words = vec![0; 64];
            stream.download(&buffer, 0, &mut words)?;
            Ok(words)
        };
        device.backend().fail_nothing();
        assert_eq!(run().unwrap(), [5; 64]);
        let calls = device.backend().calls();
        assert!(calls > 15, "{calls} calls");
        for call in 0..calls {
            device.backend().fail(call, how);
            let answer = run();
            let failed = device.backend().failed();
            assert!(answer.is_err(), "{failed:?}, call {call}, {how:?}");
            assert_eq!(device.free_memory().unwrap(), OPTIONS.memory, "{failed:?}, {how:?}");
            assert_eq!(run().unwrap(), [5; 64], "after {failed:?}, {how:?}");
        }
    }
}

/// Devices of one domain, for example two of one CUDA context, share captures and the rules that these impose.
#[test]
fn devices_of_a_domain_share_captures() {
    let in_domain =
        |domain| Device::from_backend(Failing::new(Emulator::new(OPTIONS)).in_domain(domain));
    let [one, other] = [7, 7].map(in_domain);
    let [stream, others] = [&one, &other].map(|device| device.stream().unwrap());
    let buffer = one.allocate::<u8>("buffer", 64).unwrap();
    let dropped = other.allocate::<u8>("dropped in the capture", 64).unwrap();
    let theirs = other.allocate::<u8>("of the other", 64).unwrap();
    let graph = stream.capture(vec![buffer.memory()], || {
        let nested = others.capture(Vec::new(), || Ok(())).expect_err("one at a time");
        assert!(matches!(nested, DeviceError::NestedCapture), "{nested}");
        in_thread(|| {
            let nested = others.capture(Vec::new(), || Ok(())).expect_err("one at a time");
            assert!(matches!(nested, DeviceError::NestedCapture), "{nested}");
            drop(dropped);
        });
        assert_eq!(other.free_memory().unwrap(), OPTIONS.memory - 128, "freed later");
        others.fill(&theirs, 3)?;
        stream.fill(&buffer, 1)
    });
    assert_eq!(other.free_memory().unwrap(), OPTIONS.memory - 64, "freed");
    assert_eq!(download(&others, &theirs), [3; 64], "the other device's work ran");
    stream.replay(&graph.unwrap()).unwrap();
    assert_eq!(download(&stream, &buffer), [1; 64]);

    let captured = stream.capture(vec![buffer.memory()], || {
        let allocate = || other.allocate::<u8>("in its capture", 1).expect_err("forbidden");
        let refused = in_thread(allocate);
        assert!(matches!(refused, DeviceError::ForbiddenInCapture { .. }), "{refused}");
        Ok::<_, DeviceError>(())
    });
    let error = captured.expect_err("the other device broke the capture");
    assert!(matches!(error, DeviceError::ForbiddenInCapture { .. }), "{error}");
}

/// A capture does not restrict devices of other domains, except in its own thread: there they may not allocate, wait or
/// capture, as its own device may not, and they free memory after the capture.
#[test]
fn a_capture_binds_its_thread_on_other_devices() {
    let in_domain =
        |domain| Device::from_backend(Failing::new(Emulator::new(OPTIONS)).in_domain(domain));
    let [device, other] = [11, 12].map(in_domain);
    let [stream, others] = [&device, &other].map(|device| device.stream().unwrap());
    let buffer = device.allocate::<u8>("buffer", 64).unwrap();
    let [here, there] = ["here", "there"].map(|name| other.allocate::<u8>(name, 64).unwrap());
    let free = || OPTIONS.memory - other.free_memory().unwrap();
    let graph = stream.capture(vec![buffer.memory()], || {
        drop(here);
        assert_eq!(free(), 128, "freed behind the capture");
        in_thread(|| {
            drop(there);
            assert_eq!(free(), 64, "another thread frees");
            others.synchronize().unwrap();
            drop(other.allocate::<u8>("meanwhile", 8).unwrap());
            drop(others.capture(Vec::new(), || Ok::<_, DeviceError>(())).unwrap());
        });
        let nested = others.capture(Vec::new(), || Ok(())).expect_err("one at a time");
        assert!(matches!(nested, DeviceError::NestedCapture), "{nested}");
        stream.fill(&buffer, 1)
    });
    assert_eq!(free(), 0, "freed");
    stream.replay(&graph.expect("nothing broke the capture")).unwrap();
    assert_eq!(download(&stream, &buffer), [1; 64]);
    let breaks: [&dyn Fn() -> Result<(), DeviceError>; 3] = [
        &|| other.allocate::<u8>("in the capture", 1).map(drop),
        &|| others.synchronize(),
        &|| other.stream().map(drop),
    ];
    for forbidden in breaks {
        let captured = stream.capture(vec![buffer.memory()], || {
            let refused = forbidden().expect_err("forbidden in this thread");
            assert!(matches!(refused, DeviceError::ForbiddenInCapture { .. }), "{refused}");
            Ok::<_, DeviceError>(())
        });
        let error = captured.map(drop).expect_err("a rule of the capture was broken");
        assert!(matches!(error, DeviceError::ForbiddenInCapture { .. }), "{error}");
        forbidden().expect("behind it");
    }
}

fn in_thread<R: Send>(run: impl FnOnce() -> R + Send) -> R {
    std::thread::scope(|scope| scope.spawn(run).join().unwrap())
}

/// A stream works after all other objects of its device were dropped.
#[test]
fn a_stream_keeps_its_device() {
    let device = Failing::late(OPTIONS);
    let (stream, buffer) = (device.stream().unwrap(), device.allocate::<u8>("kept", 4).unwrap());
    drop(device);
    stream.fill(&buffer, 3).unwrap();
    assert_eq!(download(&stream.clone(), &buffer), [3; 4]);
    stream.device().allocate::<u8>("another", 4).unwrap();
}
