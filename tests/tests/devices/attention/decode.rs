//! `attend` in decode steps, compared with `f64`; and the same bits in every batch.

use dsv4_kv::device::{Backend, Device};
use kv_layout::geometry::{BLOCK_TOKENS, HEAD_DIM, WINDOW};
use kv_layout::main_row::MainFormat;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use super::blocks::Blocks;
use super::layer::{Layer, Query, Shape, TILE, Which, Written};
use crate::inputs::{CANARY_BF16, CANARY_F32};

pub const SHAPE: Shape =
    Shape { format: MainFormat::Ue8m0, ratio: 4, heads: 64, slots: 3, ring: 132, blocks: 3 };

pub fn query(slot: i32, position: u32) -> Query {
    Query { slot, position, ..Query::default() }
}

/// A list of `rows` elements: all `seen` entries in random order, padded with -1 or cut.
pub fn list(random: &mut StdRng, seen: i32, rows: usize) -> Vec<i32> {
    let mut list: Vec<i32> = (0..seen).collect();
    list.shuffle(random);
    list.resize(rows, -1);
    list
}

/// The shape of a layer in which each request has room for `entries` entries.
pub const fn shape_of(which: Which, entries: usize, shape: Shape) -> Shape {
    let ratio = if let Which::All(_) = which { 128 } else { 4 };
    Shape { ratio, blocks: (entries as u32 * ratio).div_ceil(BLOCK_TOKENS), ..shape }
}

/// A query with `entries` entries, all of which it attends to; without entries it has a full window.
pub fn query_of(which: Which, entries: usize, slot: i32, random: &mut StdRng) -> Query {
    let position =
        if entries == 0 { 2 * WINDOW } else { shape_of(which, 1, SHAPE).ratio * entries as u32 };
    let list =
        if which == Which::List { list(random, entries as i32, entries) } else { Vec::new() };
    Query { list, ..query(slot, position - 1) }
}

/// Windows of several lengths, with padding among them, in both formats.
pub fn windows_equal_the_oracle<B: Backend>(device: &Device<B>) {
    for format in MainFormat::ALL {
        let layer = Layer::random(device, Shape { format, heads: 5, ..SHAPE }, 1);
        let queries = [query(0, 0), query(-1, 0), query(2, 63), query(1, 200), query(3, 7)];
        let heads = layer.random_heads(queries.len(), 2);
        assert_eq!(layer.check(&queries, Which::Nothing, &heads), 1, "a slot that does not exist");
    }
}

/// Lists with gaps, of lengths that are no multiple of a tile; one list names no entry.
pub fn lists_equal_the_oracle<B: Backend>(device: &Device<B>) {
    let mut random = StdRng::seed_from_u64(3);
    for (format, rows) in [(MainFormat::Ue8m0, 70), (MainFormat::F32, 3), (MainFormat::Ue8m0, 96)] {
        let layer = Layer::random(device, Shape { format, heads: 3, ..SHAPE }, 4);
        let mut listed = |slot, position: u32| {
            let mut list = list(&mut random, (position as i32 + 1) / 4, rows);
            let gap = random.random_range(0..rows);
            list[gap] = -1;
            Query { list, ..query(slot, position) }
        };
        let nothing = Query { list: vec![-1; rows], ..query(1, 299) };
        let queries = [listed(0, 383), listed(2, 2), listed(-1, 5), listed(1, 130), nothing];
        let heads = layer.random_heads(queries.len(), 5);
        assert_eq!(layer.check(&queries, Which::List, &heads), 0);
    }
}

/// Of a list only as many elements are read as the query sees entries. The elements after them have no effect, whatever
/// they are, and are no fault.
pub fn lists_end_where_entries_do<B: Backend>(device: &Device<B>) {
    let layer = Layer::random(device, Shape { heads: 2, slots: 1, ..SHAPE }, 23);
    let listed = |position, list: [i32; 6]| Query { list: list.to_vec(), ..query(0, position) };
    let queries = [
        listed(12, [-1, 2, 0, 1, i32::MAX, -7]),
        listed(2, [0, 1, 2, -7, i32::MAX, 3]),
        listed(23, [-1, -1, -1, -1, -1, 4]),
    ];
    assert_eq!(layer.check(&queries, Which::List, &layer.random_heads(queries.len(), 24)), 0);
}

