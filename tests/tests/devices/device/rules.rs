//! Calls that every device refuses, defers, or waits for.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;

use dsv4_kv::device::{Backend, Device, DeviceError, bf16};
use dsv4_kv::ops::{self, StepQueries};
use dsv4_kv_linear::ops::{Bf16Weight, multiply_bf16};
use kv_layout::main_row::MainFormat;

use crate::inputs::{download, upload};

/// A slice that starts or ends inside an element of another type cannot be cast to that type.
pub fn casts_keep_every_byte<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let bytes = upload(&stream, &Vec::from_iter(0..32_u8));
    let words = bytes.slice(4, 8).unwrap().cast::<u32>().unwrap();
    assert_eq!(download(&stream, &words), [0x0706_0504, 0x0B0A_0908]);
    assert_eq!(download(&stream, &words.cast::<u8>().unwrap()), Vec::from_iter(4..12));
    for (start, len) in [(3, 8), (4, 7), (2, 4)] {
        let error = bytes.slice(start, len).unwrap().cast::<u32>().expect_err("not whole words");
        assert!(
            matches!(error, DeviceError::Cast { offset, bytes, size: 4, align: 4 } if (offset, bytes) == (start, len)),
            "{error}"
        );
    }
    assert!(matches!(bytes.cast::<()>(), Err(DeviceError::Element { bytes: 0, .. })));
}

/// Lengths and offsets of any size are refused with these numbers; none overflows.
pub fn sizes_of_any_kind_are_typed_errors<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let buffer = device.allocate::<u32>("short", 4).unwrap();
    for at in [5, u64::MAX / 4, u64::MAX] {
        let error = stream.upload(&[], &buffer, at).unwrap_err();
        assert!(matches!(error, DeviceError::Length { found: 0, needed: 0, .. }), "{error}");
        let error = stream.download(&buffer, at, &mut []).unwrap_err();
        assert!(matches!(error, DeviceError::Length { found: 0, needed: 0, .. }), "{error}");
    }
    stream.upload(&[], &buffer, 4).unwrap();
    let error = device.allocate::<()>("nothing", 3).expect_err("no bytes");
    assert!(matches!(error, DeviceError::Element { bytes: 0, .. }), "{error}");
    assert!(device.allocate_pinned::<()>(3).is_err());
    for len in [1 << 56, usize::MAX] {
        let error = device.allocate_pinned::<u32>(len).err().expect("far too much");
        assert!(
            matches!(error, DeviceError::OutOfMemory { label: "pinned memory", .. }),
            "{error}"
        );
    }
    let odd = device.allocate_pinned::<[u32; 3]>(3).unwrap();
    assert_eq!(odd.as_slice(), [[0; 3]; 3]);
}

/// A slice with the alignment of its elements, but not with that of the kernel's loads.
pub fn misaligned_operands_are_refused<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let bf16 = device.allocate::<bf16>("rows", 1 << 12).unwrap();
    let ring = device.allocate::<u8>("ring", 1 << 14).unwrap();
    let (row, faults) = (upload(&stream, &[0]), device.allocate("fault word", 1).unwrap());
    let append = |kv: u64, data: u64| {
        let ring = ops::SwaRing {
            data: &ring.slice(data, 576).unwrap(),
            scale: &ring.slice(1 << 12, 64).unwrap(),
            format: MainFormat::Ue8m0,
            ring: 1,
            slots: 1,
        };
        let kv = bf16.slice(kv, 512).unwrap();
        let (kv, row, ring, faults) = (&kv, &row, &ring, &faults);
        ops::append_swa(&stream, &ops::WindowAppend { kv, row, ring, faults, tokens: 1 })
    };
    append(0, 0).unwrap();
    append(8, 16).unwrap();
    for (kv, data, named) in [(1, 0, "kv"), (0, 1, "ring_data")] {
        let error = append(kv, data).unwrap_err();
        let DeviceError::Misaligned { argument, address, align, .. } = error else {
            panic!("{error}")
        };
        assert!(argument == named && !address.is_multiple_of(align.into()), "{argument}");
    }
    assert_eq!(download(&stream, &faults), [0]);
}

