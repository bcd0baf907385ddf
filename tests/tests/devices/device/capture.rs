//! Capture and replay: the same rules on both devices.

use dsv4_kv::device::{Backend, Device, DeviceError};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::{CacheConfig, KvCacheManager, KvError, LayerId, StepRequest};
use kv_layout::main_row::MainFormat;

use crate::inputs::{assert_same, download, rows, upload};
use crate::window::swa::Rings;

/// A decode step captured for a bucket of eight, replayed for batches of one to eight at positions
/// that straddle the window and the ring, against eager launches of a second cache.
pub fn replays_equal_eager_steps<B: Backend>(device: &Device<B>) {
    const BUCKET: u32 = 8;
    let stream = device.stream().unwrap();
    let config = CacheConfig {
        max_step_tokens: 160,
        ..CacheConfig::for_memory(ModelConfig::preset("tiny").unwrap(), 1 << 30, BUCKET).unwrap()
    };
    let config = CacheConfig { num_blocks: 64, ..config };
    let mut eager = KvCacheManager::new(device.clone(), config.clone()).unwrap();
    let mut captured = KvCacheManager::new(device.clone(), config).unwrap();
    let kv = upload(&stream, &rows(160, 3).concat());
    let layers: Vec<_> = (0..eager.schema().layers.len() as u32).map(LayerId).collect();

    let mut ids = Vec::new();
    for request in 0..BUCKET {
        let prompt = 124 + request;
        let id = eager.admit().unwrap();
        assert_eq!(captured.admit().unwrap(), id, "both caches go the same way");
        for manager in [&mut eager, &mut captured] {
            let step = [StepRequest { id, start: 0, tokens: prompt }];
            manager.prepare_forward(&stream, &step).unwrap();
            for &layer in &layers {
                manager.layer(layer).unwrap().append_swa(&stream, &kv).unwrap();
            }
            manager.commit(id, prompt).unwrap();
        }
        ids.push((id, prompt));
    }

    let tile_elements = u64::from(BUCKET) * 128 * 512;
    let output = || {
        let tile = device.allocate::<u16>("tile", tile_elements).unwrap();
        (tile, device.allocate::<i32>("lengths", u64::from(BUCKET)).unwrap())
    };
    let (eager_out, graph_out) = (output(), output());
    let retained = vec![kv.memory(), graph_out.0.memory(), graph_out.1.memory()];
    let graph = captured
        .capture(&stream, BUCKET, retained, |manager| {
            for &layer in &layers {
                let handle = manager.layer_for(layer, BUCKET)?;
                handle.append_swa(&stream, &kv)?;
                handle.gather_swa(&stream, &kv, 0..BUCKET, &graph_out.0, &graph_out.1)?;
            }
            Ok(())
        })
        .unwrap();

    for round in 0..24_usize {
        let batch = 1 + round % BUCKET as usize;
        let mut step = Vec::new();
        ids.rotate_left(3);
        for (id, length) in &mut ids[..batch] {
            step.push(StepRequest { id: *id, start: *length, tokens: 1 });
            *length += 1;
        }
        for manager in [&mut eager, &mut captured] {
            manager.prepare_forward(&stream, &step).unwrap();
            step.iter().for_each(|part| manager.commit(part.id, 1).unwrap());
        }
        for (tile, lengths) in [&eager_out, &graph_out] {
            stream.fill(tile, 0xEE).unwrap();
            stream.fill(lengths, 0xEE).unwrap();
        }
        for &layer in &layers {
            let handle = eager.layer(layer).unwrap();
            handle.append_swa(&stream, &kv).unwrap();
            let queries = 0..batch as u32;
            handle.gather_swa(&stream, &kv, queries, &eager_out.0, &eager_out.1).unwrap();
        }
        captured.replay(&stream, &graph).unwrap();
        let (eager_tile, graph_tile) =
            (download(&stream, &eager_out.0), download(&stream, &graph_out.0));
        assert_same(&graph_tile, &eager_tile, &format!("tiles of round {round}"));
        let lengths = download(&stream, &graph_out.1);
        assert!(lengths[..batch].iter().all(|&length| (125..=128).contains(&length)));
        assert!(lengths[batch..].iter().all(|&length| length == 0), "padding has no keys");
    }
    for &layer in &layers {
        let (eager, captured) = (eager.layer(layer).unwrap(), captured.layer(layer).unwrap());
        for (eager, captured) in
            [(eager.swa().data, captured.swa().data), (eager.swa().scale, captured.swa().scale)]
        {
            let (got, want) = (download(&stream, captured), download(&stream, eager));
            assert_same(&got, &want, &format!("ring of {layer:?}"));
        }
    }
    captured.check_faults(&stream).unwrap();
}

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
    let kv = upload(&stream, &rows(4, 1).concat());
    let row = upload(&stream, &[0, 1, 2, -1]);
    let all_but_kv = [rings.memory(), vec![row.memory()]].concat();
    let record = || rings.append(&stream, &kv, &row, 4);
    let Err(error) = stream.capture(all_but_kv.clone(), record) else {
        panic!("a pointer into memory the graph does not own was captured")
    };
    assert!(
        matches!(error, DeviceError::NotRetained { argument: "kv", .. }),
        "the argument is named: {error}"
    );
    let all = [all_but_kv, vec![kv.memory()]].concat();
    let graph = stream.capture(all, record).unwrap();
    stream.replay(&graph).unwrap();
    stream.synchronize().unwrap();
}

