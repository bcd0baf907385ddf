//! Windows of several queries that a block takes in turn: the same bits as with one query per block.

use std::ops::Range;

use dsv4_kv::device::{Backend, Device, bf16};
use kv_layout::attention::{KeyCluster, MAX_CONSECUTIVE};
use kv_layout::main_row::MainFormat;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use super::blocks::Blocks;
use super::decode::{SHAPE, query};
use super::forms::{assert_same, comparable, spoil_rows};
use super::layer::{Layer, Query, Shape, Which, random_rows};
use crate::inputs::oracle;

/// Queries of consecutive tokens of a request, whose own rows are not in the ring yet. `index` is the number of the
/// first among the request's tokens in the step.
fn run(slot: i32, position: u32, index: i32, tokens: u32) -> impl Iterator<Item = Query> {
    let of_token = move |i: u32| Query { index: index + i as i32, ..query(slot, position + i) };
    (0..tokens).map(of_token)
}

/// Asserts that results, log-sum-exps and faults of these queries are the same as with one query per block, for each of
/// these numbers of multiprocessors. A block takes several queries if there are more queries than blocks.
fn same_bits<B: Backend>(
    layer: &mut Layer<B>,
    queries: &[Query],
    heads: &[Vec<u16>],
    (multiprocessors, what): (&[u32], &str),
) {
    let groups = layer.shape.heads.div_ceil(64);
    let mut attend = |blocks| {
        layer.blocks = blocks;
        let written = layer.attend(queries, Which::Nothing, heads);
        (written.kernel.starts_with("attend_consecutive"), comparable(written))
    };
    let (is_consecutive, whole) = attend(Blocks::whole(KeyCluster::TwoBlocks));
    assert!(!is_consecutive, "{what}");
    for &multiprocessors in multiprocessors {
        let what = format!("{what}: {multiprocessors} multiprocessors");
        let (is_consecutive, got) = attend(Blocks::consecutive(multiprocessors));
        let blocks = (multiprocessors / groups).max(1) as usize;
        assert_eq!(is_consecutive, queries.len() > blocks, "{what}");
        assert_same(&got, &whole, &what);
    }
}

fn with_own_rows<B: Backend>(device: &Device<B>, shape: Shape, tokens: usize) -> Layer<B> {
    let mut layer = Layer::random(device, shape, 60);
    layer.own = random_rows(&mut StdRng::seed_from_u64(61), shape.format, 1 + tokens, -3..2);
    layer
}

/// Windows that grow beyond a tile, and windows that begin to slide; more queries than one block takes, and blocks that
/// take few.
pub fn a_chunk_has_the_same_bits<B: Backend>(device: &Device<B>) {
    for (format, heads, position, tokens) in [
        (MainFormat::Ue8m0, 64, 112, MAX_CONSECUTIVE + 3),
        (MainFormat::Ue8m0, 3, 0, 4),
        (MainFormat::F32, 65, 60, 7),
        (MainFormat::Ue8m0, 17, 250, 9),
    ] {
        let shape = Shape { format, heads, slots: 2, ..SHAPE };
        let mut layer = with_own_rows(device, shape, tokens as usize);
        let queries: Vec<Query> = run(1, position, 0, tokens).collect();
        let heads = layer.random_heads(queries.len(), 62);
        let what = format!("{format:?} from {position}");
        same_bits(&mut layer, &queries, &heads, (&[1, 3], &what));
    }
}

/// Queries that do not continue the query before: another request, padding, a slot that does not exist, a position or
/// an index that is not the next, own rows before the first of the step.
pub fn other_queries_have_the_same_bits<B: Backend>(device: &Device<B>) {
    let padding = || std::iter::once(query(-1, 0));
    let nobody = || std::iter::once(query(7, 20));
    // Except for its slot this query looks as if the next one, of slot 0, continued it.
    let before = || run(-1, 199, 0, 1);
    let queries: Vec<Query> = run(0, 126, 0, 3)
        .chain(run(1, 62, 0, 3))
        .chain(run(1, 66, 3, 2))
        .chain(padding())
        .chain(run(1, 68, 5, 1))
        .chain(run(1, 69, 5, 1))
        .chain(nobody())
        .chain(run(0, 129, 3, 1))
        .chain(run(2, 5, 40, 1))
        .chain(run(2, 6, 0, 2))
        .chain(before())
        .chain(run(0, 200, 1, 1))
        .chain(padding())
        .collect();
    let mut layer = with_own_rows(device, Shape { heads: 5, ..SHAPE }, queries.len());
    let heads = layer.random_heads(queries.len(), 63);
    same_bits(&mut layer, &queries, &heads, (&[1, 3, 5], "mixed"));
    layer.blocks = Blocks::consecutive(1);
    assert_eq!(layer.attend(&queries, Which::Nothing, &heads).faults, 2);
}

