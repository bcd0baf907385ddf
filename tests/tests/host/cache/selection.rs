//! The number of launches that a selection takes, in a cache for long contexts, counted on a device that does nothing.

use dsv4_kv::device::{DeviceError, Null, NullDevice, Stream};
use dsv4_kv::error::LimitedBy;
use dsv4_kv::indexer::ProjectedQueries;
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::kv_layout::geometry::LayerKind;
use dsv4_kv::step::{CompressorInputs, CsaInputs, EntryLists};
use dsv4_kv::{
    Accepted, Bucket, CacheConfig, IndexerWorkspace, KvCacheManager, KvError, Launches, LayerId,
    Layers, RequestId, StepRequest, WorkspaceLimits,
};

/// Maximum tokens of a request.
const CONTEXT: u32 = 131_072;
/// Tokens of a step: a number of queries for which short rows take one launch for scores and lists.
const TOKENS: u32 = 96;
/// Launches of a selection: `index_query`, and one launch for scores and lists, or one for each.
const ONE: u64 = 2;
const TWO: u64 = 3;

/// A cache of one CSA layer, and a request of `start` tokens.
struct Cache {
    cache: KvCacheManager<Null>,
    stream: Stream<Null>,
    id: RequestId,
    start: u32,
}

impl Cache {
    fn new(start: u32) -> Self {
        Self::of(CONTEXT, start)
    }

    fn of(max_context: u32, start: u32) -> Self {
        let tiny = ModelConfig::preset("tiny").unwrap();
        let model = ModelConfig { layers: vec![LayerKind::Csa], mtp_layers: 0, ..tiny };
        let config = CacheConfig {
            max_requests: 2,
            num_blocks: max_context / 128,
            max_context,
            max_step_tokens: 65_536,
            ..CacheConfig::new(model)
        };
        let mut cache = KvCacheManager::new(NullDevice::null(1 << 40), config).unwrap();
        let (stream, id) = (cache.device().stream().unwrap(), cache.admit().unwrap());
        if start > 0 {
            let step = [StepRequest { id, start: 0, tokens: start }];
            let mut step = cache.begin_step(&stream, Launches::Eager, &step).unwrap();
            step.skip_kernels();
            step.commit(&[Accepted::count(id, start)]).unwrap();
        }
        Self { cache, stream, id, start }
    }

    /// Number of launches of a selection in the request's next step.
    fn launches(&mut self, launches: Launches<'_>) -> Result<u64, KvError> {
        let parts = [StepRequest { id: self.id, start: self.start, tokens: TOKENS }];
        select(&mut *self.cache.begin_step(&self.stream, launches, &parts)?)
    }
}

fn workspace(device: &NullDevice) -> IndexerWorkspace<Null> {
    workspace_for(device, CONTEXT)
}

fn workspace_for(device: &NullDevice, context: u32) -> IndexerWorkspace<Null> {
    let model = ModelConfig::preset("tiny").unwrap();
    let limits = WorkspaceLimits { context, queries: TOKENS, bytes: u64::MAX };
    IndexerWorkspace::new(device, &model, limits).unwrap()
}

/// Updates the layer and selects for all queries, in a workspace of its own. Returns the launches of the selection.
fn select(layers: &mut Layers<'_, Null>) -> Result<u64, KvError> {
    let workspace = workspace(layers.stream().device());
    select_in(layers, &workspace)
}

/// As [`select`], in the given workspace.
fn select_in(
    layers: &mut Layers<'_, Null>,
    workspace: &IndexerWorkspace<Null>,
) -> Result<u64, KvError> {
    let device = layers.stream().device().clone();
    let floats = device.allocate::<f32>("projections", 1 << 20)?;
    let compressor =
        || CompressorInputs { kv: &floats, gate: &floats, ape: &floats, norm: &floats };
    let kv = device.allocate("rows", 1 << 20)?;
    let (queries, weights) = (&floats, &floats);
    let selected = &device.allocate("lists", 1 << 20)?;
    let inputs = CsaInputs { kv: &kv, main: compressor(), index: compressor() };
    let layer = layers.csa(LayerId(0))?.update(&inputs)?;
    let before = device.backend().calls().launches;
    let projected = ProjectedQueries { queries, weights };
    // Lists may not overwrite the step's rows, which the append still needs.
    let over = &kv.cast()?;
    let lists = EntryLists { queries: 0..TOKENS, k: 16, indices: over };
    let refused = layer.select_projected(&projected, workspace, &lists).unwrap_err();
    let KvError::Device(DeviceError::Aliased { argument: "selected", other: "kv", .. }) = refused
    else {
        panic!("{refused}")
    };
    assert_eq!(device.backend().calls().launches, before);
    // Nor the queries, which other lists still need.
    let over = &floats.cast()?;
    let lists = EntryLists { indices: over, ..lists };
    let refused = layer.select_projected(&projected, workspace, &lists).unwrap_err();
    let KvError::Device(DeviceError::Aliased { argument: "selected", other, .. }) = refused else {
        panic!("{refused}")
    };
    assert_eq!(other, "projected queries");
    assert_eq!(device.backend().calls().launches, before);
    let lists = EntryLists { indices: selected, ..lists };
    // What only a later part would lack, and what only its last launch would refuse.
    let limits = WorkspaceLimits { context: 1 << 20, queries: TOKENS / 2, bytes: u64::MAX };
    let parts = IndexerWorkspace::new(&device, &ModelConfig::preset("tiny").unwrap(), limits)?;
    let short = floats.slice(0, u64::from(TOKENS * 64 * 128) - 1).expect("it is shorter");
    let few = ProjectedQueries { queries: &short, weights };
    let refused = layer.select_projected(&few, &parts, &lists).unwrap_err();
    assert!(matches!(refused, KvError::Device(DeviceError::Length { .. })), "{refused}");
    let long = EntryLists { queries: 0..TOKENS, k: 4096, indices: selected };
    let refused = layer.select_projected(&projected, &parts, &long).unwrap_err();
    assert!(matches!(refused, KvError::Device(DeviceError::Argument { .. })), "{refused}");
    assert_eq!(device.backend().calls().launches, before);
    layer.select_projected(&projected, workspace, &lists)?;
    Ok(device.backend().calls().launches - before)
}

