//! Queries that are spread over eight blocks have the same bits as queries that are not.

use dsv4_kv::device::{Backend, Device, bf16};
use kv_layout::attention::{AttendedKeys, KeyCluster, MAX_HEADS, SPLIT_TILES, SPREAD_TILES};
use kv_layout::geometry::WINDOW;
use kv_layout::main_row::MainFormat;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::blocks::Blocks;
use super::decode::{SHAPE, query_of, shape_of};
use super::layer::{Layer, Query, Shape, TILE, Which};

/// Whether the splits of the keys, a window and `entries` entries, are short enough to be spread over their clusters.
fn are_spread(blocks: Blocks, which: Which, entries: usize, heads: u32) -> bool {
    let keys = WINDOW + entries as u32;
    let splits = which.keys().num_splits(keys, blocks.cluster, heads);
    keys.div_ceil(TILE as u32) <= SPREAD_TILES * splits * blocks.spread_clusters
}

/// Runs queries of a window and `entries` entries, with padding, a shorter query, and one whose slot does not exist.
/// Asserts that spread and whole launches give the same results, log-sum-exps and fault counts, and that a spread
/// kernel runs exactly where the keys are few enough.
fn both_agree<B: Backend>(device: &Device<B>, which: Which, entries: usize, shape: Shape) {
    let shape = shape_of(which, entries.max(96), Shape { slots: 2, ..shape });
    let mut layer = Layer::random(device, shape, 40);
    let random = &mut StdRng::seed_from_u64(41);
    let mut queries = [
        query_of(which, entries, 1, random),
        query_of(which, entries.div_ceil(3), 0, random),
        query_of(which, entries, -1, random),
        query_of(which, entries, 2, random),
    ];
    let rows = if which == Which::List { entries } else { 0 };
    queries.iter_mut().for_each(|query: &mut Query| query.list.resize(rows, -1));
    if let Some(entry) = queries[0].list.last_mut() {
        *entry = i32::MAX;
    }
    let heads = layer.random_heads(queries.len(), 42);
    for &cluster in which.clusters() {
        let mut attend = |blocks| {
            layer.blocks = blocks;
            layer.attend(&queries, which, &heads)
        };
        let whole = attend(Blocks::whole(cluster));
        assert!(!whole.kernel.starts_with("attend_spread"), "{}", whole.kernel);
        assert_eq!(
            whole.faults,
            1 + u32::from(rows > 0),
            "{which:?}, {entries} entries, {cluster:?}"
        );
        for blocks in Blocks::all_spread(cluster) {
            let (spread, what) =
                (attend(blocks), format!("{which:?}, {entries} entries, {blocks:?}"));
            let is_spread = spread.kernel.starts_with("attend_spread");
            assert_eq!(is_spread, are_spread(blocks, which, entries, shape.heads), "{what}");
            assert_eq!(spread.faults, whole.faults, "{what}");
            assert!(spread.lse == whole.lse, "{what}");
            assert!(spread.out == whole.out, "{what}");
        }
    }
}

/// Number of entries that, with a window, fill `tiles` tiles.
const fn entries_of(tiles: u32) -> usize {
    (tiles * TILE as u32 - WINDOW) as usize
}

/// The most entries of a list that is spread over one cluster.
const MAX_ENTRIES: usize = entries_of(SPREAD_TILES);

/// Zero to three tiles per block, with full tiles and with a tile of few keys; one key more than a list that is spread
/// over one cluster may have; one split, and two; numbers of heads that do not fill a block.
pub fn spread_queries_have_the_same_bits<B: Backend>(device: &Device<B>) {
    both_agree(device, Which::Nothing, 0, Shape { heads: 3, ..SHAPE });
    both_agree(device, Which::Nothing, 0, Shape { format: MainFormat::F32, heads: 65, ..SHAPE });
    lists_agree(device, &[(1, 64), (7 * TILE - 2, 17), (MAX_ENTRIES, 1), (MAX_ENTRIES + 1, 1)]);
    all_agree(
        device,
        &[
            (2, 1, 64, MainFormat::F32),
            (entries_of(SPLIT_TILES), 1, 1, MainFormat::Ue8m0),
            (entries_of(SPLIT_TILES) + 1, 2, 1, MainFormat::Ue8m0),
        ],
    );
}

