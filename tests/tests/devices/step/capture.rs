//! Captured steps: the graphs that a step accepts, and the layers that they complete.

use dsv4_kv::device::{Backend, Buffer, Device, bf16};
use dsv4_kv::layer_progress::LayerProgress;
use dsv4_kv::{
    Accepted, Bucket, CacheConfig, KvCacheManager, KvError, Launches, LayerId, PoolKind,
    StepRequest,
};
use kv_layout::geometry::LayerKind::{Csa, Hca, Swa};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;

use crate::fed::{Fed, Padding, Part, begin};
use crate::inputs::{download, rows, upload_bf16};
use crate::rings::pool;
use crate::stories::{Story, config};

/// A cache of two layers with a window alone.
fn cache<B: Backend>(device: &Device<B>) -> KvCacheManager<B> {
    let config =
        CacheConfig { max_step_tokens: 8, max_draft: 1, ..config(&[Swa, Swa], FORMATS, 4) };
    KvCacheManager::new(device.clone(), config).unwrap()
}

const FORMATS: (MainFormat, IndexFormat) = (MainFormat::Ue8m0, IndexFormat::Mxfp4);
const LAYERS: [LayerId; 2] = [LayerId(0), LayerId(1)];

/// A graph is queued only by a step of its cache that was begun with its bucket and has not run its layers.
pub fn a_step_takes_its_own_graph_once<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let (mut cache, mut other) = (cache(device), cache(device));
    let kv = upload_bf16(&stream, &rows(8, 8).concat());
    let bucket = Bucket { tokens: 4, tokens_per_request: 2, requests: 2, context: 100 };
    let others = upload_bf16(&stream, &rows(8, 9).concat());
    let mut capture = |layer, kv: &Buffer<B, bf16>| {
        let record = |layers: &mut dsv4_kv::Layers<'_, B>| layers.swa(layer)?.update(kv)?.append();
        cache.capture(&stream, &bucket, vec![kv.memory()], record).unwrap()
    };
    let [first, second] = LAYERS.map(|layer| capture(layer, &kv));
    let over_other_rows = capture(LAYERS[0], &others);
    assert_eq!(first.bucket(), bucket);

    let foreign = other.admit().unwrap();
    let step = [StepRequest { id: foreign, start: 0, tokens: 1 }];
    let mut step = other.begin_step(&stream, Launches::Bucket(&bucket), &step).unwrap();
    assert!(matches!(step.replay(&first), Err(KvError::ForeignGraph)));
    drop(step);

    let id = cache.admit().unwrap();
    let parts = [StepRequest { id, start: 0, tokens: 2 }];
    let wider = Bucket { tokens: 8, requests: 4, ..bucket };
    for launches in [Launches::Eager, Launches::Bucket(&wider)] {
        let mut step = cache.begin_step(&stream, launches, &parts).unwrap();
        let error = step.replay(&first).unwrap_err();
        assert!(matches!(error, KvError::WrongBucket { captured, .. } if captured == bucket));
        assert!(matches!(step.repeat(&first), Err(KvError::WrongBucket { .. })));
    }
    let ring = || -> Vec<u8> { download(&stream, &pool(&cache, LAYERS[0], PoolKind::SwaData)) };
    assert!(ring().iter().all(|&byte| byte == 0), "nothing ran");

    let mut step = cache.begin_step(&stream, Launches::Bucket(&bucket), &parts).unwrap();
    assert!(matches!(step.repeat(&first), Err(KvError::LayerNotUpdated { .. })));
    step.replay(&first).unwrap();
    assert_eq!(step.progress(LAYERS[0]).unwrap(), LayerProgress::Finished);
    assert_eq!(step.progress(LAYERS[1]).unwrap(), LayerProgress::NotStarted);
    // Reads after the replay must be given the rows with which the graph updated the layer.
    for _ in 0..2 {
        let refused = step.swa(LAYERS[0]).unwrap().already_updated(&others).map(drop).unwrap_err();
        assert!(matches!(refused, KvError::RowsMismatch(_)), "{refused}");
        drop(step.swa(LAYERS[0]).unwrap().already_updated(&kv).unwrap());
    }
    let refused = step.repeat(&over_other_rows).unwrap_err();
    assert!(matches!(refused, KvError::RowsMismatch(_)), "{refused}");
    let error = step.replay(&first).unwrap_err();
    assert!(matches!(error, KvError::LayerRepeated { layer: LayerId(0), .. }), "{error}");
    let error = step.swa(LAYERS[0]).unwrap().update(&kv).err().unwrap();
    assert!(matches!(error, KvError::LayerRepeated { layer: LayerId(0), .. }), "{error}");
    let refused = step.try_commit(&[Accepted::count(id, 2)]).unwrap_err();
    let error = refused.error();
    assert!(matches!(error, KvError::LayerUnfinished { layer: LayerId(1), .. }), "{error}");
    let mut step = refused.into_step();
    step.replay(&second).unwrap();
    step.repeat(&first).unwrap();
    step.commit(&[Accepted::count(id, 2)]).unwrap();
    // The rings equal those of the same step without graphs.
    let parts = [StepRequest { id: foreign, ..parts[0] }];
    let mut step = other.begin_step(&stream, Launches::Eager, &parts).unwrap();
    for layer in LAYERS {
        step.swa(layer).unwrap().update(&kv).unwrap().append().unwrap();
    }
    step.commit(&[Accepted::count(foreign, 2)]).unwrap();
    let rings = |cache: &KvCacheManager<B>| {
        LAYERS.map(|layer| -> Vec<u8> { download(&stream, &pool(cache, layer, PoolKind::SwaData)) })
    };
    assert_eq!(rings(&cache), rings(&other));
}

