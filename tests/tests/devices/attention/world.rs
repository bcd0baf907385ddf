//! Requests that attend in the steps of a cache, with the expected and the previous results of each query.

use std::collections::HashMap;
use std::ops::Range;
use std::slice::from_ref;

use dsv4_kv::device::{Backend, Buffer, Device, Memory, Stream, bf16};
use dsv4_kv::step::{AttentionTensors, EntryLists, QueryForm};
use dsv4_kv::{CacheConfig, CapturedStep, KvError, LayerId, RequestId};
use dsv4_kv_oracle::attention::{self, Attended};
use dsv4_kv_oracle::compressor::visible;
use dsv4_kv_oracle::number::bf16_value;
use dsv4_kv_oracle::rope::Table;
use kv_layout::attention::KeyCluster;
use kv_layout::geometry::{LayerKind, WINDOW};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use super::layer::{assert_lse, assert_near, random_row};
use super::queries::prepared;
use crate::fed::{Fed, Padding, Part, Updated};
use crate::inputs::{
    CANARY, CANARY_BF16, CANARY_F32, download, download_bits, filled, oracle, upload,
};
use crate::stories::{Formats, STEP_TOKENS, Stored, Story, config};

/// One layer of each kind.
pub const LAYERS: [LayerKind; 3] = [LayerKind::Swa, LayerKind::Csa, LayerKind::Hca];
/// Number of heads of a query.
pub const HEADS: usize = 2;
/// Length of a list: with a window it gives four tiles.
const LIST: usize = 70;
/// Number of elements of a query.
const ELEMENTS: usize = HEADS * 512;

/// A query: the number of its story, and its position.
pub type Query = (usize, usize);

/// The results of a query in a layer: `[heads, 512]` BF16 bits, and the bits of `[heads]` log-sum-exps.
pub type Got = (Vec<u16>, Vec<u32>);

/// The attention tensors of one layer. Their addresses stay the same in all steps.
struct Tensors<B: Backend> {
    query: Buffer<B, bf16>,
    lists: Buffer<B, i32>,
    out: Buffer<B, bf16>,
    lse: Buffer<B, f32>,
}

/// The attention tensors of all layers.
pub struct Places<B: Backend> {
    sinks: Buffer<B, f32>,
    layers: Vec<Tensors<B>>,
}

/// A cache, the stories of its requests, and the results of their queries.
pub struct World<'s, B: Backend> {
    pub fed: Fed<B>,
    pub stories: &'s [Story],
    pub places: Places<B>,
    formats: Formats,
    stored: Vec<Vec<Stored>>,
    /// Whether queries of layers with a window alone are raw, or normed and rotated, when attention gets them.
    pub window_queries: QueryForm,
    /// The first result of each query in each layer.
    seen: HashMap<(u32, Query), Got>,
    /// Number of results that equalled an earlier one.
    pub repeated: usize,
}

/// A story with rows of one magnitude, whose scores a softmax can tell apart.
pub fn even_story(tokens: usize, seed: u64) -> Story {
    Story::of_rows(&LAYERS, tokens, seed, &|count, seed| {
        let mut random = StdRng::seed_from_u64(seed);
        (0..count).map(|_| random_row(&mut random, 2.0)).collect()
    })
}

fn sinks() -> Vec<f32> {
    vec![-1.0, 2.0]
}

/// The random numbers of a query in a layer.
fn random_of(layer: LayerId, (story, position): Query) -> StdRng {
    StdRng::seed_from_u64(((story * 1000 + position) * 8) as u64 + u64::from(layer.0))
}

/// The rotary table of a layer.
fn table_of(layer: LayerId) -> Table {
    match LAYERS[layer.0 as usize] {
        LayerKind::Swa => Table::Main,
        LayerKind::Csa | LayerKind::Hca => Table::Compress,
    }
}

/// The form of the queries of a layer.
fn form_of(layer: LayerId, window_queries: QueryForm) -> QueryForm {
    match LAYERS[layer.0 as usize] {
        LayerKind::Swa => window_queries,
        LayerKind::Csa => QueryForm::Raw,
        LayerKind::Hca => QueryForm::Rotated,
    }
}