/// More tiles: the most that a list spread over two clusters may have; several splits, with the most tiles that are
/// spread and with fewer.
pub fn more_spread_queries_have_the_same_bits<B: Backend>(device: &Device<B>) {
    const TWICE: usize = MAX_ENTRIES + SPREAD_TILES as usize * TILE;
    lists_agree(device, &[(11 * TILE, 1), (TWICE, 1)]);
    all_agree(
        device,
        &[
            (entries_of(SPLIT_TILES) + 1, 2, 65, MainFormat::Ue8m0),
            (entries_of(2 * SPLIT_TILES) - 3, 2, 17, MainFormat::F32),
            (entries_of(2 * SPLIT_TILES) + 1, 3, 1, MainFormat::Ue8m0),
        ],
    );
}

/// Runs [`both_agree`] for lists of (entries, heads).
fn lists_agree<B: Backend>(device: &Device<B>, lists: &[(usize, u32)]) {
    for &(entries, heads) in lists {
        both_agree(device, Which::List, entries, Shape { heads, ..SHAPE });
    }
}

/// Runs [`both_agree`] for all entries, given as (entries, splits, heads, format).
fn all_agree<B: Backend>(device: &Device<B>, layers: &[(usize, u32, u32, MainFormat)]) {
    for &(entries, splits, heads, format) in layers {
        assert_eq!(
            AttendedKeys::All.num_splits(WINDOW + entries as u32, KeyCluster::TwoBlocks, heads),
            splits
        );
        let which = Which::All(entries as u32);
        both_agree(device, which, entries, Shape { format, heads, ..SHAPE });
    }
}

/// Splits with the most tiles that two clusters take, of queries with the most heads; and one tile more.
pub fn the_most_keys_have_the_same_bits<B: Backend>(device: &Device<B>) {
    const OF_SPLIT: u32 = 2 * SPREAD_TILES;
    for (tiles, splits, heads) in [
        (3 * SPLIT_TILES + 1, 3, 65),
        (3 * OF_SPLIT, 3, MAX_HEADS),
        (3 * OF_SPLIT + 1, 4, MAX_HEADS),
        (4 * OF_SPLIT, 4, 64),
        (4 * OF_SPLIT + 1, 5, 3),
    ] {
        let entries = tiles * TILE as u32 - WINDOW;
        let found = AttendedKeys::All.num_splits(WINDOW + entries, KeyCluster::TwoBlocks, heads);
        assert_eq!(found, splits);
        both_agree(device, Which::All(entries), entries as usize, Shape { heads, ..SHAPE });
    }
}

/// A NaN in either half of a query's keys, in one split and in two, reaches the results, as without clusters of eight.
pub fn a_nan_in_either_half_is_not_hidden<B: Backend>(device: &Device<B>) {
    let cluster = KeyCluster::TwoBlocks;
    for entries in [13 * TILE, 17 * TILE] {
        let which = Which::All(entries as u32);
        let shape = shape_of(which, entries, Shape { slots: 1, heads: 2, ..SHAPE });
        for spoiled in [3, entries - 3] {
            let mut layer = Layer::even(device, shape, 43);
            let row = layer.table[spoiled] as usize;
            layer.entries[row].data[9] = 0x7F;
            let query = [query_of(which, entries, 0, &mut StdRng::seed_from_u64(44))];
            let heads = layer.random_heads(1, 45);
            let [whole, halves] =
                [Blocks::whole(cluster), Blocks::spread_halves(cluster)].map(|blocks| {
                    layer.blocks = blocks;
                    layer.attend(&query, which, &heads)
                });
            assert!(halves.out == whole.out && halves.lse == whole.lse, "entry {spoiled}");
            assert!(halves.out.iter().all(|bits| bits & 0x7FFF > 0x7F80), "entry {spoiled}");
        }
    }
}

/// Scores so large that softmax weights are no longer relative to 0: for some heads and tiles or for all, in one
/// cluster and in two, with one split and with several.
pub fn far_scores_have_the_same_bits<B: Backend>(device: &Device<B>) {
    /// Softmax weights are relative to 0 as long as scores are below 24 in log2 units.
    const FAR: f32 = 24.0 * core::f32::consts::LN_2;
    for (which, entries) in [
        (Which::Nothing, 0),
        (Which::List, 9 * TILE - 5),
        (Which::All(20 * TILE as u32), 20 * TILE),
    ] {
        let shape = shape_of(which, entries.max(96), Shape { slots: 1, heads: 5, ..SHAPE });
        let mut layer = Layer::random(device, shape, 46);
        let query = query_of(which, entries, 0, &mut StdRng::seed_from_u64(47));
        let mut heads = layer.random_heads(1, 48);
        // Each head is four times as large as the one before.
        for (head, values) in heads.iter_mut().enumerate() {
            let scale = 4_f32.powi(head as i32);
            values.iter_mut().for_each(|bits| {
                *bits = bf16::from_f32(bf16::from_bits(*bits).to_f32() * scale).to_bits();
            });
        }
        let queries = [query];
        for &cluster in which.clusters() {
            let mut attend = |blocks| {
                layer.blocks = blocks;
                layer.attend(&queries, which, &heads)
            };
            let whole = attend(Blocks::whole(cluster));
            let far = whole.lse.iter().filter(|&&bits| f32::from_bits(bits) > FAR).count();
            assert!((1..5).contains(&far), "{far} heads are far");
            for blocks in Blocks::all_spread(cluster) {
                let spread = attend(blocks);
                assert!(spread.lse == whole.lse, "{which:?}, {blocks:?}");
                assert!(spread.out == whole.out, "{which:?}, {blocks:?}");
            }
        }
    }
}

