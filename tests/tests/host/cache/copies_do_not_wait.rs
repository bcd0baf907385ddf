//! Copies between steps run behind the step before them. The host waits for none of them.

use dsv4_kv::device::{Device, Null, Stream};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::kv_layout::geometry::LayerKind;
use dsv4_kv::{
    Accepted, CacheConfig, KvCacheManager, KvError, Launches, LayerId, RequestId, StepRequest,
};
use dsv4_kv_tests::lazy::Lazy;

type Cache = KvCacheManager<Lazy<Null>>;

fn step(
    cache: &mut Cache,
    stream: &Stream<Lazy<Null>>,
    (id, start): (RequestId, u32),
) -> Result<(), KvError> {
    let kv = cache.device().allocate("rows", 512)?;
    let requests = [StepRequest { id, start, tokens: 1 }];
    let mut step = cache.begin_step(stream, Launches::Eager, &requests)?;
    step.swa(LayerId(0))?.update(&kv)?.append()?;
    // Freeing memory would run what is queued.
    std::mem::forget(kv);
    step.commit(&[Accepted::count(id, 1)])
}

/// Between two steps a server admits, forks and saves; the second step is queued while the first one runs.
#[test]
fn a_step_is_queued_behind_copies_and_the_step_before_them() {
    let device = Device::from_backend(Lazy::new(Null::new(1 << 34)));
    let tiny = ModelConfig::preset("tiny").unwrap();
    let model = ModelConfig { layers: vec![LayerKind::Swa], mtp_layers: 0, ..tiny };
    let config = CacheConfig { max_requests: 8, ..CacheConfig::new(model) };
    let mut cache = KvCacheManager::new(device, config).unwrap();
    let (stream, ran) = (cache.device().stream().unwrap(), cache.device().event().unwrap());
    let id = cache.admit().unwrap();
    step(&mut cache, &stream, (id, 0)).unwrap();
    stream.record(&ran).unwrap();
    for _ in 0..6 {
        cache.fork(&stream, id).unwrap();
    }
    step(&mut cache, &stream, (id, 1)).unwrap();
    assert!(!ran.has_passed().unwrap(), "the host waited for the first step");
    stream.synchronize().unwrap();
    assert!(ran.has_passed().unwrap());
}
