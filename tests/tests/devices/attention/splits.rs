//! Queries with so many keys that these are divided into splits (split-KV).

use dsv4_kv::device::{Backend, Device, DeviceError};
use dsv4_kv::ops::QueryForm;
use dsv4_kv_oracle::rope::Table;
use kv_layout::attention::{AttendedKeys, KeyCluster, SPLIT_TILES};
use kv_layout::geometry::WINDOW;
use kv_layout::main_row::MainFormat;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use super::blocks::Blocks;
use super::decode::{SHAPE, query, query_of, shape_of};
use super::layer::{Layer, Query, Shape, TILE, Which, random_rows};
use super::queries::prepared;

/// Maximum number of entries, after a full window, with which the keys of a query have `splits` splits.
const fn entries_of(splits: usize) -> usize {
    splits * SPLIT_TILES as usize * TILE - WINDOW as usize
}

/// A layer of one request with room for `entries` entries.
fn layer<B: Backend>(device: &Device<B>, entries: usize, shape: Shape, seed: u64) -> Layer<B> {
    let which = Which::All(entries as u32);
    Layer::even(device, shape_of(which, entries, Shape { slots: 1, ..shape }), seed)
}

/// A query that sees `entries` entries.
fn seeing(entries: usize, random: &mut StdRng) -> Query {
    query_of(Which::All(entries as u32), entries, 0, random)
}

/// The most keys of one split, one key more, and three splits of different lengths; in both formats, and with more
/// heads than a block takes.
pub fn splits_equal_the_oracle<B: Backend>(device: &Device<B>) {
    check(
        device,
        &[
            (entries_of(1), 1, 2, MainFormat::Ue8m0),
            (entries_of(1) + 1, 2, 65, MainFormat::F32),
            (entries_of(2) + 70, 3, 2, MainFormat::Ue8m0),
        ],
    );
}

/// Three splits of so many keys that a query with fewer heads would have four.
pub fn splits_of_many_heads_equal_the_oracle<B: Backend>(device: &Device<B>) {
    check(device, &[(entries_of(3) + 1, 3, 65, MainFormat::Ue8m0)]);
}

/// Checks layers of (entries, splits, heads, format).
fn check<B: Backend>(device: &Device<B>, layers: &[(usize, u32, u32, MainFormat)]) {
    let mut random = StdRng::seed_from_u64(91);
    for &(entries, splits, heads, format) in layers {
        assert_eq!(
            AttendedKeys::All.num_splits(WINDOW + entries as u32, KeyCluster::TwoBlocks, heads),
            splits
        );
        let layer = layer(device, entries, Shape { heads, format, ..SHAPE }, 92);
        let (queries, heads) = ([seeing(entries, &mut random)], layer.random_heads(1, 93));
        assert_eq!(layer.check(&queries, Which::All(entries as u32), &heads), 0);
    }
}

/// Needle checks around the ends of windows, of splits and of all keys, and at random keys.
pub fn keys_of_every_split_can_dominate<B: Backend>(device: &Device<B>) {
    let (entries, mut random) = (entries_of(2) + 130, StdRng::seed_from_u64(94));
    let layer = layer(device, entries, Shape { heads: 64, ..SHAPE }, 95);
    let keys = entries + WINDOW as usize;
    let tiles = keys.div_ceil(TILE);
    let ends = [1, 2].map(|split| tiles * split / 3 * TILE);
    let mut needles: Vec<usize> =
        [[0, 127, 128, keys - 1], [ends[0] - 1, ends[0], ends[1] - 1, ends[1]]].concat();
    needles.resize_with(64, || random.random_range(0..keys));
    let query = [seeing(entries, &mut random)];
    layer.check_some_needles(&query, Which::All(entries as u32), &needles);
}

