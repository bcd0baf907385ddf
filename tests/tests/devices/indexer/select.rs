//! `CsaIndexer` through the cache, from activations to lists: in parts and whole, eager and captured.

use std::ops::Range;
use std::thread;

use dsv4_kv::device::{Backend, Buffer, Device, DeviceError};
use dsv4_kv::indexer::Activations;
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::ops::{one_launch_is_faster, shared_keys_are_faster};
use dsv4_kv::step::EntryLists;
use dsv4_kv::{
    Bucket, CacheConfig, CsaIndexer, IndexerWorkspace, KvError, LayerId, QueryWeight,
    WorkspaceLimits, WorkspaceSize,
};
use dsv4_kv_linear::{Nvfp4Linear, Nvfp4Matrix};
use dsv4_kv_oracle::compressor::visible;
use dsv4_kv_oracle::index::KeyFormat;
use dsv4_kv_oracle::indexer::{Score, query, score, weight_scale};
use dsv4_kv_oracle::number::bf16_value;
use half::bf16;
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::fed::{Fed, Padding, Part, Updated, begin};
use crate::inputs::{download, filled, upload_bf16};
use crate::refused::named;
use crate::stories::{Formats, Stored, Story, config, tiny};

/// Tokens of a step, padding included.
const BUCKET: u32 = 16;
/// Length of a list: more than the shortest request has entries, fewer than the others have.
const K: u32 = 24;
/// The CSA layers of the preset `tiny`.
const LAYERS: [usize; 2] = [1, 3];
/// Tolerance, as a part of the magnitude of a score: a query is rounded to four bits, and a rounding may go the other
/// way.
const TOLERANCE: f64 = 1e-2;

/// BF16 bits of `count` values like those of a normed vector.
fn activations(count: u32, random: &mut StdRng) -> Vec<u16> {
    (0..count).map(|_| bf16::from_f32(random.random_range(-1.0..1.0)).to_bits()).collect()
}

/// The indexer of one layer and its inputs, on the device and on the host.
struct Inputs<B: Backend> {
    bucket: u32,
    model: ModelConfig,
    indexer: CsaIndexer<B>,
    latent: Buffer<B, bf16>,
    hidden: Buffer<B, bf16>,
    values: [Vec<u16>; 4],
}

/// The weight in NVFP4, and its decoded values in BF16. With a power of two as the scale BF16 holds these exactly.
fn four_bits(values: &[u16], columns: u32, inner: u32) -> (Nvfp4Matrix, Vec<u16>) {
    let wide: Vec<f32> = values.iter().map(|&bits| bf16::from_bits(bits).to_f32()).collect();
    let weight = Nvfp4Matrix::quantise(&wide, columns, inner).unwrap();
    let (codes, scales) = (weight.codes().to_vec(), weight.scales().to_vec());
    let weight = Nvfp4Matrix::from_parts(columns, inner, codes, scales, 0.5_f32.powi(11)).unwrap();
    let decoded = weight.decode();
    let bits: Vec<u16> = decoded.iter().map(|&value| bf16::from_f32(value).to_bits()).collect();
    assert!(bits.iter().zip(decoded).all(|(&bits, value)| bf16_value(bits) == f64::from(value)));
    (weight, bits)
}

impl<B: Backend> Inputs<B> {
    fn new(fed: &Fed<B>, seed: u64, bucket: u32) -> Self {
        Self::of(fed, seed, bucket, false)
    }

    /// With the query weight in NVFP4 if `is_nvfp4`, else in BF16.
    fn of(fed: &Fed<B>, seed: u64, bucket: u32, is_nvfp4: bool) -> Self {
        let stream = &fed.stream;
        let model = fed.manager.config().model.clone();
        let mut random = StdRng::seed_from_u64(seed);
        let (heads, rank, width) = (model.index_heads, model.q_lora_rank, model.hidden_size);
        let sizes = [heads * 128 * rank, heads * width, bucket * rank, bucket * width];
        let mut values = sizes.map(|size| activations(size, &mut random));
        let [query, weight, latent, hidden] =
            values.each_ref().map(|values| upload_bf16(stream, values));
        let mut query = QueryWeight::from(query);
        if is_nvfp4 {
            let (weight, decoded) = four_bits(&values[0], heads * 128, rank);
            query = Nvfp4Linear::new(stream, &weight).unwrap().into();
            values[0] = decoded;
        }
        let indexer = CsaIndexer::new(&model, query, weight).unwrap();
        Self { bucket, model, indexer, latent, hidden, values }
    }