fn bucket(context: u32) -> Bucket {
    Bucket { tokens: TOKENS, tokens_per_request: TOKENS, requests: 1, context }
}

/// In an eager step the longest request decides, under a bucket its maximum context.
#[test]
fn a_short_step_takes_one_launch_for_scores_and_lists() {
    let longest_short = 4 * 2048 - TOKENS;
    for (start, want) in [(0, ONE), (500, ONE), (longest_short, ONE), (longest_short + 128, TWO)] {
        assert_eq!(Cache::new(start).launches(Launches::Eager).unwrap(), want, "from {start}");
    }
    for (context, want) in [(640, ONE), (8192, ONE), (8192 + 128, TWO), (CONTEXT, TWO)] {
        let bucket = bucket(context);
        let taken = Cache::new(500).launches(Launches::Bucket(&bucket)).unwrap();
        assert_eq!(taken, want, "for {context} tokens");
    }
}

/// A workspace for requests of some length also has room for all shorter ones, with the same number of queries. That is
/// not obvious: rows of more than 65,536 scores have fewer group maxima than some shorter rows.
#[test]
fn a_workspace_has_room_for_every_shorter_context() {
    for longest in [300_032, 524_288, 1 << 20] {
        let mut cache = Cache::of(longest, 0);
        let workspace = workspace_for(cache.cache.device(), longest);
        for context in [8192, 65_536, 200_000, 262_144, 262_272, 400_000, longest] {
            let bucket = bucket(context.min(longest));
            let Cache { cache, stream, .. } = &mut cache;
            let id = cache.admit().unwrap();
            let parts = [StepRequest { id, start: 0, tokens: TOKENS }];
            let mut step = cache.begin_step(stream, Launches::Bucket(&bucket), &parts).unwrap();
            let selected = select_in(&mut step, &workspace);
            assert!(selected.is_ok(), "{context} of {longest} tokens: {selected:?}");
            drop(step);
            cache.release(id).unwrap();
        }
    }
}

/// A workspace belongs to one cache: steps of two caches may run at the same time, and would overwrite each other's
/// scores.
#[test]
fn a_workspace_is_of_one_cache() {
    let (mut one, mut other) = (Cache::new(0), Cache::new(0));
    let workspace = workspace(one.cache.device());
    let select = |Cache { cache, stream, id, .. }: &mut Cache| {
        let parts = [StepRequest { id: *id, start: 0, tokens: TOKENS }];
        let mut step = cache.begin_step(stream, Launches::Eager, &parts).unwrap();
        select_in(&mut step, &workspace)
    };
    assert_eq!(select(&mut one).unwrap(), ONE);
    let refused = select(&mut other).unwrap_err();
    assert!(matches!(refused, KvError::ForeignWorkspace), "{refused}");
    one.cache.release(one.id).unwrap();
    one.id = one.cache.admit().unwrap();
    assert_eq!(select(&mut one).unwrap(), ONE);
}

/// A graph for short contexts would cut the list of a longer request, so such a step is refused.
#[test]
fn a_graph_for_short_contexts_refuses_long_ones() {
    let Cache { mut cache, stream, id, start } = Cache::new(600);
    let bucket = bucket(640);
    let graph = cache.capture(&stream, &bucket, Vec::new(), |_| Ok(())).unwrap();
    assert_eq!(graph.bucket().context, 640);
    let step = [StepRequest { id, start, tokens: 41 }];
    let refused = cache.begin_step(&stream, Launches::Bucket(&bucket), &step).err().unwrap();
    let KvError::ContextTooLong { end: 641, limit: 640, by: LimitedBy::Bucket, .. } = refused
    else {
        panic!("{refused}");
    };
    for launches in [Launches::Eager, Launches::Bucket(&Bucket { context: 641, ..bucket })] {
        let mut step = cache.begin_step(&stream, launches, &step).unwrap();
        assert!(matches!(step.replay(&graph), Err(KvError::WrongBucket { .. })));
    }
    let step = [StepRequest { id, start, tokens: 40 }];
    let mut step = cache.begin_step(&stream, Launches::Bucket(&bucket), &step).unwrap();
    step.replay(&graph).unwrap();
}
