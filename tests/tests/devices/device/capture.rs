//! Capture and replay: the same rules on both devices.

use dsv4_kv::device::{Backend, Device, DeviceError, Memory};
use kv_layout::main_row::MainFormat;

use crate::inputs::{download, rows, upload, upload_bf16};
use crate::window::swa::Rings;

pub fn allocating_or_waiting_is_refused<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let buffer = device.allocate::<u8>("buffer", 16).unwrap();
    let event = device.event().unwrap();
    stream.record(&event).unwrap();
    type Action<'a> = &'a dyn Fn() -> Result<(), DeviceError>;
    let refused: [(&str, Action); 8] = [
        ("allocating device memory", &|| device.allocate::<u8>("more", 1).map(drop)),
        ("allocating pinned memory", &|| device.allocate_pinned::<u8>(1).map(drop)),
        ("creating a stream", &|| device.stream().map(drop)),
        ("creating an event", &|| device.event().map(drop)),
        ("waiting for a stream", &|| stream.synchronize()),
        ("waiting for an event", &|| event.milliseconds_since(&event).map(drop)),
        ("copying from host memory", &|| stream.upload(&[1], &buffer, 0)),
        ("copying to host memory", &|| stream.download(&buffer, 0, &mut [0])),
    ];
    for (name, action) in refused {
        let Err(error) = stream.capture(Vec::new(), action) else {
            panic!("{name} was possible inside a capture")
        };
        assert!(
            matches!(error, DeviceError::ForbiddenInCapture { operation } if operation == name),
            "{name}: {error}"
        );
        action().unwrap_or_else(|error| panic!("{name} is possible again: {error}"));
    }
}

pub fn a_swallowed_refusal_still_fails_the_capture<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let swallow = || {
        assert!(stream.synchronize().is_err());
        Ok(())
    };
    let Err(error) = stream.capture(Vec::new(), swallow) else {
        panic!("the capture forgot that it waited")
    };
    assert!(matches!(error, DeviceError::ForbiddenInCapture { .. }), "{error}");
}

pub fn memory_must_be_retained<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let rings = Rings::new(device, MainFormat::Ue8m0, 2, 128);
    let kv = upload_bf16(&stream, &rows(4, 1).concat());
    let row = upload(&stream, &[0, 1, 2, -1]);
    let record = || rings.append(&stream, &kv, &row, 4);
    let refused = |retained: Vec<Memory<B>>, record: &dyn Fn() -> Result<(), DeviceError>| {
        let Err(error) = stream.capture(retained, record) else {
            panic!("a pointer into memory the graph does not own was captured")
        };
        let DeviceError::NotRetained { argument, .. } = error else { panic!("{error}") };
        argument
    };
    let all = [vec![kv.memory(), row.memory()], rings.memory()].concat();
    for (index, argument) in
        ["kv", "token_ring_row", "ring_data", "ring_scale"].into_iter().enumerate()
    {
        let mut others = all.clone();
        others.remove(index);
        assert_eq!(refused(others, &record), argument);
    }
    let [from, to] = [1, 2].map(|byte| upload(&stream, &[byte; 16]));
    let copy = || stream.copy(&from, &to);
    assert_eq!(refused(vec![to.memory()], &copy), "from");
    assert_eq!(refused(vec![from.memory()], &copy), "to");
    assert_eq!(refused(vec![from.memory()], &|| stream.fill(&to, 3)), "to");
    let graph = stream.capture(all, record).unwrap();
    assert_eq!(graph.nodes(), 1);
    stream.replay(&graph).unwrap();
    stream.synchronize().unwrap();
}

/// A graph runs after its buffers were dropped and others were allocated.
pub fn a_graph_keeps_its_memory<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let out = device.allocate::<u8>("out", 4096).unwrap();
    let input = upload(&stream, &[0x5A_u8; 4096]);
    let retained = vec![out.memory(), input.memory()];
    let graph = stream.capture(retained, || stream.copy(&input, &out)).unwrap();
    assert!(download(&stream, &out).iter().all(|&byte| byte == 0), "nothing ran yet");
    drop(input);
    let _others: Vec<_> = (0..16).map(|_| upload(&stream, &[0xFF_u8; 4096])).collect();
    stream.replay(&graph).unwrap();
    assert!(download(&stream, &out).iter().all(|&byte| byte == 0x5A));
}

pub fn captures_do_not_nest<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let outer = stream.capture(Vec::new(), || {
        let Err(inner) = stream.capture(Vec::new(), || Ok(())) else {
            panic!("a capture began inside a capture")
        };
        assert!(matches!(inner, DeviceError::NestedCapture), "{inner}");
        Ok::<_, DeviceError>(())
    });
    assert!(outer.is_ok(), "the outer capture goes on");
}