/// Invalid queries that otherwise look as if they continued a query of slot 0. Their rows must not become keys of the
/// next query.
pub fn a_query_that_is_not_valid_follows_nobody<B: Backend>(device: &Device<B>) {
    for (what, position, invalid) in [
        ("padding", 198, -1),
        ("a slot past the last", 198, 7),
        ("a negative position", i32::MAX as u32 - 1, 0),
    ] {
        for slot in [0, 1] {
            let queries: Vec<Query> = run(0, position, 0, 2)
                .chain(run(invalid, position + 2, 2, 1))
                .chain(run(slot, 220, 0, 2))
                .collect();
            let mut layer = with_own_rows(device, Shape { heads: 2, ..SHAPE }, queries.len());
            let heads = layer.random_heads(queries.len(), 67);
            same_bits(&mut layer, &queries, &heads, (&[1], &format!("{what}, then slot {slot}")));
        }
    }
}

/// Negative results that are so small relative to the sink that they round to 0: they are 0, not -0, as with one query
/// per block.
pub fn results_near_zero_have_the_same_bits<B: Backend>(device: &Device<B>) {
    /// A power of e, so large that the factor of the weights is subnormal and the factor of the values rounds to 0.
    const SINK: f32 = 103.0;
    let mut layer = with_own_rows(device, Shape { slots: 1, heads: 2, ..SHAPE }, 3);
    let row = oracle(layer.shape.format).encode(&[bf16::from_f32(-0.001).to_bits(); 512]);
    layer.window.iter_mut().chain(&mut layer.own).for_each(|to| *to = row.clone());
    layer.sinks.fill(SINK);
    let queries: Vec<Query> = run(0, 126, 0, 3).collect();
    let heads = vec![vec![0; 512]; 2 * queries.len()];
    layer.blocks = Blocks::whole(KeyCluster::TwoBlocks);
    let whole = layer.attend(&queries, Which::Nothing, &heads).out;
    let zeros = whole.iter().filter(|&&bits| bits == 0).count();
    assert!(zeros > 512, "{zeros} zeros");
    same_bits(&mut layer, &queries, &heads, (&[1], "near zero"));
}

/// The one row that differs from the keys of the query before has a NaN code, or a scale that takes two
/// multiplications, in channels of several lanes.
pub fn the_new_row_may_be_nan_or_wide<B: Backend>(device: &Device<B>) {
    const WIDE: u8 = 140;
    for channel in [0, 200, 447] {
        let mut layer = with_own_rows(device, Shape { slots: 1, heads: 2, ..SHAPE }, 4);
        // The own rows of the second and of the third query.
        layer.own[2].scale[channel / 64] = WIDE;
        layer.own[3].data[channel] = 0x7F;
        let queries: Vec<Query> = run(0, 140, 0, 4).collect();
        let heads = layer.random_heads(queries.len(), 66);
        same_bits(&mut layer, &queries, &heads, (&[1], &format!("channel {channel}")));
        let out = layer.attend(&queries, Which::Nothing, &heads).out;
        let is_nan = |bits: &u16| bits & 0x7FFF > 0x7F80;
        let (before, after) = out.split_at(out.len() / 2);
        assert!(!before.iter().any(is_nan) && after.iter().all(is_nan), "channel {channel}");
    }
}

/// Each key of a query that continues others dominates in turn.
pub fn every_key_of_a_follower_can_dominate<B: Backend>(device: &Device<B>) {
    let mut layer = Layer::even(device, Shape { slots: 1, ..SHAPE }, 64);
    layer.own = random_rows(&mut StdRng::seed_from_u64(65), layer.shape.format, 7, 0..1);
    layer.sinks.fill(-30.0);
    let queries: Vec<Query> = run(0, 124, 0, 6).collect();
    layer.check_needles(&queries, Which::Nothing);
}

/// Steps of random requests: rows with NaN, infinities and any scales; scores of any magnitude.
pub fn random_steps_have_the_same_bits<B: Backend>(device: &Device<B>) {
    random_steps(device, 0..8);
}

/// As [`random_steps_have_the_same_bits`], with other seeds and more of them.
pub fn many_random_steps_have_the_same_bits<B: Backend>(device: &Device<B>) {
    random_steps(device, 8..300);
}

fn random_steps<B: Backend>(device: &Device<B>, seeds: Range<u64>) {
    for seed in seeds {
        let random = &mut StdRng::seed_from_u64(seed);
        let format = *MainFormat::ALL.choose(random).unwrap();
        let heads = *[1, 2, 17].choose(random).unwrap();
        let mut queries = Vec::new();
        for slot in 0..3 {
            let (position, tokens) = (random.random_range(0..300), random.random_range(0..5));
            queries.extend(run(slot, position, 0, tokens));
        }
        queries.extend(run(-1, 0, 0, 1));
        let mut layer = with_own_rows(device, Shape { format, heads, ..SHAPE }, queries.len());
        spoil_rows(&mut layer, random);
        let mut heads = layer.random_heads(queries.len(), seed + 1);
        let scale = 2_f32.powi(*[0, 0, 2, 5, -20, 20].choose(random).unwrap());
        heads.iter_mut().flatten().for_each(|bits| {
            *bits = bf16::from_f32(bf16::from_bits(*bits).to_f32() * scale).to_bits();
        });
        same_bits(&mut layer, &queries, &heads, (&[1, 4], &format!("step {seed}")));
    }
}