    fn workspace(&self, fed: &Fed<B>, queries: u32) -> IndexerWorkspace<B> {
        let context = fed.manager.config().max_context;
        let one = WorkspaceSize::new(&self.model, limits(context, 1, u64::MAX)).unwrap();
        let bytes = u64::from(queries + 1) * one.bytes - 1;
        let workspace = IndexerWorkspace::new(
            fed.manager.device(),
            &self.model,
            limits(context, self.bucket, bytes),
        );
        let workspace = workspace.unwrap();
        assert_eq!(workspace.size().queries, queries);
        workspace
    }

    fn select(
        &self,
        updated: &Updated<'_, B>,
        workspace: &IndexerWorkspace<B>,
        selected: &Buffer<B, i32>,
    ) -> Result<(), KvError> {
        self.select_for(updated, 0..self.bucket, workspace, selected)
    }

    /// As before, for the queries `queries` alone, whose lists go to `selected`.
    fn select_for(
        &self,
        updated: &Updated<'_, B>,
        queries: Range<u32>,
        workspace: &IndexerWorkspace<B>,
        selected: &Buffer<B, i32>,
    ) -> Result<(), KvError> {
        let Updated::Csa(layer) = updated else { panic!("a CSA layer") };
        let activations = Activations { latent: &self.latent, hidden: &self.hidden };
        let lists = EntryLists { queries, k: K, indices: selected };
        layer.select(&self.indexer, &activations, workspace, &lists)
    }

    /// The product of row `at` of an input with a weight. Both have `inner` columns.
    fn product(&self, (input, weight): (usize, usize), at: usize, inner: u32) -> Vec<f32> {
        let inner = inner as usize;
        let wide = |values: &[u16]| values.iter().map(|&bits| bf16_value(bits)).collect::<Vec<_>>();
        let row = wide(&self.values[input][at * inner..][..inner]);
        let column =
            |column: &[u16]| wide(column).iter().zip(&row).map(|(x, y)| x * y).sum::<f64>() as f32;
        self.values[weight].chunks_exact(inner).map(column).collect()
    }

    /// The oracle's scores of the entries that query `at` sees.
    fn scores(&self, format: KeyFormat, at: usize, position: usize, stored: &Stored) -> Vec<Score> {
        let projected = self.product((2, 0), at, self.model.q_lora_rank);
        let weights = self.product((3, 1), at, self.model.hidden_size);
        let queries: Vec<_> =
            projected.chunks_exact(128).map(|head| query(format, head, position)).collect();
        let scale = weight_scale(weights.len());
        let weights: Vec<f64> = weights.iter().map(|&weight| f64::from(weight) * scale).collect();
        let key = |key| format.decode(key).into_iter().map(f64::from).collect::<Vec<_>>();
        let keys = stored.keys[..visible(position, 4)].iter().map(key);
        keys.map(|key| score(&queries, &weights, &key)).collect()
    }
}

/// Asserts that a list names each entry at most once, in the order of the oracle's scores, and that no missing entry
/// scores higher, within the tolerance. A request with few entries gets all of them.
fn check_list(list: &[i32], scores: &[Score], what: &str) {
    let listed = scores.len().min(K as usize);
    assert!(list[listed..].iter().all(|&entry| entry == -1), "{what}: {list:?}");
    let list: Vec<usize> = list[..listed].iter().map(|&entry| entry as usize).collect();
    if scores.len() <= K as usize {
        assert_eq!(list, (0..scores.len()).collect::<Vec<_>>(), "{what}");
        return;
    }
    let slack = TOLERANCE * scores.iter().fold(0.0, |most: f64, score| most.max(score.magnitude));
    let mut sorted = list.clone();
    sorted.sort_unstable();
    sorted.dedup();
    assert_eq!(sorted.len(), listed, "{what}: an entry twice");
    let value = |entry: usize| scores[entry].value;
    for pair in list.windows(2) {
        assert!(value(pair[0]) > value(pair[1]) - slack, "{what}: {pair:?}");
    }
    let last = value(list[listed - 1]);
    for entry in (0..scores.len()).filter(|entry| !list.contains(entry)) {
        assert!(value(entry) < last + slack, "{what}: {entry} is missing");
    }
}