/// The heads of a query. Its scores differ by several units, unless the heads are normed.
fn heads_of(layer: LayerId, query: Query) -> Vec<Vec<u16>> {
    let mut random = random_of(layer, query);
    (0..HEADS).map(|_| random_row(&mut random, 6.0)).collect()
}

/// Entries that a query sees, in random order, with a gap. For one query in seven, all elements after the first are -1.
fn list_of(layer: LayerId, query: Query) -> Vec<i32> {
    let mut random = random_of(layer, query);
    let mut list: Vec<i32> = (0..visible(query.1, 4) as i32).collect();
    list.shuffle(&mut random);
    list.resize(LIST, -1);
    let gap = random.random_range(0..LIST);
    list[gap] = -1;
    if random.random_range(0..7) == 0 {
        list[1..].fill(-1);
    }
    list
}

impl<B: Backend> Places<B> {
    fn new(stream: &Stream<B>) -> Self {
        let tokens = STEP_TOKENS as usize;
        let layers = LAYERS.map(|_| Tensors {
            query: filled(stream, tokens * ELEMENTS),
            lists: filled(stream, tokens * LIST),
            out: filled(stream, tokens * ELEMENTS),
            lse: filled(stream, tokens * HEADS),
        });
        Self { sinks: upload(stream, &sinks()), layers: layers.into() }
    }

    /// All memory, for a graph to retain.
    pub fn memory(&self) -> Vec<Memory<B>> {
        let of_layer = |Tensors { query, lists, out, lse }: &Tensors<B>| {
            [query.memory(), lists.memory(), out.memory(), lse.memory()]
        };
        self.layers.iter().flat_map(of_layer).chain([self.sinks.memory()]).collect()
    }

    /// Uploads the heads and lists of a step's queries, with NaN for absent queries, and fills the results with
    /// canaries.
    fn load(&self, stream: &Stream<B>, queries: &[Option<Query>]) {
        for (layer, tensors) in (0..).map(LayerId).zip(&self.layers) {
            let (mut heads, mut lists) = (Vec::new(), Vec::new());
            for query in queries {
                match query {
                    Some(query) => {
                        heads.extend(heads_of(layer, *query).concat());
                        lists.extend(list_of(layer, *query));
                    }
                    None => {
                        heads.resize(heads.len() + ELEMENTS, 0x7FC0);
                        lists.resize(lists.len() + LIST, -1);
                    }
                }
            }
            stream.upload(bytemuck::cast_slice(&heads), &tensors.query, 0).unwrap();
            stream.upload(&lists, &tensors.lists, 0).unwrap();
            stream.fill(&tensors.out, CANARY).unwrap();
            stream.fill(&tensors.lse, CANARY).unwrap();
        }
    }

    /// Queues attention of the queries `range` of a layer.
    pub fn attend(
        &self,
        layer: LayerId,
        window_queries: QueryForm,
        updated: &Updated<'_, B>,
        range: &Range<usize>,
    ) -> Result<(), KvError> {
        let Tensors { query, lists, out, lse } = &self.layers[layer.0 as usize];
        let (query, out) = (part(query, range, ELEMENTS), part(out, range, ELEMENTS));
        let lse = part(lse, range, HEADS);
        let heads = AttentionTensors {
            heads: HEADS as u32,
            query: &query,
            form: form_of(layer, window_queries),
            sinks: &self.sinks,
            out: &out,
            lse: Some(&lse),
        };
        let range = range.start as u32..range.end as u32;
        // Lists of the whole step; the launch takes those of its queries.
        let all = 0..lists.len() as u32 / LIST as u32;
        let lists = EntryLists { queries: all, k: LIST as u32, indices: lists };
        updated.attend(range, &lists, &heads)
    }
}

/// The rows of a step's tensor for the queries `range`.
fn part<B: Backend, T: bytemuck::Pod>(
    all: &Buffer<B, T>,
    range: &Range<usize>,
    columns: usize,
) -> Buffer<B, T> {
    all.slice((range.start * columns) as u64, (range.len() * columns) as u64).unwrap()
}

impl<'s, B: Backend> World<'s, B> {
    /// An empty cache with poisoned pools, for `requests` requests with up to `max_draft` drafts.
    pub fn new(
        device: &Device<B>,
        formats: Formats,
        stories: &'s [Story],
        (requests, max_draft): (u32, u32),
    ) -> Self {
        Self::with_cluster(device, formats, stories, (requests, max_draft), KeyCluster::TwoBlocks)
    }

