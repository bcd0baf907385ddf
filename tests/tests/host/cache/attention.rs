//! The number of launches that attention and gathers of a layer take, counted on a device that does nothing.

use std::ops::{Bound, Range};

use dsv4_kv::device::{Null, NullDevice, Stream};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::kv_layout::geometry::LayerKind;
use dsv4_kv::step::{
    AttentionTensors, CompressorInputs, Csa, CsaInputs, EntryLists, Hca, HcaInputs, QueryForm, Swa,
    UpdatedLayer,
};
use dsv4_kv::{CacheConfig, KvCacheManager, KvError, Launches, LayerId, RequestId, StepRequest};

/// A cache of one layer with a window alone, for drafts of up to two tokens.
fn cache() -> (KvCacheManager<Null>, Stream<Null>, RequestId) {
    let tiny = ModelConfig::preset("tiny").unwrap();
    let model = ModelConfig { layers: vec![LayerKind::Swa], mtp_layers: 0, ..tiny };
    let config = CacheConfig { max_draft: 2, ..CacheConfig::new(model) };
    let mut cache = KvCacheManager::new(NullDevice::null(1 << 40), config).unwrap();
    let (stream, id) = (cache.device().stream().unwrap(), cache.admit().unwrap());
    (cache, stream, id)
}

/// Calls attention for `queries` with `heads` heads, with tensors for `tokens` queries of 4 heads. Returns the number
/// of launches, and the result.
fn launches(
    layer: &UpdatedLayer<'_, Null, Swa>,
    queries: Range<u32>,
    (heads, tokens): (u32, u64),
) -> (u64, Result<(), KvError>) {
    let device = layer.stream().device();
    let [query, out] = [0, 1].map(|_| device.allocate("rows", tokens * 4 * 512).unwrap());
    let sinks = device.allocate("sinks", 4).unwrap();
    let form = QueryForm::Rotated;
    let heads =
        AttentionTensors { heads, query: &query, form, sinks: &sinks, out: &out, lse: None };
    let before = device.backend().calls().launches;
    let result = layer.attend(queries, &heads);
    (device.backend().calls().launches - before, result)
}

/// The own rows of a chunk are quantised once, by the first call that queues anything. Refused calls and calls without
/// queries queue nothing.
#[test]
fn own_rows_are_quantised_once_and_for_no_refused_call() {
    for (tokens, first) in [(4_u32, 2), (3, 1)] {
        let (mut cache, stream, id) = cache();
        let kv = cache.device().allocate("kv", u64::from(tokens) * 512).unwrap();
        let parts = [StepRequest { id, start: 0, tokens }];
        let mut step = cache.begin_step(&stream, Launches::Eager, &parts).unwrap();
        let layer = step.swa(LayerId(0)).unwrap().update(&kv).unwrap();
        let all = 0..tokens;
        let short = u64::from(tokens) - 1;
        for (queries, heads, what) in [
            (0..tokens + 1, (4, 8), "queries"),
            (0..tokens, (0, 8), "heads"),
            (0..tokens, (129, 8), "heads"),
            (0..tokens, (4, short), "query"),
        ] {
            let (0, Err(error)) = launches(&layer, queries, heads) else { panic!("{what}") };
            assert!(error.to_string().contains(what), "{error}");
        }
        for heads in [4, 0, 129] {
            for at in 0..=tokens {
                assert!(matches!(launches(&layer, at..at, (heads, 8)), (0, Ok(()))));
            }
        }
        assert!(
            matches!(launches(&layer, all.clone(), (4, 8)), (queued, Ok(())) if queued == first)
        );
        assert!(matches!(launches(&layer, 1..tokens, (4, 8)), (1, Ok(()))));
    }
}