/// Requests of several lengths, some with queries that see entries which close in the step. The lists of every CSA
/// layer, in every format of keys, are the same in parts, whole, and from a graph.
pub fn lists_equal_the_oracle<B: Backend>(device: &Device<B>) {
    IndexFormat::ALL.into_iter().for_each(|format| check_lists(device, format, false));
}

/// The same with the query weight in NVFP4.
pub fn lists_by_four_bit_weights_equal_the_oracle<B: Backend>(device: &Device<B>) {
    IndexFormat::ALL.into_iter().for_each(|format| check_lists(device, format, true));
}

fn check_lists<B: Backend>(device: &Device<B>, index_format: IndexFormat, is_nvfp4: bool) {
    let formats: Formats = (MainFormat::Ue8m0, index_format);
    let stories =
        [(170, 21), (40, 22), (300, 23)].map(|(tokens, seed)| Story::random(&tiny(), tokens, seed));
    let stored = stories.each_ref().map(|story| story.stored(device, formats));
    let config = CacheConfig { max_draft: 7, ..config(&tiny(), formats, 3) };
    let mut fed = Fed::new(device, config);
    let (mut parts, mut queries) = (Vec::new(), Vec::new());
    for (story, (prompt, chunk)) in [(152, 5), (30, 6), (292, 4)].into_iter().enumerate() {
        let id = fed.manager.admit().unwrap();
        fed.step(&[Part::new(id, &stories[story], 0..prompt)], Padding::None);
        parts.push(Part::new(id, &stories[story], prompt..prompt + chunk));
        queries.extend((prompt..prompt + chunk).map(|position| (story, position)));
    }
    let lists = || filled::<B, i32>(&fed.stream, (BUCKET * K) as usize);
    let of_layer = |layer| {
        let inputs = Inputs::of(&fed, layer as u64, BUCKET, is_nvfp4);
        let workspaces = [inputs.workspace(&fed, BUCKET), inputs.workspace(&fed, 9)];
        (layer, inputs, workspaces, [lists(), lists(), lists()])
    };
    let layers = LAYERS.map(of_layer);
    let of = |layer: LayerId| layers.iter().find(|(of, ..)| *of == layer.0 as usize);
    let bucket = fed.bucket(BUCKET, BUCKET);
    let mut retained = Vec::new();
    for (_, inputs, [_, small], [.., replayed]) in &layers {
        retained.extend([inputs.indexer.memory(), small.memory()].concat());
        retained.extend([inputs.latent.memory(), inputs.hidden.memory(), replayed.memory()]);
    }
    let graphs = fed.capture(bucket, &retained, &mut |layer, updated| match of(layer) {
        Some((_, inputs, [_, small], [.., replayed])) => inputs.select(updated, small, replayed),
        None => Ok(()),
    });
    // The step runs twice: first eagerly, and is rejected; then by the graph.
    let mut steps = begin(&mut fed.manager, &fed.stream, &parts, bucket).unwrap();
    fed.inputs.load(&fed.stream, &parts, BUCKET);
    let run = fed.inputs.run(&mut steps[0], &mut |layer, updated| match of(layer) {
        Some((_, inputs, [large, small], [whole, in_parts, _])) => {
            inputs.select(updated, large, whole)?;
            inputs.select(updated, small, in_parts)
        }
        None => Ok(()),
    });
    run.unwrap();
    drop(steps);
    let all: Vec<_> = parts.iter().map(|part| part.request().tokens).collect();
    fed.replay(&parts, bucket, &graphs, &all);
    for (layer, inputs, _, [whole, in_parts, replayed]) in &layers {
        let found = download(&fed.stream, whole);
        assert_eq!(download(&fed.stream, in_parts), found);
        assert_eq!(download(&fed.stream, replayed), found);
        let format = KeyFormat::from_name(index_format.name()).unwrap();
        for (at, &(story, position)) in queries.iter().enumerate() {
            let scores = inputs.scores(format, at, position, &stored[story][*layer]);
            let list = &found[at * K as usize..][..K as usize];
            check_list(list, &scores, &format!("{index_format:?} story {story} at {position}"));
        }
        let padding = &found[queries.len() * K as usize..];
        assert!(padding.iter().all(|&entry| entry == -1), "padding got entries");
    }
    fed.manager.check_faults(&fed.stream).unwrap();
}