/// The outputs of a kernel or a copy must not overlap any other argument.
pub fn outputs_that_overlap_are_refused<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let memory = device.allocate::<u8>("one for all", 1 << 16).unwrap();
    let input = memory.slice(0, 1 << 15).unwrap().cast::<bf16>().unwrap();
    let weight = memory.slice(1 << 15, 1 << 15).unwrap().cast::<bf16>().unwrap();
    let multiply = |from: u64| {
        let output = memory.slice(from, 4 * 32).unwrap().cast().unwrap();
        let weight = Bf16Weight { values: &weight, columns: 32, inner: 128 };
        multiply_bf16(&stream, weight, &input, 1, &output)
    };
    for (from, with) in [(0, "input"), ((1 << 15) - 4 * 32, "input"), ((1 << 15) - 64, "input")] {
        let error = multiply(from).unwrap_err();
        let DeviceError::Aliased { kernel: "bf16_narrow_8", argument: "output", other } = error
        else {
            panic!("{error}")
        };
        assert_eq!(other, with);
    }
    let words = device.allocate::<i32>("positions, then lengths", 8).unwrap();
    let half = |at| words.slice(at, 4).unwrap();
    let (position, slot) = (half(0), upload(&stream, &[0; 4]));
    let queries =
        StepQueries { position: &position, slot: &slot, index: &slot, first: 0, count: 4 };
    let ratio = 4.try_into().unwrap();
    let error = ops::count_entries(
        &stream,
        &ops::EntryCounts { queries: &queries, ratio, lengths: &half(3) },
    )
    .unwrap_err();
    assert!(matches!(error, DeviceError::Aliased { argument: "lengths", .. }), "{error}");
    ops::count_entries(&stream, &ops::EntryCounts { queries: &queries, ratio, lengths: &half(4) })
        .unwrap();
    let error = stream.copy(&half(0), &half(3)).unwrap_err();
    assert!(matches!(error, DeviceError::Aliased { kernel: "copy", .. }), "{error}");
    stream.copy(&half(0), &half(4)).unwrap();
}

/// A panic inside a capture ends it; the device and the stream stay usable.
pub fn a_panic_ends_the_capture<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let buffer = upload(&stream, &[1_u32; 16]);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let record = || -> Result<(), DeviceError> {
            stream.fill(&buffer, 0xAB)?;
            resume_unwind(Box::new("on purpose"))
        };
        drop(stream.capture(vec![buffer.memory()], record));
    }));
    assert!(panicked.is_err());
    assert_eq!(download(&stream, &buffer), [1; 16], "nothing of it ran");
    let graph =
        stream.capture(vec![buffer.memory()], || stream.fill(&buffer, 0xCD)).expect("no capture");
    stream.replay(&graph).unwrap();
    assert_eq!(download(&stream, &buffer), [0xCDCD_CDCD; 16]);
    device.allocate::<u8>("goes on", 1).unwrap();
}

/// Objects that are dropped during a capture are freed after it, and do not break it.
pub fn what_is_dropped_in_a_capture_is_freed_after_it<B: Backend>(device: &Device<B>) {
    const BYTES: u64 = 64 << 20;
    let stream = device.stream().unwrap();
    let kept = upload(&stream, &[1_u32; 16]);
    let old = stream.capture(vec![kept.memory()], || stream.fill(&kept, 0xAB)).unwrap();
    let dropped = (
        device.allocate::<u8>("dropped", BYTES).unwrap(),
        device.allocate_pinned::<u8>(64).unwrap(),
        (device.stream().unwrap(), device.event().unwrap(), old),
    );
    let before = device.free_memory().unwrap();
    let record = || {
        drop(dropped);
        stream.fill(&kept, 0xCD)
    };
    let graph = stream.capture(vec![kept.memory()], record).expect("dropping is allowed");
    assert!(device.free_memory().unwrap() >= before + BYTES, "it was freed");
    stream.replay(&graph).unwrap();
    assert_eq!(download(&stream, &kept), [0xCDCD_CDCD; 16]);
}

/// A stream waits on the device for an event of another stream. Clones of a stream are the same stream.
pub fn a_stream_waits_for_an_event<B: Backend>(device: &Device<B>) {
    const BYTES: u64 = 256 << 20;
    let (first, second) = (device.stream().unwrap(), device.stream().unwrap());
    assert_eq!(first.id(), first.clone().id());
    assert_ne!(first.id(), second.id());
    let event = device.event().unwrap();
    second.wait_for(&event).unwrap();
    let large = device.allocate::<u8>("slowly filled", BYTES).unwrap();
    let end = device.allocate::<u8>("its end", 16).unwrap();
    first.fill(&large, 7).unwrap();
    first.clone().record(&event).unwrap();
    second.wait_for(&event).unwrap();
    second.copy(&large.slice(BYTES - 16, 16).unwrap(), &end).unwrap();
    assert_eq!(download(&second, &end), [7; 16]);
    let error = first.capture(vec![large.memory()], || first.wait_for(&event)).err().unwrap();
    assert!(matches!(error, DeviceError::ForbiddenInCapture { .. }), "{error}");
}

/// Threads may replay one graph at the same time, each into a stream of its own.
pub fn threads_replay_one_graph<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let [from, to] = [3, 0].map(|byte| {
        let buffer = device.allocate::<u8>("buffer", 1 << 20).unwrap();
        stream.fill(&buffer, byte).unwrap();
        buffer
    });
    stream.synchronize().unwrap();
    let graph =
        stream.capture(vec![from.memory(), to.memory()], || stream.copy(&from, &to)).unwrap();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let stream = device.stream().unwrap();
                for _ in 0..50 {
                    stream.replay(&graph).unwrap();
                }
                stream.synchronize().unwrap();
            });
        }
    });
    assert!(download(&stream, &to).iter().all(|&byte| byte == 3));
}