/// All entries of an HCA layer; with 64 heads, with one more than a block takes, and with all heads of two blocks.
pub fn all_entries_equal_the_oracle<B: Backend>(device: &Device<B>) {
    for heads in [64, 65, 128] {
        let shape = Shape { ratio: 128, heads, slots: 1, blocks: 9, ..SHAPE };
        let layer = Layer::random(device, shape, 6);
        let queries = [query(0, 9 * 128 - 1)];
        assert_eq!(layer.check(&queries, Which::All(9), &layer.random_heads(1, 7)), 0);
    }
}

/// So many tiles per block that buffers in shared memory are reused several times; the last tile has few keys.
pub fn many_tiles_equal_the_oracle<B: Backend>(device: &Device<B>) {
    const ENTRIES: usize = 26 * TILE - WINDOW as usize + 5;
    let mut random = StdRng::seed_from_u64(25);
    for (which, format) in
        [(Which::List, MainFormat::Ue8m0), (Which::All(ENTRIES as u32), MainFormat::F32)]
    {
        assert!(ENTRIES > which.entries_of_three_tiles(), "each block has a third tile");
        let shape = shape_of(which, ENTRIES, Shape { format, heads: 2, slots: 1, ..SHAPE });
        let layer = Layer::random(device, shape, 26);
        let mut shorter = query_of(which, 300, 0, &mut random);
        shorter.list.resize(if which == Which::List { ENTRIES } else { 0 }, -1);
        let queries = [query_of(which, ENTRIES, 0, &mut random), shorter];
        assert_eq!(layer.check(&queries, which, &layer.random_heads(2, 27)), 0);
    }
}

/// The results of query `at` in a batch with two heads.
fn part(written: &Written, at: usize) -> (Vec<u16>, Vec<u32>) {
    (written.out[at * 1024..][..1024].to_vec(), written.lse[2 * at..][..2].to_vec())
}

/// A query has the same bits alone and in any batch, at any place in it, with padding around it; also a query with so
/// many keys that blocks reuse their buffers in shared memory.
pub fn a_query_has_the_same_bits_in_every_batch<B: Backend>(device: &Device<B>) {
    let mut random = StdRng::seed_from_u64(9);
    let all = Which::All(0).entries_of_three_tiles();
    for (which, entries) in [
        (Which::List, Which::List.entries_of_three_tiles()),
        (Which::All(all as u32), all),
        (Which::Nothing, 0),
    ] {
        let shape = shape_of(which, entries.max(96), Shape { heads: 2, slots: 2, ..SHAPE });
        let mut layer = Layer::random(device, shape, 10);
        let mut drawn = |at: i32| {
            let seen = if at == 0 { entries } else { random.random_range(0..=entries) };
            let mut query = query_of(which, seen, at % 2, &mut random);
            query.list.resize(if which == Which::List { entries } else { 0 }, -1);
            query
        };
        let queries: Vec<Query> = (0..5).map(&mut drawn).collect();
        let heads = layer.random_heads(queries.len(), 11);
        let clusters = which.clusters();
        let alone: Vec<Vec<_>> = clusters
            .iter()
            .map(|&cluster| {
                layer.blocks = Blocks::whole(cluster);
                let queries = queries.iter().map(std::slice::from_ref).zip(heads.chunks(2));
                queries.map(|(query, heads)| part(&layer.attend(query, which, heads), 0)).collect()
            })
            .collect();
        for round in 0..5 {
            // Two blocks and one in turn: with halves of channels, whole, spread over eight blocks, and over twice as
            // many. The first two batches have three queries, padding included: with one block for each query, the
            // second block of the last cluster has nothing to do.
            let cluster = clusters[round % clusters.len()];
            let blocks = [Blocks::halves, Blocks::whole, Blocks::spread][round.min(2)];
            layer.blocks = if round < 4 { blocks(cluster) } else { Blocks::spread_halves(cluster) };
            let alone = &alone[round % clusters.len()];
            let mut order: Vec<usize> = (0..queries.len()).collect();
            order.shuffle(&mut random);
            order.truncate(if round < 2 { 2 } else { random.random_range(2..=queries.len()) });
            let mut batch: Vec<Query> = order.iter().map(|&at| queries[at].clone()).collect();
            let mut batch_heads: Vec<Vec<u16>> =
                order.iter().flat_map(|&at| heads[2 * at..][..2].to_vec()).collect();
            let padding = random.random_range(0..batch.len());
            batch.insert(padding, Query { slot: -1, ..queries[0].clone() });
            batch_heads.splice(2 * padding..2 * padding, heads[..2].to_vec());
            order.insert(padding, usize::MAX);
            let written = layer.attend(&batch, which, &batch_heads);
            for (place, &at) in order.iter().enumerate().filter(|(_, at)| **at != usize::MAX) {
                let what = format!("{which:?}, {:?}, query {at} at {place}", layer.blocks);
                assert!(part(&written, place) == alone[at], "{what}");
            }
        }
    }
}