/// Enough queries for scores and lists in one launch, in a cache for long contexts. The lengths of the requests in the
/// step, or the context of its bucket, decide which launches run; the lists are those of two launches.
pub fn one_launch_lists_as_two<B: Backend>(device: &Device<B>) {
    const MANY: u32 = 72;
    const CONTEXT: u32 = 16_384;
    let formats: Formats = (MainFormat::Ue8m0, IndexFormat::Mxfp4);
    let story = Story::random(&tiny(), 230, 24);
    let in_one = |context: u32, queries| {
        let columns = (context / 4).next_multiple_of(32);
        one_launch_is_faster(IndexFormat::Mxfp4, columns, queries, queries)
    };
    assert!(in_one(230, 70) && in_one(640, MANY), "both of one launch");
    assert!(!in_one(640, MANY / 2) && !in_one(CONTEXT, MANY), "both of two");
    // Arguments: the context of the bucket, if there is one, and the number of queries per launch.
    let lists = |context: Option<u32>, at_once| {
        let config = CacheConfig { max_context: CONTEXT, ..config(&tiny(), formats, 1) };
        let mut fed = Fed::new(device, config);
        let id = fed.manager.admit().unwrap();
        fed.step(&[Part::new(id, &story, 0..160)], Padding::None);
        let count = if context.is_some() { MANY } else { 70 };
        let inputs = Inputs { bucket: count, ..Inputs::new(&fed, 3, MANY) };
        let selected = filled::<B, i32>(&fed.stream, (MANY * K) as usize);
        let workspace = inputs.workspace(&fed, at_once);
        let bucket =
            |context| Bucket { tokens: MANY, tokens_per_request: MANY, requests: 1, context };
        let padding = context.map_or(Padding::None, |context| Padding::Bucket(bucket(context)));
        fed.run(&[Part::new(id, &story, 160..230)], padding, &[70], &mut |layer, updated| {
            let is_first = layer.0 as usize == LAYERS[0];
            if is_first { inputs.select(updated, &workspace, &selected) } else { Ok(()) }
        });
        fed.manager.check_faults(&fed.stream).unwrap();
        let found = download(&fed.stream, &selected);
        assert!(found[..K as usize].iter().all(|&entry| entry >= 0), "it sees more than it lists");
        let padding = &found[(70 * K) as usize..(count * K) as usize];
        assert!(padding.iter().all(|&entry| entry == -1), "padding got entries");
        found[..(70 * K) as usize].to_vec()
    };
    let two = lists(Some(CONTEXT), MANY);
    assert_eq!(lists(None, 70), two, "one by one");
    assert_eq!(lists(Some(640), MANY), two, "for a short bucket");
    assert_eq!(lists(Some(640), MANY / 2), two, "in parts");
}

