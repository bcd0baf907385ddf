//! Buffers, copies and staging follow the same rules on both devices.

use dsv4_kv::device::{Backend, Device, DeviceError, Staged};

use crate::inputs::{download, upload};

pub fn copies_bring_back_what_they_took<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let values: Vec<u32> = (0..1000).map(|i| i * 7919).collect();
    let from = upload(&stream, &values);
    let to = device.allocate::<u32>("copy", 1000).unwrap();
    assert!(download(&stream, &to).iter().all(|&word| word == 0), "zeroed when allocated");
    stream.copy(&from, &to).unwrap();
    stream.upload(&[1, 2, 3], &to, 500).unwrap();
    let mut expected = values.clone();
    expected[500..503].copy_from_slice(&[1, 2, 3]);
    assert_eq!(download(&stream, &to), expected);
    let part = to.slice(499, 5).unwrap();
    assert_eq!(download(&stream, &part), expected[499..504]);
    stream.fill(&part, 0xAB).unwrap();
    expected[499..504].fill(0xABAB_ABAB);
    assert_eq!(download(&stream, &to), expected);
}

pub fn ranges_outside_a_buffer_are_refused<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let buffer = device.allocate::<u16>("short", 10).unwrap();
    let error = stream.upload(&[0; 4], &buffer, 7).unwrap_err();
    assert!(matches!(error, DeviceError::Length { found: 3, needed: 4, .. }), "{error}");
    let error = stream.download(&buffer, 11, &mut [0; 1]).unwrap_err();
    assert!(matches!(error, DeviceError::Length { found: 0, needed: 1, .. }), "{error}");
    let longer = device.allocate::<u16>("long", 11).unwrap();
    for (from, to) in [(&buffer, &longer), (&longer, &buffer)] {
        let error = stream.copy(from, to).unwrap_err();
        assert!(matches!(error, DeviceError::Length { found: 10, needed: 11, .. }), "{error}");
    }
    assert!(buffer.slice(8, 3).is_none() && buffer.slice(u64::MAX, 1).is_none());
}

pub fn buffers_of_an_arena_are_aligned_and_apart<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let sizes = [1, 300, 0, 256, 7];
    let arena = device.allocate_arena("arena", &sizes).unwrap();
    let buffers = &arena.buffers;
    for (i, (buffer, &size)) in (1..).zip(buffers.iter().zip(&sizes)) {
        assert_eq!(buffer.len(), size);
        assert!(buffer.span().address().is_multiple_of(256));
        assert!(download(&stream, buffer).iter().all(|&byte| byte == 0), "zeroed when allocated");
        stream.fill(buffer, i).unwrap();
    }
    for (i, buffer) in (1..).zip(buffers) {
        assert!(download(&stream, buffer).iter().all(|&byte| byte == i), "a neighbour wrote it");
    }
    assert!(device.allocate_arena("none", &[]).unwrap().buffers.is_empty());
    for sizes in [[device.info().total_memory + 1, 1], [u64::MAX, u64::MAX]] {
        let error = device.allocate_arena("too much", &sizes).err().expect("it was allocated");
        assert!(matches!(error, DeviceError::OutOfMemory { label: "too much", .. }), "{error}");
    }
}

pub fn exhausted_memory_is_a_typed_error<B: Backend>(device: &Device<B>) {
    let total = device.info().total_memory;
    for len in [total + 1, u64::MAX / 8, u64::MAX] {
        let Err(error) = device.allocate::<u64>("far too much", len) else {
            panic!("{len} elements were allocated")
        };
        assert!(matches!(error, DeviceError::OutOfMemory { .. }), "{error}");
        assert!(error.to_string().contains("far too much"), "{error}");
    }
    assert!(device.free_memory().unwrap() > 0, "a refusal takes nothing");
}

pub fn staged_updates_arrive_in_order<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let mut staged = Staged::<B, u32>::new(device, "staged", 256, 2).unwrap();
    let address = staged.buffer().ptr();
    for round in 0..50 {
        let fill = |array: &mut [u32]| {
            array.fill(round);
            Ok::<_, DeviceError>((256, ()))
        };
        staged.update(&stream, fill).unwrap();
        let refuse = |array: &mut [u32]| {
            array.fill(u32::MAX);
            Err(DeviceError::NestedCapture)
        };
        assert!(staged.update::<(), _>(&stream, refuse).is_err());
        let device_has = download(&stream, staged.buffer());
        assert!(device_has.iter().all(|&word| word == round), "round {round}");
    }
    assert_eq!(staged.buffer().ptr(), address);
}

pub fn events_time_what_lies_between_them<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let (from, to) = (device.event().unwrap(), device.event().unwrap());
    from.wait().unwrap();
    let error = to.milliseconds_since(&from).unwrap_err();
    assert!(matches!(error, DeviceError::NotRecorded), "{error}");
    let buffer = device.allocate::<u8>("filled", 64 << 20).unwrap();
    stream.record(&from).unwrap();
    stream.fill(&buffer, 1).unwrap();
    stream.record(&to).unwrap();
    assert!(to.milliseconds_since(&from).unwrap() > 0.0);
}