/// Every kind of wrong entry is counted once, however many clusters have heads of the query, and has no weight in the
/// softmax.
pub fn wrong_entries_are_counted<B: Backend>(device: &Device<B>) {
    for heads in [1, 65] {
        let mut layer = Layer::random(device, Shape { heads, slots: 1, ..SHAPE }, 19);
        layer.table[1] = -1;
        layer.table[2] = i32::MAX;
        // Two are not visible, two lie in missing blocks, one is negative but not -1.
        let list = vec![0, 75, i32::MAX, 33, 70, -7, -1, 3];
        let listed = Query { list, ..query(0, 299) };
        assert_eq!(layer.check(&[listed], Which::List, &layer.random_heads(1, 20)), 5);
        let refused = layer.check(&[query(0, 299)], Which::All(20), &layer.random_heads(1, 21));
        assert_eq!(refused, 1, "a query that sees 75 entries, of which 20 may be attended to");
    }
}

/// A negative position has no key. The query is counted as a fault, and its outputs stay untouched, whatever its sink
/// is. Other queries are not affected.
pub fn negative_positions_are_refused<B: Backend>(device: &Device<B>) {
    for (which, entries) in [(Which::Nothing, 0), (Which::List, 70), (Which::All(3), 3)] {
        let shape = shape_of(which, entries.max(3), Shape { heads: 2, ..SHAPE });
        let mut layer = Layer::random(device, shape, 85);
        let mut random = StdRng::seed_from_u64(86);
        let last = query_of(which, entries, 1, &mut random);
        let other = |position: i32| Query {
            list: vec![0; last.list.len()],
            ..query(0, position.cast_unsigned())
        };
        let queries = [other(-1), other(-2), other(i32::MIN), last];
        let heads = layer.random_heads(queries.len(), 87);
        let refused = 3 * 2;
        for sink in [0.0, f32::NAN, f32::INFINITY] {
            layer.sinks.fill(sink);
            for blocks in which.blocks_to_check() {
                layer.blocks = blocks;
                let (all, alone) = (
                    layer.attend(&queries, which, &heads),
                    layer.attend(&queries[3..], which, &heads[refused..]),
                );
                let what = format!("{which:?}, {blocks:?}, sink {sink}");
                assert_eq!(all.faults, 3 + alone.faults, "{what}");
                assert_eq!(all.lse[..refused], [CANARY_F32; 3 * 2], "{what}");
                let is_untouched = |&bits: &u16| bits == CANARY_BF16;
                assert!(all.out[..refused * HEAD_DIM as usize].iter().all(is_untouched), "{what}");
                assert!(all.out[refused * HEAD_DIM as usize..] == alone.out[..], "{what}");
                assert!(all.lse[refused..] == alone.lse[..], "{what}");
            }
        }
    }
}

/// A launch without queries does nothing, whatever the other arguments are.
pub fn no_queries_are_nothing<B: Backend>(device: &Device<B>) {
    let mut layer = Layer::random(device, SHAPE, 88);
    layer.shape.heads = 0;
    let written = layer.try_attend(&[], Which::Nothing, &[]);
    assert_eq!(written.map(|written| written.faults).unwrap(), 0);
}