/// Buckets outside the range of the cache, and steps that exceed their bucket, are refused by field and value.
pub fn what_exceeds_a_bucket_is_refused<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let mut cache = cache(device);
    let good = Bucket { tokens: 4, tokens_per_request: 2, requests: 2, context: 3 };
    for (bucket, name) in [
        (Bucket { tokens: 5, ..good }, "tokens"),
        (Bucket { tokens: 0, ..good }, "tokens"),
        (Bucket { tokens: 9, tokens_per_request: 8, ..good }, "tokens"),
        (Bucket { tokens_per_request: 9, ..good }, "tokens_per_request"),
        (Bucket { requests: 5, ..good }, "requests"),
        (Bucket { context: 641, ..good }, "context"),
    ] {
        let capture = cache.capture(&stream, &bucket, Vec::new(), |_| Ok(())).err().unwrap();
        let step = cache.begin_step(&stream, Launches::Bucket(&bucket), &[]).err().unwrap();
        for error in [capture, step] {
            assert!(matches!(error, KvError::Bucket { field, .. } if field == name), "{error}");
        }
    }
    let ids = [(); 3].map(|()| cache.admit().unwrap());
    let part = |request: usize, tokens| StepRequest { id: ids[request], start: 0, tokens };
    let mut refused = |parts: &[StepRequest]| {
        let error = cache.begin_step(&stream, Launches::Bucket(&good), parts).err().unwrap();
        assert!(error.to_string().contains("the bucket is for"), "{error}");
        error
    };
    let error = refused(&[part(0, 1), part(1, 1), part(2, 1)]);
    assert!(matches!(error, KvError::TooManyRequests { requests: 3, limit: 2, .. }), "{error}");
    let error = refused(&[part(0, 3)]);
    assert!(matches!(error, KvError::ChunkTooLong { tokens: 3, limit: 2, .. }), "{error}");
    let error = refused(&[part(0, 4)]);
    assert!(matches!(error, KvError::ContextTooLong { end: 4, limit: 3, .. }), "{error}");
    let small = Bucket { tokens: 3, ..good };
    let step = [part(0, 2), part(1, 2)];
    let error = cache.begin_step(&stream, Launches::Bucket(&small), &step).err().unwrap();
    assert!(matches!(error, KvError::StepTooLong { tokens: 4, limit: 3, .. }), "{error}");
}

/// A captured decode step that is queued a second time leaves every byte as after the first time.
pub fn queueing_a_step_again_changes_nothing<B: Backend>(device: &Device<B>) {
    const STARTS: [usize; 4] = [3, 127, 128, 255];
    let (layers, formats) = ([Swa, Csa, Hca], (MainFormat::F32, IndexFormat::Nvfp4));
    let stories = STARTS.map(|start| Story::random(&layers, start + 6, 70 + start as u64));
    // With two tokens per request the separate kernels run, with one the fused kernels.
    for tokens_per_request in [2, 1] {
        let config = CacheConfig { max_draft: 1, ..config(&layers, formats, STARTS.len() as u32) };
        let mut fed = Fed::new(device, config);
        let mut requests = Vec::new();
        for (story, start) in stories.iter().zip(STARTS) {
            let id = fed.manager.admit().unwrap();
            fed.step(&[Part::new(id, story, 0..start)], Padding::None);
            requests.push((id, story));
        }
        let bucket = fed.bucket(STARTS.len() as u32, tokens_per_request);
        let graphs = fed.capture(bucket, &[], &mut |_, _| Ok(()));
        for turn in 0..5 {
            let parts = requests
                .iter()
                .zip(STARTS)
                .map(|(&(id, story), start)| Part::new(id, story, start + turn..start + turn + 1));
            let parts: Vec<_> = parts.collect();
            let before = fed.pool_bytes();
            fed.replay(&parts, bucket, &graphs, &[0; 4]);
            let once = fed.pool_bytes();
            assert!(once != before, "the step wrote something");
            let mut steps = begin(&mut fed.manager, &fed.stream, &parts, bucket).unwrap();
            let mut step = steps.remove(0);
            step.replay(&graphs[0]).unwrap();
            (0..3).for_each(|_| step.repeat(&graphs[0]).unwrap());
            let all: Vec<_> = parts.iter().map(|part| Accepted::count(part.id, 1)).collect();
            step.commit(&all).unwrap();
            drop(steps);
            assert!(fed.pool_bytes() == once, "step {turn} queued again");
        }
        fed.manager.check_faults(&fed.stream).unwrap();
    }
}