/// So many queries of a chunk that they share the keys that a warp unpacks, beside a decode step of another request. The
/// lists are those of parts that are too small for it.
pub fn queries_that_share_keys_list_as_alone<B: Backend>(device: &Device<B>) {
    // A block of the kernel takes 5, 8 or 10 queries: the last one has some of both requests.
    const CHUNK: u32 = 133;
    const QUERIES: u32 = CHUNK + 1;
    const PART: u32 = 30;
    let stories = [12, 13].map(|seed| Story::random(&tiny(), 260, seed));
    for index_format in IndexFormat::ALL {
        // Rows of more than 2,048 columns are not for one launch of scores and list.
        let context = if index_format == IndexFormat::Fp8 { 65_536 } else { 16_384 };
        let shares = |queries: u32| {
            shared_keys_are_faster(index_format, context / 4, queries, queries.min(QUERIES / 2))
        };
        assert!(shares(QUERIES) && !shares(PART));
        let bucket = Bucket { tokens: QUERIES, tokens_per_request: CHUNK, requests: 2, context };
        let config = config(&tiny(), (MainFormat::Ue8m0, index_format), 2);
        let mut fed = Fed::new(device, CacheConfig { max_context: bucket.context, ..config });
        let ids = [fed.manager.admit().unwrap(), fed.manager.admit().unwrap()];
        let parts = |chunk: Range<usize>, token: Range<usize>| {
            [Part::new(ids[0], &stories[0], chunk), Part::new(ids[1], &stories[1], token)]
        };
        fed.step(&parts(0..120, 0..110), Padding::None);
        let inputs = Inputs::new(&fed, 3, QUERIES);
        let selections = [QUERIES, PART].map(|at_once| {
            let selected = filled::<B, i32>(&fed.stream, (QUERIES * K) as usize);
            (inputs.workspace(&fed, at_once), selected)
        });
        let parts = parts(120..120 + CHUNK as usize, 110..111);
        fed.run(&parts, Padding::Bucket(bucket), &[CHUNK, 1], &mut |layer, updated| {
            let of_layer = selections.iter().filter(|_| layer.0 as usize == LAYERS[0]);
            of_layer
                .into_iter()
                .try_for_each(|(workspace, selected)| inputs.select(updated, workspace, selected))
        });
        fed.manager.check_faults(&fed.stream).unwrap();
        let [together, in_parts] = selections.map(|(_, selected)| download(&fed.stream, &selected));
        assert!(together.iter().all(|&entry| entry >= 0), "all see more than they list");
        assert!(together == in_parts, "{index_format:?}");
    }
}

/// Two threads that select at the same time in one workspace get the lists that each gets alone.
pub fn threads_share_a_workspace<B: Backend>(device: &Device<B>) {
    const QUERIES: u32 = 32;
    let formats: Formats = (MainFormat::Ue8m0, IndexFormat::Mxfp4);
    let story = Story::random(&tiny(), 160 + 2 * QUERIES as usize, 4);
    let mut fed = Fed::new(device, config(&tiny(), formats, 1));
    let id = fed.manager.admit().unwrap();
    fed.step(&[Part::new(id, &story, 0..160)], Padding::None);
    let inputs = Inputs::new(&fed, 5, 2 * QUERIES);
    // Each thread selects for its queries in two parts.
    let workspace = inputs.workspace(&fed, QUERIES / 2);
    let lists = [0, 1].map(|_| filled::<B, i32>(&fed.stream, (QUERIES * K) as usize));
    let aside = device.stream().unwrap();
    let parts = [Part::new(id, &story, 160..160 + 2 * QUERIES as usize)];
    fed.run(&parts, Padding::None, &[2 * QUERIES], &mut |layer, updated| {
        if layer.0 as usize != LAYERS[0] {
            return Ok(());
        }
        let select = |half: u32| {
            let queries = half * QUERIES..(half + 1) * QUERIES;
            inputs.select_for(updated, queries, &workspace, &lists[half as usize]).unwrap();
        };
        let Updated::Csa(csa) = updated else { panic!("a CSA layer") };
        let told = || {
            csa.stream().synchronize().unwrap();
            lists.each_ref().map(|list| download(&aside, list))
        };
        [0, 1].into_iter().for_each(select);
        let alone = told();
        for round in 0..if device.info().sm.is_some() { 10 } else { 4 } {
            thread::scope(|scope| [0, 1].map(|half| scope.spawn(move || select(half))).map(drop));
            assert!(told() == alone, "round {round}");
        }
        Ok(())
    });
}

