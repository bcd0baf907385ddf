//! Compares the rows that attention of one layer gathers in a step with the histories of the requests.

use std::ops::Range;

use dsv4_kv::device::{Backend, Buffer, Stream, bf16};
use dsv4_kv::step::EntryLists;
use dsv4_kv::{KvError, LayerId};
use kv_layout::geometry::LayerKind;
use rand::Rng;
use rand::rngs::SmallRng;

use super::library::Library;
use super::model::Model;
use super::op::{self, Name};
use super::text::Text;
use dsv4_kv_tests::inputs::{download, download_bits, upload};
use dsv4_kv_tests::updated::Updated;

/// Length of a query's list of entries.
const LIST: u32 = 4;
/// Most queries whose gathered rows are compared.
const QUERIES: u32 = 24;
/// In one of this many steps, on average, the last query scores all keys that it sees, if the watched layer has an
/// indexer.
const SCORED: u32 = 4;

/// The part of a step that is compared; nothing by default.
#[derive(Default)]
pub(super) struct Watch {
    /// The layer.
    pub layer: Option<LayerId>,
    /// The queries.
    queries: Range<u32>,
    scored: bool,
}

impl Watch {
    /// Chooses one of the layers that are run, and some of the step's queries.
    pub fn random(random: &mut SmallRng, layers: &[LayerId], tokens: u32) -> Self {
        let layer = random.random_range(0..layers.len().max(1));
        let count = tokens.min(QUERIES);
        let first = random.random_range(0..=tokens - count);
        let layer = layers.get(layer).copied().filter(|_| tokens > 0);
        Self { layer, queries: first..first + count, scored: random.random_ratio(1, SCORED) }
    }
}

/// A query of a step.
struct Query {
    request: Name,
    /// The text of its request.
    says: Text,
    position: u32,
    /// The first position whose window row is known.
    from: u32,
    /// Whether the request's tokens up to the query are those of its text.
    is_known: bool,
}

/// The gathered rows of one layer.
pub(super) struct Gathered<B: Backend> {
    layer: LayerId,
    queries: Vec<Query>,
    /// Rows per query of `all`.
    rows: u32,
    selected: Vec<i32>,
    window: Option<Buffer<B, bf16>>,
    listed: Buffer<B, bf16>,
    all: Buffer<B, bf16>,
    lengths: Buffer<B, i32>,
}

impl<B: Backend> Gathered<B> {
    /// Gathers everything that attention of a layer can request. Windows are gathered only if they are `whole`.
    pub fn new(
        watch: &Watch,
        model: &Model,
        step: &op::Step,
        updated: &Updated<'_, B>,
        whole: bool,
    ) -> Result<Self, KvError> {
        let Watch { layer, queries: range, scored } = watch;
        let layer = layer.expect("a layer is watched");
        let (stream, ratio) = (updated.stream(), ratio(model, layer));
        let mut queries = queries_of(model, step);
        queries.truncate(range.end as usize);
        queries.drain(..range.start as usize);
        let mut selected = Vec::new();
        let mut most = 1;
        for query in &queries {
            let seen = ratio.map_or(0, |ratio| (query.position + 1) / ratio);
            most = most.max(seen);
            let newest = seen as i32 - 1;
            selected.extend([newest, -1, newest.min(0), newest.min(newest / 2)]);
        }
        let count = queries.len() as u64;
        let tile = |rows: u32| stream.device().allocate("tile", count * u64::from(rows) * 512);
        let gathered = Self {
            window: if whole { Some(tile(128)?) } else { None },
            listed: tile(LIST)?,
            all: tile(most)?,
            lengths: stream.device().allocate("lengths", count)?,
            rows: most,
            layer,
            queries,
            selected,
        };
        if let Some(window) = &gathered.window {
            updated.gather_window(range.clone(), window, &gathered.lengths)?;
        }
        let list = upload(stream, &gathered.selected);
        let lists = EntryLists { queries: range.clone(), k: LIST, indices: &list };
        updated.gather_entries(range.clone(), &lists, &gathered.listed)?;
        updated.gather_all(range.clone(), most, &gathered.all, &gathered.lengths)?;
        if *scored && model.config().model.layers[layer.0 as usize] == LayerKind::Csa {
            updated.score(model.config(), range.end - 1..range.end, 1)?;
        }
        Ok(gathered)
    }

    /// Checks the window, the list and all visible entries of every query whose tokens are known.
    pub fn check(
        &self,
        stream: &Stream<B>,
        library: &Library,
        model: &Model,
    ) -> Result<(), String> {
        let tile = |buffer: &Buffer<B, bf16>| -> Vec<u16> { download_bits(stream, &buffer.view()) };
        let window = self.window.as_ref().map(tile);
        let (listed, all) = (tile(&self.listed), tile(&self.all));
        let lengths = download(stream, &self.lengths.view());
        let ratio = ratio(model, self.layer);
        for (at, &Query { request, ref says, position, from: known, .. }) in
            self.queries.iter().enumerate().filter(|(_, query)| query.is_known)
        {
            let told = library.of(says);
            let told = told.layer(self.layer);
            let what = format!("{:?}, request {request}, position {position}", self.layer);
            let position = position as usize;
            if let Some(window) = &window {
                let from = (position + 1).saturating_sub(128);
                // Draft layers may have been rewound to a position after this one.
                let known = from.max(known as usize).min(position + 1);
                let want = told.window[known..=position].iter();
                let first = at * 128 + known - from;
                rows_equal(window, first, want, &format!("window of {what}"))?;
            }
            let Some(ratio) = ratio else { continue };
            let seen = (position + 1) / ratio as usize;
            if lengths[at] as usize != seen {
                return Err(format!("{what}: sees {} entries, should see {seen}", lengths[at]));
            }
            let want = told.entries[..seen].iter();
            rows_equal(&all, at * self.rows as usize, want, &format!("entries of {what}"))?;
            let list = &self.selected[at * LIST as usize..][..LIST as usize];
            let zero = vec![0; 512];
            let want = list
                .iter()
                .map(|&entry| usize::try_from(entry).map_or(&zero, |entry| &told.entries[entry]));
            rows_equal(&listed, at * LIST as usize, want, &format!("list of {what}"))?;
        }
        Ok(())
    }
}

fn ratio(model: &Model, layer: LayerId) -> Option<u32> {
    model.config().model.layers[layer.0 as usize].ratio()
}

/// All queries of a step.
fn queries_of(model: &Model, step: &op::Step) -> Vec<Query> {
    let of_part = |part: &op::Part| {
        let request = model.named(part.request).expect("it is in a step");
        let progress = request.group(step.group);
        let (name, genuine) = (part.request, part.genuine);
        (0..part.tokens).map(move |index| Query {
            request: name,
            says: request.says.clone(),
            position: progress.tokens + index,
            from: progress.from,
            is_known: progress.is_known() && index < genuine,
        })
    };
    step.parts.iter().flat_map(of_part).collect()
}

fn rows_equal<'a>(
    tile: &[u16],
    first: usize,
    want: impl Iterator<Item = &'a Vec<u16>>,
    what: &str,
) -> Result<(), String> {
    for (row, want) in want.enumerate() {
        if tile[(first + row) * 512..][..512] != want[..] {
            return Err(format!("{what}: row {row} differs"));
        }
    }
    Ok(())
}
