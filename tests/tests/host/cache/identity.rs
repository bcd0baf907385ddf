//! Streams, tensors, graphs and requests belong to one device and one cache, also where two caches share a device.

use dsv4_kv::device::{Backend, Device, DeviceError, EmuDevice, EmuOptions};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::{
    Accepted, Bucket, CacheConfig, KvCacheManager, KvError, Launches, LayerGroup, LayerId,
    StepRequest,
};
use dsv4_kv_tests::fed::{Fed, Padding, Part};
use dsv4_kv_tests::inputs::{rows, upload_bf16};
use dsv4_kv_tests::lazy::Lazy;
use dsv4_kv_tests::rings::assert_ring;
use dsv4_kv_tests::stories::{Story, config};
use kv_layout::geometry::LayerKind::{Csa, Hca, Swa};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;

const FORMATS: (MainFormat, IndexFormat) = (MainFormat::Ue8m0, IndexFormat::Mxfp4);

fn device() -> EmuDevice {
    EmuDevice::new(EmuOptions::default())
}

/// A cache with one layer of the trunk and one draft layer.
fn cache<B: Backend>(device: &Device<B>) -> KvCacheManager<B> {
    let base = config(&[Swa, Swa], FORMATS, 2);
    let model = ModelConfig { mtp_layers: 1, ..base.model.clone() };
    let config = CacheConfig { model, max_step_tokens: 8, ..base };
    KvCacheManager::new(device.clone(), config).unwrap()
}

fn foreign(result: Result<(), KvError>, name: &str) {
    let error = result.expect_err("it is of another device");
    assert!(
        matches!(error, KvError::Device(DeviceError::ForeignDevice { what, .. }) if what == name),
        "{error}"
    );
}

/// A stream, a tensor and memory of another device are refused, and the cache stays usable.
#[test]
fn what_is_of_another_device_is_refused() {
    let (own, other) = (device(), device());
    let mut cache = cache(&own);
    let (stream, strange) = (own.stream().unwrap(), other.stream().unwrap());
    let id = cache.admit().unwrap();
    let step = [StepRequest { id, start: 0, tokens: 1 }];
    foreign(cache.begin_step(&strange, Launches::Eager, &step).map(drop), "stream");
    let bucket = Bucket::decode(cache.config(), 1);
    foreign(cache.capture(&strange, &bucket, Vec::new(), |_| Ok(())).map(drop), "stream");
    let kv = upload_bf16(&strange, &rows(1, 1).concat());
    let retained = vec![kv.memory()];
    foreign(cache.capture(&stream, &bucket, retained, |_| Ok(())).map(drop), "memory");
    foreign(cache.check_faults(&strange), "buffer");

    let mut open = cache.begin_step(&stream, Launches::Eager, &step).unwrap();
    foreign(open.swa(LayerId(0)).unwrap().update(&kv).map(drop), "kv");
    let kv = upload_bf16(&stream, &rows(1, 1).concat());
    open.swa(LayerId(0)).unwrap().update(&kv).unwrap().append().unwrap();
    open.commit(&[Accepted::count(id, 1)]).unwrap();
}

/// A step in another stream than the last step of its layer group waits for that step on the device, since both use the
/// step memory of the group.
#[test]
fn a_step_in_another_stream_waits_for_the_last() {
    for (group, layer) in LayerGroup::ALL.into_iter().zip([LayerId(0), LayerId(1)]) {
        let device = Lazy::emulated(EmuOptions::default());
        let [one, other, aside] = [(); 3].map(|()| device.stream().unwrap());
        let mut cache = cache(&device);
        let id = cache.admit().unwrap();
        let history = rows(2, 1);
        // The tensors live until the end, because a free would wait for the work.
        let kv = history.iter().map(|row| upload_bf16(&aside, row)).collect::<Vec<_>>();
        for ((start, stream), kv) in (0..).zip([&one, &other]).zip(&kv) {
            let part = [StepRequest { id, start, tokens: 1 }];
            let mut group = cache.group(group).unwrap();
            let mut step = group.begin_step(stream, Launches::Eager, &part).unwrap();
            step.swa(layer).unwrap().update(kv).unwrap().append().unwrap();
            step.commit(&[Accepted::count(id, 1)]).unwrap();
        }
        other.synchronize().unwrap();
        assert_ring(&cache, &aside, layer, id, &history);
    }
}