/// No query of a short step sees an entry. The number of entries is still written.
#[test]
fn gathers_of_no_rows_take_no_tile() {
    let tiny = ModelConfig::preset("tiny").unwrap();
    let model = ModelConfig { layers: vec![LayerKind::Hca], mtp_layers: 0, ..tiny };
    let mut cache =
        KvCacheManager::new(NullDevice::null(1 << 40), CacheConfig::new(model)).unwrap();
    let stream = cache.device().stream().unwrap();
    let device = cache.device().clone();
    let [kv, tile] = [0, 1].map(|_| device.allocate("rows", 256 * 512).unwrap());
    let floats = device.allocate("projections", 256 * 1024).unwrap();
    let lengths = device.allocate("lengths", 256).unwrap();
    let main = CompressorInputs { kv: &floats, gate: &floats, ape: &floats, norm: &floats };
    for (tokens, is_short) in [(5, true), (127, true), (128, false)] {
        let id = cache.admit().unwrap();
        let parts = [StepRequest { id, start: 0, tokens }];
        let mut step = cache.begin_step(&stream, Launches::Eager, &parts).unwrap();
        let layer = step.hca(LayerId(0)).unwrap().update(&HcaInputs { kv: &kv, main }).unwrap();
        let before = device.backend().calls().launches;
        let result = layer.gather_all(.., 0, &tile, &lengths);
        let launches = device.backend().calls().launches - before;
        match result {
            Ok(()) => assert!(is_short && launches == 1, "{tokens}: {launches}"),
            Err(KvError::Device(error)) => assert!(!is_short && launches == 0, "{error}"),
            Err(error) => panic!("{error}"),
        }
        layer.gather_all(.., 1, &tile, &lengths).unwrap();
        layer.gather_all(0..tokens, 1, &tile, &lengths).unwrap();
        for queries in [
            (Bound::Unbounded, Bound::Included(tokens)),
            (Bound::Included(tokens + 1), Bound::Unbounded),
        ] {
            let refused = layer.gather_all(queries, 1, &tile, &lengths).unwrap_err();
            assert!(matches!(refused, KvError::NoSuchQueries { .. }), "{refused}");
        }
        let before = device.backend().calls().launches;
        layer.gather_all((Bound::Excluded(1), Bound::Included(1)), 1, &tile, &lengths).unwrap();
        assert_eq!(device.backend().calls().launches, before, "no queries");
        drop(step);
        cache.release(id).unwrap();
    }
}

/// Without queries, or with lists of no elements, nothing is queued, whichever queries have lists.
#[test]
fn no_queries_and_empty_lists_queue_nothing() {
    let tiny = ModelConfig::preset("tiny").unwrap();
    let model = ModelConfig { layers: vec![LayerKind::Csa], mtp_layers: 0, ..tiny };
    let mut cache =
        KvCacheManager::new(NullDevice::null(1 << 40), CacheConfig::new(model)).unwrap();
    let (stream, id) = (cache.device().stream().unwrap(), cache.admit().unwrap());
    let device = cache.device().clone();
    let [kv, rows] = [0, 1].map(|_| device.allocate("rows", 256 * 512).unwrap());
    let floats = device.allocate("projections", 256 * 1024).unwrap();
    let entries = device.allocate("lists", 64).unwrap();
    let main = CompressorInputs { kv: &floats, gate: &floats, ape: &floats, norm: &floats };
    let parts = [StepRequest { id, start: 0, tokens: 8 }];
    let mut step = cache.begin_step(&stream, Launches::Eager, &parts).unwrap();
    let inputs = CsaInputs { kv: &kv, main, index: main };
    let layer = step.csa(LayerId(0)).unwrap().update(&inputs).unwrap();
    let form = QueryForm::Rotated;
    let heads =
        AttentionTensors { heads: 4, query: &rows, form, sinks: &floats, out: &rows, lse: None };
    let lists = |k| EntryLists { queries: 3..5, k, indices: &entries };
    let before = device.backend().calls().launches;
    layer.attend(0..0, &lists(2), &heads).unwrap();
    layer.gather_entries(8..8, &lists(2), &rows).unwrap();
    layer.gather_entries(3..5, &lists(0), &rows).unwrap();
    assert_eq!(device.backend().calls().launches, before);
    for refused in
        [layer.attend(9..9, &lists(2), &heads), layer.gather_entries(9..9, &lists(2), &rows)]
    {
        let refused = refused.unwrap_err();
        assert!(matches!(refused, KvError::NoSuchQueries { .. }), "{refused}");
    }
    for refused in
        [layer.attend(0..1, &lists(2), &heads), layer.gather_entries(.., &lists(2), &rows)]
    {
        let refused = refused.unwrap_err();
        assert!(matches!(refused, KvError::ListsMismatch(_)), "{refused}");
    }
    layer.gather_entries(3..5, &lists(2), &rows).unwrap();
    assert_eq!(device.backend().calls().launches, before + 1);
}

/// Threads may share a layer.
#[test]
fn an_updated_layer_is_sync() {
    fn assert_sync<T: Sync>() {}
    assert_sync::<UpdatedLayer<'_, Null, Swa>>();
    assert_sync::<UpdatedLayer<'_, Null, Csa>>();
    assert_sync::<UpdatedLayer<'_, Null, Hca>>();
}