/// The buffers are dropped, others are allocated in their place, and the graph still runs.
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
        Ok(())
    });
    assert!(outer.is_ok(), "the outer capture goes on");
}

pub fn what_does_not_fit_is_refused<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let config = CacheConfig::for_memory(ModelConfig::preset("tiny").unwrap(), 1 << 28, 1).unwrap();
    let manager = KvCacheManager::new(device.clone(), config).unwrap();
    let kv = upload(&stream, &[0_u16; 512]);
    let error = manager.layer(LayerId(99)).err().expect("there is no such layer");
    assert!(matches!(error, KvError::NoSuchLayer { layer: 99, layers: 5 }), "{error}");
    let error = manager.layer_for(LayerId(0), u32::MAX).err().expect("no such step");
    assert!(matches!(error, KvError::StepTooLong { .. }), "{error}");
    let handle = manager.layer_for(LayerId(0), 2).unwrap();
    let error = handle.append_swa(&stream, &kv).unwrap_err();
    let KvError::Device(DeviceError::Length { what: "kv", found: 512, needed: 1024 }) = error
    else {
        panic!("the short tensor is named: {error}")
    };
}

/// A step over the bucket, and another cache's graph, are refused and run nothing.
pub fn a_graph_replays_only_what_it_was_captured_for<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let model = ModelConfig::preset("tiny").unwrap();
    let config = CacheConfig { max_requests: 4, num_blocks: 4, ..CacheConfig::smallest(model) };
    let new = || KvCacheManager::new(device.clone(), config.clone()).unwrap();
    let (mut cache, other) = (new(), new());
    let kv = upload(&stream, &rows(4, 8).concat());
    let record =
        |manager: &KvCacheManager<B>| manager.layer_for(LayerId(0), 2)?.append_swa(&stream, &kv);
    let graph = cache.capture(&stream, 2, vec![kv.memory()], record).unwrap();
    assert_eq!(graph.bucket(), 2);
    let id = cache.admit().unwrap();
    cache.prepare_forward(&stream, &[StepRequest { id, start: 0, tokens: 3 }]).unwrap();
    let error = cache.replay(&stream, &graph).unwrap_err();
    assert!(matches!(error, KvError::OverBucket { tokens: 3, bucket: 2 }), "{error}");
    let error = other.replay(&stream, &graph).unwrap_err();
    assert!(matches!(error, KvError::ForeignGraph), "{error}");
    let error = cache.capture(&stream, u32::MAX, Vec::new(), |_| Ok(())).err().unwrap();
    assert!(matches!(error, KvError::StepTooLong { .. }), "{error}");
    let ring = download(&stream, cache.layer(LayerId(0)).unwrap().swa().data);
    assert!(ring.iter().all(|&byte| byte == 0), "nothing ran");
    cache.commit(id, 3).unwrap();
    cache.prepare_forward(&stream, &[StepRequest { id, start: 3, tokens: 1 }]).unwrap();
    cache.replay(&stream, &graph).unwrap();
    let ring = download(&stream, cache.layer(LayerId(0)).unwrap().swa().data);
    assert!(ring.iter().any(|&byte| byte != 0));
}