/// Requests of one cache are unknown to another, whatever their slots and generations.
#[test]
fn a_request_is_of_its_cache() {
    let device = device();
    let (mut one, mut two) = (cache(&device), cache(&device));
    let stream = device.stream().unwrap();
    let (own, foreign) = (one.admit().unwrap(), two.admit().unwrap());
    assert_eq!((own.slot(), own.generation()), (foreign.slot(), foreign.generation()));
    assert!(matches!(one.release(foreign), Err(KvError::ForeignRequest { .. })));
    let step = [StepRequest { id: foreign, start: 0, tokens: 1 }];
    let error = one.begin_step(&stream, Launches::Eager, &step).err().unwrap();
    assert!(matches!(error, KvError::ForeignRequest { request } if request == foreign), "{error}");
    assert!(matches!(one.rewind_draft(foreign, 0), Err(KvError::ForeignRequest { .. })));
    one.release(own).unwrap();
}

/// A checkpoint of one cache is refused by another, which would otherwise give its number to two holders, or read other
/// rows under that number. Nothing changes, and the checkpoint is returned.
#[test]
fn a_checkpoint_is_of_its_cache() {
    let device = device();
    let story = Story::random(&[Swa], 128, 5);
    let [mut one, mut two] = [0; 2].map(|_| {
        let config = CacheConfig { num_checkpoints: 1, ..config(&[Swa], FORMATS, 1) };
        let mut fed = Fed::new(&device, config);
        let id = fed.manager.admit().unwrap();
        fed.step(&[Part::new(id, &story, 0..128)], Padding::None);
        let saved = fed.manager.save_checkpoints(&fed.stream, &[(id, 128)]).unwrap().remove(0);
        (fed, id, saved)
    });
    let error = two.0.manager.restore_checkpoint(&two.0.stream, two.1, &one.2).unwrap_err();
    assert!(matches!(error, KvError::ForeignCheckpoint), "{error}");
    let refused = two.0.manager.discard_checkpoint(one.2).unwrap_err();
    assert_eq!(two.0.manager.ledger().free_checkpoints(), 0, "{refused}");
    one.0.manager.discard_checkpoint(refused.into_checkpoint()).unwrap();
    two.0.manager.restore_checkpoint(&two.0.stream, two.1, &two.2).unwrap();
    two.0.manager.discard_checkpoint(two.2).unwrap();
    assert_eq!(one.0.manager.ledger().free_checkpoints(), 1);
}

/// Two caches on one device, driven by two threads and by steps in several streams: each holds the bytes of its own
/// requests.
#[test]
fn two_caches_share_a_device() {
    let device = device();
    let layers = [Swa, Csa, Hca];
    std::thread::scope(|scope| {
        for seed in [1, 2] {
            let device = device.clone();
            scope.spawn(move || {
                let story = Story::random(&layers, 140, seed);
                let stored = story.stored(&device, FORMATS);
                let mut fed = Fed::new(&device, config(&layers, FORMATS, 1));
                let id = fed.manager.admit().unwrap();
                for range in [0..120, 120..127, 127..128, 128..129, 129..140] {
                    // Each step has a stream of its own; the cache orders the steps.
                    fed.stream = device.stream().unwrap();
                    fed.step(&[Part::new(id, &story, range)], Padding::None);
                }
                fed.assert_holds(id, &story, &stored, 140);
                fed.manager.check_faults(&fed.stream).unwrap();
            });
        }
    });
}