/// A query has the same bits alone, beside shorter queries and padding, in a launch for longer contexts, in several
/// launches, and when it is repeated.
pub fn splits_have_the_same_bits_in_every_batch<B: Backend>(device: &Device<B>) {
    const HEADS: usize = 2;
    let (entries, mut random) = (entries_of(1) + 100, StdRng::seed_from_u64(96));
    let mut layer = layer(device, entries, Shape { heads: HEADS as u32, ..SHAPE }, 97);
    let padding = Query { slot: -1, ..query(0, 5) };
    let mut queries = vec![padding, query(0, 129), seeing(1000, &mut random)];
    queries.extend([entries, entries - 1].map(|entries| seeing(entries, &mut random)));
    let heads = layer.random_heads(queries.len(), 98);
    let which = Which::All(entries as u32);
    let alone = [KeyCluster::TwoBlocks, KeyCluster::OneBlock].map(|cluster| {
        layer.blocks = Blocks::whole(cluster);
        let queries = queries.iter().map(std::slice::from_ref).zip(heads.chunks(HEADS));
        queries.map(|(query, heads)| layer.attend(query, which, heads)).collect::<Vec<_>>()
    });
    let mut order: Vec<usize> = (0..queries.len()).collect();
    // Memory for one query at a time, for two, and for all; launches for as many splits as there are, and for more.
    for (blocks, at_once, most) in [
        (Blocks::halves(KeyCluster::TwoBlocks), Some(1), entries),
        (Blocks::whole(KeyCluster::OneBlock), Some(1), entries_of(2) + 1),
        (Blocks::whole(KeyCluster::TwoBlocks), Some(2), entries_of(4)),
        (Blocks::halves(KeyCluster::TwoBlocks), None, entries_of(2) + 1),
        (Blocks::halves(KeyCluster::OneBlock), None, entries),
    ] {
        order.shuffle(&mut random);
        (layer.blocks, layer.at_once) = (blocks, at_once);
        let alone = &alone[usize::from(blocks.cluster == KeyCluster::OneBlock)];
        let batch: Vec<Query> = order.iter().map(|&at| queries[at].clone()).collect();
        let batch_heads: Vec<Vec<u16>> =
            order.iter().flat_map(|&at| heads[HEADS * at..][..HEADS].to_vec()).collect();
        let written = layer.attend(&batch, Which::All(most as u32), &batch_heads);
        assert_eq!(written.faults, 0);
        for (place, &at) in order.iter().enumerate() {
            let what = format!(
                "query {at} at {place}, {blocks:?}, {at_once:?} at once, for {most} entries"
            );
            assert!(written.out[place * HEADS * 512..][..HEADS * 512] == alone[at].out, "{what}");
            assert!(written.lse[place * HEADS..][..HEADS] == alone[at].lse, "{what}");
        }
    }
}

/// A split whose entries all lie in missing blocks has no weight. A NaN in one split makes the whole result NaN.
pub fn a_split_may_be_lost_or_nan<B: Backend>(device: &Device<B>) {
    let (entries, mut random) = (entries_of(1) + 200, StdRng::seed_from_u64(102));
    let mut layer = layer(device, entries, Shape { heads: 2, ..SHAPE }, 103);
    let (queries, heads) = ([seeing(entries, &mut random)], layer.random_heads(1, 104));
    let which = Which::All(entries as u32);
    // The entries of the second of two splits lose their blocks.
    let tiles = (entries + WINDOW as usize).div_ceil(TILE);
    let second = tiles / 2 * TILE - WINDOW as usize;
    layer.table[second..].fill(-1);
    assert_eq!(layer.check(&queries, which, &heads) as usize, entries - second);
    // A NaN code in an entry of the first split.
    let row = layer.table[3] as usize;
    layer.entries[row].data[9] = 0x7F;
    let written = layer.attend(&queries, which, &heads);
    let is_nan = |&bits: &u16| bits & 0x7FFF > 0x7F80;
    assert!(written.out.iter().all(is_nan), "NaN is not hidden");
}

/// Raw queries, and own rows of a chunk, with several splits and in several launches: the same bits as prepared queries
/// in one launch.
pub fn raw_queries_and_own_rows_have_splits<B: Backend>(device: &Device<B>) {
    const HEADS: usize = 2;
    let (entries, mut random) = (entries_of(1) + 40, StdRng::seed_from_u64(105));
    let mut layer = layer(device, entries, Shape { heads: HEADS as u32, ..SHAPE }, 106);
    // A chunk of three tokens; the ring has the rows before it.
    let last = seeing(entries, &mut random);
    let queries: Vec<Query> = (0..3)
        .map(|index| Query { position: last.position - 2 + index as u32, index, ..last.clone() })
        .collect();
    layer.own = random_rows(&mut random, layer.shape.format, 4, 0..1);
    let raw = layer.random_heads(queries.len(), 107);
    let rotated: Vec<_> = raw
        .iter()
        .enumerate()
        .map(|(at, raw)| prepared(raw, Table::Compress, queries[at / HEADS].position))
        .collect();
    let which = Which::All(entries as u32);
    assert_eq!(layer.check(&queries, which, &rotated), 0);
    let want = layer.attend(&queries, which, &rotated);
    (layer.form, layer.at_once) = (QueryForm::Raw, Some(1));
    let got = layer.attend(&queries, which, &raw);
    assert!(got.out == want.out && got.lse == want.lse, "other bits");
}

/// Without memory for the splits of a query nothing is queued, and the refusal states the needed size.
pub fn splits_without_memory_are_refused<B: Backend>(device: &Device<B>) {
    let (entries, mut random) = (entries_of(1) + 1, StdRng::seed_from_u64(99));
    let mut layer = layer(device, entries, Shape { heads: 65, ..SHAPE }, 100);
    layer.at_once = Some(0);
    let (queries, heads) = ([seeing(entries, &mut random)], layer.random_heads(1, 101));
    let refused = layer.try_attend(&queries, Which::All(entries as u32), &heads);
    let Err(DeviceError::Length { found, needed, .. }) = refused.map(|_| ()) else {
        panic!("it was not refused")
    };
    assert_eq!((found, needed), (0, 4), "two splits of two times 64 heads");
    // Keys of a single split need no memory.
    layer.check(&[seeing(entries - 1, &mut random)], Which::All(entries as u32 - 1), &heads);
}