    /// As [`Self::new`], with another number of blocks that share keys.
    pub fn with_cluster(
        device: &Device<B>,
        formats: Formats,
        stories: &'s [Story],
        (requests, max_draft): (u32, u32),
        attention_cluster: KeyCluster,
    ) -> Self {
        let cache = config(&LAYERS, formats, requests);
        Self::of(device, CacheConfig { max_draft, attention_cluster, ..cache }, stories)
    }

    /// For two requests with one draft, with contexts of up to `max_context` tokens.
    pub fn with_context(device: &Device<B>, stories: &'s [Story], max_context: u32) -> Self {
        let cache = config(&LAYERS, (MainFormat::Ue8m0, IndexFormat::Mxfp4), 2);
        Self::of(device, CacheConfig { max_draft: 1, max_context, ..cache }, stories)
    }

    fn of(device: &Device<B>, cache: CacheConfig, stories: &'s [Story]) -> Self {
        let formats = (cache.main_format, cache.index_format);
        let fed = Fed::new(device, cache);
        Self {
            stored: stories.iter().map(|story| story.stored(device, formats)).collect(),
            places: Places::new(&fed.stream),
            window_queries: QueryForm::Raw,
            seen: HashMap::new(),
            repeated: 0,
            fed,
            stories,
            formats,
        }
    }

    /// The first result of every query in each layer, in order.
    pub fn seen(&self) -> Vec<((u32, Query), Got)> {
        let mut seen: Vec<_> = self.seen.clone().into_iter().collect();
        seen.sort();
        seen
    }

    /// Runs a step in which the queries of `ranges` attend, and checks their results.
    pub fn step(&mut self, step: &Batch<'_>, padding: Padding, ranges: &[Range<usize>]) {
        let Self { fed, places, window_queries, .. } = self;
        places.load(&fed.stream, &step.queries);
        fed.run(&step.parts, padding, &step.accepted, &mut |layer, updated| {
            let mut ranges = ranges.iter();
            ranges.try_for_each(|range| places.attend(layer, *window_queries, updated, range))
        });
        self.check(&step.queries, ranges);
    }

    /// Captures a step in which all queries of a bucket of `tokens` tokens attend.
    pub fn capture(&mut self, bucket: Padding, tokens: usize) -> Vec<CapturedStep<B>> {
        let Self { fed, places, window_queries, .. } = self;
        fed.capture(bucket, &places.memory(), &mut |layer, updated| {
            places.attend(layer, *window_queries, updated, &(0..tokens))
        })
    }

    /// Runs a step by graphs in which all queries attend, and checks their results.
    pub fn replay(&mut self, step: &Batch<'_>, bucket: Padding, graphs: &[CapturedStep<B>]) {
        let Self { fed, places, .. } = self;
        places.load(&fed.stream, &step.queries);
        fed.replay(&step.parts, bucket, graphs, &step.accepted);
        self.check(&step.queries, from_ref(&step.all()));
    }

    /// Asserts that each query of `ranges` has the bits that it had before or, the first time, is near `f64`. Results
    /// of queries that do not attend must be untouched.
    fn check(&mut self, queries: &[Option<Query>], ranges: &[Range<usize>]) {
        for layer in 0..LAYERS.len() as u32 {
            let Tensors { out, lse, .. } = &self.places.layers[layer as usize];
            let out = download_bits(&self.fed.stream, out);
            let lse: Vec<u32> = download(&self.fed.stream, &lse.view().cast().unwrap());
            for (at, (out, lse)) in out.chunks(ELEMENTS).zip(lse.chunks(HEADS)).enumerate() {
                let query = queries.get(at).copied().flatten();
                let attends = ranges.iter().any(|range| range.contains(&at));
                match query.filter(|_| attends) {
                    Some(query) => self.check_query(LayerId(layer), query, (out, lse)),
                    // A draft is no query of a story: it gets a result, which is not checked.
                    None if attends && at < queries.len() => {}
                    None => {
                        let is_canary = out.iter().all(|&bits| bits == CANARY_BF16);
                        assert!(is_canary && lse == [CANARY_F32; HEADS], "layer {layer}, {at}");
                    }
                }
            }
        }
    }