/// All scores of a head are so far below 0 that softmax weights are not relative to 0; no score is far above the
/// others.
pub fn scores_far_below_have_the_same_bits<B: Backend>(device: &Device<B>) {
    const ENTRIES: usize = 9 * TILE;
    /// Channels in which keys and queries are not zero.
    const ALONG: usize = 256;
    /// Approximate distance of the scores below 0, in log2 units.
    const BELOW: f32 = 40.0;
    let shape = shape_of(Which::List, ENTRIES, Shape { slots: 1, heads: 2, ..SHAPE });
    let mut layer = Layer::random(device, shape, 49);
    let mut random = StdRng::seed_from_u64(50);
    let signs: Vec<f32> = (0..ALONG).map(|_| if random.random() { 1.0 } else { -1.0 }).collect();
    let along = |size: f32| {
        let of = |channel: usize| signs.get(channel).map_or(0.0, |sign| size * sign);
        (0..512).map(|channel| bf16::from_f32(of(channel)).to_bits()).collect::<Vec<u16>>()
    };
    let unit = core::f32::consts::LN_2 * 512_f32.sqrt() / ALONG as f32;
    for row in layer.window.iter_mut().chain(&mut layer.entries) {
        let values = along(unit * BELOW * random.random_range(0.9..1.1));
        *row = crate::inputs::oracle(shape.format).encode(&values);
    }
    // With a larger sink the log-sum-exp would be that of the sink.
    layer.sinks.fill(-200.0);
    let queries = [query_of(Which::List, ENTRIES, 0, &mut random)];
    let heads = [along(-1.0), along(-0.1)];
    for &cluster in Which::List.clusters() {
        let mut attend = |blocks| {
            layer.blocks = blocks;
            layer.attend(&queries, Which::List, &heads)
        };
        let whole = attend(Blocks::whole(cluster));
        for blocks in Blocks::all_spread(cluster) {
            let spread = attend(blocks);
            assert!(spread.lse == whole.lse, "{blocks:?}");
            assert!(spread.out == whole.out, "{blocks:?}");
        }
    }
    assert_eq!(layer.check(&queries, Which::List, &heads), 0);
}

/// Negative results that are so small relative to the sink that they round to 0: they are 0, not -0, as in the other
/// forms.
pub fn results_near_zero_have_the_same_bits<B: Backend>(device: &Device<B>) {
    const ENTRIES: usize = 3 * TILE;
    /// A power of e, so large that the factor of the weights is subnormal and the factor of the values rounds to 0.
    const SINK: f32 = 103.0;
    for (which, entries) in [(Which::Nothing, 0), (Which::List, ENTRIES), (Which::All(1), 1)] {
        let shape = shape_of(which, entries.max(96), Shape { slots: 1, heads: 2, ..SHAPE });
        let mut layer = Layer::random(device, shape, 51);
        for row in layer.window.iter_mut().chain(&mut layer.entries) {
            *row = crate::inputs::oracle(shape.format)
                .encode(&[bf16::from_f32(-0.001).to_bits(); 512]);
        }
        layer.sinks.fill(SINK);
        let queries = [query_of(which, entries, 0, &mut StdRng::seed_from_u64(52))];
        let heads = vec![vec![0; 512]; 2];
        for &cluster in which.clusters() {
            let mut attend = |blocks| {
                layer.blocks = blocks;
                layer.attend(&queries, which, &heads).out
            };
            let whole = attend(Blocks::whole(cluster));
            let zeros = whole.iter().filter(|&&bits| bits == 0).count();
            assert!(zeros > 512, "{which:?}, {cluster:?}: {zeros} zeros");
            for blocks in Blocks::others(cluster) {
                assert!(attend(blocks) == whole, "{which:?}, {blocks:?}");
            }
        }
    }
}
