//! Each key of a query in turn outweighs all others, which shows the rows that `attend` reads.

use dsv4_kv::device::{Backend, Device};
use kv_layout::geometry::WINDOW;
use kv_layout::main_row::MainFormat;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use super::decode::{SHAPE, query, query_of, shape_of};
use super::layer::{Layer, Query, Shape, TILE, Which, random_rows};

/// Needle checks of a query with a full window and `entries` entries, 64 heads at a time: for all keys, or for `most`
/// of them, the ends of tiles first.
fn needles<B: Backend>(
    device: &Device<B>,
    which: Which,
    (format, entries): (MainFormat, usize),
    most: usize,
) {
    let keys = WINDOW as usize + entries;
    let mut some: Vec<usize> = (0..keys).collect();
    some.shuffle(&mut StdRng::seed_from_u64(23));
    some.sort_by_key(|key| !(key % TILE == 0 || key % TILE == TILE - 1 || key + 1 == keys));
    some.truncate(most);
    let shape = shape_of(which, entries.max(96), Shape { format, slots: 1, ..SHAPE });
    let mut layer = Layer::even(device, shape, 8);
    layer.sinks.fill(-30.0);
    let query = query_of(which, entries, 0, &mut StdRng::seed_from_u64(22));
    assert_eq!(layer.keys((0, &query), which).len(), keys);
    layer.check_some_needles(&[query], which, &some);
}

/// Every key of a window, of lists and of all entries, in both formats. For lists as long as the indexer's, only 64
/// keys.
pub fn every_key_can_dominate<B: Backend>(device: &Device<B>) {
    needles(device, Which::Nothing, (MainFormat::Ue8m0, 0), usize::MAX);
    needles(device, Which::Nothing, (MainFormat::F32, 0), usize::MAX);
    needles(device, Which::List, (MainFormat::Ue8m0, 512), 64);
    needles(device, Which::List, (MainFormat::F32, 70), usize::MAX);
    needles(device, Which::All(75), (MainFormat::Ue8m0, 75), usize::MAX);
    needles(device, Which::All(130), (MainFormat::F32, 130), usize::MAX);
}

/// Every key of lists as long as the indexer's.
pub fn every_key_of_a_list_can_dominate<B: Backend>(device: &Device<B>) {
    needles(device, Which::List, (MainFormat::Ue8m0, 512), usize::MAX);
}

/// Maximum entries per query for which the launch is made: far more than there are, so that most splits are empty. The
/// memory for the splits takes 1 GB.
const MANY: u32 = 1 << 24;

/// Keys of so many tiles that every block has at least three.
pub fn every_key_of_many_can_dominate<B: Backend>(device: &Device<B>) {
    for format in MainFormat::ALL {
        for which in [Which::List, Which::All(MANY)] {
            let entries = which.entries_of_three_tiles().max(512) + 3;
            needles(device, which, (format, entries), usize::MAX);
        }
    }
}

/// A chunk of one request whose own rows are not in the ring yet: `tokens` queries, the last at `position`.
fn chunk(slot: i32, tokens: i32, position: u32) -> Vec<Query> {
    let of_token =
        |index: i32| Query { index, ..query(slot, position + 1 - (tokens - index) as u32) };
    (0..tokens).map(of_token).collect()
}

/// A layer with `tokens` own rows.
fn with_own_rows<B: Backend>(device: &Device<B>, shape: Shape, tokens: usize) -> Layer<B> {
    let mut layer = Layer::even(device, shape, 31);
    layer.own = random_rows(&mut StdRng::seed_from_u64(32), shape.format, tokens, 0..1);
    layer
}

/// Own rows of the step, rows of the ring before them, and a step with more tokens than a window.
pub fn every_own_row_can_dominate<B: Backend>(device: &Device<B>) {
    for (format, tokens, position) in
        [(MainFormat::Ue8m0, 40, 200), (MainFormat::F32, 3, 60), (MainFormat::F32, 131, 130)]
    {
        let shape = Shape { format, slots: 2, ..SHAPE };
        let mut layer = with_own_rows(device, shape, 1 + tokens as usize);
        layer.sinks.fill(-30.0);
        let mut queries = chunk(1, tokens, position);
        // Only the last query attends; the others are padding.
        queries[..tokens as usize - 1].iter_mut().for_each(|query| query.slot = -1);
        layer.check_needles(&queries, Which::Nothing);
    }
}

/// Queries whose own rows would lie before the first row of the step, or whose index is negative, are counted as faults
/// and get no result.
pub fn own_rows_equal_the_oracle<B: Backend>(device: &Device<B>) {
    for format in MainFormat::ALL {
        let layer = with_own_rows(device, Shape { format, heads: 2, ..SHAPE }, 11);
        let wrong = [3, 10, -1].map(|index| Query { index, ..query(0, 50) });
        let first = Query { index: 1, ..query(2, 1) };
        let queries = [wrong[..1].to_vec(), vec![first], chunk(0, 4, 140), chunk(1, 2, 1)];
        let queries = [&queries.concat()[..], &wrong[1..]].concat();
        assert_eq!(queries.len(), 10);
        let heads = layer.random_heads(queries.len(), 33);
        assert_eq!(layer.check(&queries, Which::Nothing, &heads), 3);
    }
}