    fn check_query(&mut self, layer: LayerId, query: Query, (out, lse): (&[u16], &[u32])) {
        let what = format!("{layer:?}, story {}, position {}", query.0, query.1);
        if let Some(before) = self.seen.get(&(layer.0, query)) {
            assert!((&before.0[..], &before.1[..]) == (out, lse), "{what}: other bits than before");
            self.repeated += 1;
            return;
        }
        let keys = self.keys(layer, query);
        for (head, (out, &lse)) in out.chunks(512).zip(lse).enumerate() {
            let expected = self.expected(layer, query, head, &keys);
            let what = format!("{what}, head {head}");
            assert_lse(lse, &expected, &what);
            assert_near(out, &expected, &what);
        }
        self.seen.insert((layer.0, query), (out.to_vec(), lse.to_vec()));
    }

    /// The values of the rows that a query attends to.
    fn keys(&self, layer: LayerId, (story, position): Query) -> Vec<Vec<f64>> {
        let format = oracle(self.formats.0);
        let values = |bits: Vec<u16>| bits.iter().map(|&bits| bf16_value(bits)).collect();
        let first = (position + 1).saturating_sub(WINDOW as usize);
        let window = &self.stories[story].window_rows(layer)[first..=position];
        let window = window.iter().map(|row| values(format.decode(&format.encode(row))));
        let kind = LAYERS[layer.0 as usize];
        let seen = kind.ratio().map_or(0, |ratio| visible(position, ratio as usize));
        let attended: Vec<usize> = match kind {
            LayerKind::Csa => {
                let list = list_of(layer, (story, position)).into_iter().take(seen);
                list.filter_map(|entry| entry.try_into().ok()).collect()
            }
            LayerKind::Swa | LayerKind::Hca => (0..seen).collect(),
        };
        let entries = &self.stored[story][layer.0 as usize].entries;
        let entries = attended.iter().map(|&entry| values(format.decode(&entries[entry])));
        window.chain(entries).collect()
    }

    fn expected(&self, layer: LayerId, query: Query, head: usize, keys: &[Vec<f64>]) -> Attended {
        let table = table_of(layer);
        let form = form_of(layer, self.window_queries);
        let head_bits = match (form, heads_of(layer, query).swap_remove(head)) {
            (QueryForm::Rotated, bits) => bits,
            (QueryForm::Raw, bits) => prepared(&bits, table, query.1 as u32),
        };
        let q: Vec<f64> = head_bits.iter().map(|&bits| bf16_value(bits)).collect();
        attention::attend(&q, keys, sinks()[head].into(), (table, query.1))
    }
}

/// A step: the parts of its requests, and the query of each of its tokens; `None` for a draft.
pub struct Batch<'s> {
    pub parts: Vec<Part<'s>>,
    pub accepted: Vec<u32>,
    pub queries: Vec<Option<Query>>,
}

impl<'s> Batch<'s> {
    /// A step without requests.
    pub fn new() -> Self {
        Self { parts: Vec::new(), accepted: Vec::new(), queries: Vec::new() }
    }

    /// Adds tokens `range` of story `at` of `stories`, all of which are accepted.
    pub fn add(
        mut self,
        id: RequestId,
        stories: &'s [Story],
        at: usize,
        range: Range<usize>,
    ) -> Self {
        self.queries.extend(range.clone().map(|position| Some((at, position))));
        self.accepted.push(range.len() as u32);
        self.parts.push(Part::new(id, &stories[at], range));
        self
    }

    /// Adds drafts after the tokens of the last part, which will be rejected: tokens of another story, up to position
    /// `end`.
    pub fn add_drafts(mut self, drafts: &'s Story, end: usize) -> Self {
        let part = self.parts.last_mut().expect("what they follow");
        let from = part.pieces.last().expect("a part has tokens").1.end;
        part.pieces.push((drafts, from..end));
        self.queries.resize(self.queries.len() + end - from, None);
        self
    }

    /// The range of all queries.
    pub fn all(&self) -> Range<usize> {
        0..self.queries.len()
    }
}