fn limits(context: u32, queries: u32, bytes: u64) -> WorkspaceLimits {
    WorkspaceLimits { context, queries, bytes }
}

/// The error of the device inside an error of the cache.
fn of_device(error: KvError) -> DeviceError {
    let KvError::Device(error) = error else { panic!("{error}") };
    error
}

/// Impossible calls are refused by name, before anything is queued.
pub fn bad_input_is_refused<B: Backend>(device: &Device<B>) {
    let formats: Formats = (MainFormat::Ue8m0, IndexFormat::Mxfp4);
    let mut fed = Fed::new(device, config(&tiny(), formats, 1));
    let story = Story::random(&tiny(), 8, 1);
    let id = fed.manager.admit().unwrap();
    let inputs = Inputs::new(&fed, 1, BUCKET);
    let workspace = inputs.workspace(&fed, 2);
    let selected = filled::<B, i32>(&fed.stream, (BUCKET * K) as usize);
    let short = selected.slice(0, u64::from(BUCKET * K) - 1).unwrap();
    let narrow = IndexerWorkspace::new(device, &inputs.model, limits(128, 4, 1 << 20)).unwrap();
    let few = ModelConfig { index_heads: 32, ..inputs.model.clone() };
    let few = IndexerWorkspace::new(device, &few, limits(640, 4, 1 << 24)).unwrap();
    let bucket = fed.bucket(BUCKET, BUCKET);
    fed.run(&[Part::new(id, &story, 0..8)], bucket, &[8], &mut |layer, updated| {
        if layer.0 as usize != LAYERS[0] {
            return Ok(());
        }
        inputs.select(updated, &workspace, &selected).unwrap();
        assert_eq!(
            named(inputs.select(updated, &workspace, &short).map_err(of_device)),
            "selected entries"
        );
        let refused = inputs.select(updated, &narrow, &selected).unwrap_err();
        assert!(matches!(refused, KvError::Config { value: 32, least: 160, .. }), "{refused}");
        let refused = inputs.select(updated, &few, &selected).unwrap_err();
        let heads = matches!(refused, KvError::IndexerHeads { indexer: 64, workspace: 32 });
        assert!(heads, "{refused}");
        Ok(())
    });

    let needed = WorkspaceSize::new(&inputs.model, limits(640, 1, u64::MAX)).unwrap().bytes;
    let make = |context, bytes| {
        IndexerWorkspace::new(device, &inputs.model, limits(context, 4, bytes)).map(|_| ())
    };
    let refused = make(640, needed - 1).unwrap_err();
    assert!(matches!(refused, KvError::WorkspaceTooSmall { bytes, needed: most }
        if bytes == needed - 1 && most == needed));
    make(640, needed).unwrap();
    for wrong in [0, (1 << 20) + 1] {
        let refused = make(wrong, needed).unwrap_err();
        let KvError::Config { setting, value, .. } = refused else { panic!("{refused}") };
        assert_eq!((setting, value), ("context", wrong.into()));
    }
    let many = ModelConfig { index_heads: 65, ..inputs.model.clone() };
    let refused = IndexerWorkspace::new(device, &many, limits(640, 4, 1 << 20)).map(|_| ());
    assert!(matches!(refused, Err(KvError::Config { value: 65, most: 64, .. })));

    let weight = device.allocate("weight", 64).unwrap();
    let refused = CsaIndexer::new(&inputs.model, weight.clone(), weight.clone()).map_err(of_device);
    assert_eq!(named(refused), "indexer query weight");
    let whole = device.allocate("weight", inputs.values[0].len() as u64).unwrap();
    let refused = CsaIndexer::new(&inputs.model, whole, weight.clone()).map_err(of_device);
    assert_eq!(named(refused), "indexer head weight");
    let matrix = Nvfp4Matrix::quantise(&[1.0_f32; 64], 2, 32).unwrap();
    let narrow = Nvfp4Linear::new(&fed.stream, &matrix).unwrap();
    let refused = CsaIndexer::new(&inputs.model, narrow, weight).map(|_| ());
    assert!(matches!(refused, Err(KvError::QueryWeight { found: [2, 32], .. })));
}
