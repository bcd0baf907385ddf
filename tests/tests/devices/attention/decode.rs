//! `attend` of decode steps against `f64`.

use dsv4_kv::device::{Backend, Device, bf16};
use kv_layout::main_row::MainFormat;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use super::layer::{Layer, Query, Shape, Which, Written, assert_near, random_row};

const SHAPE: Shape =
    Shape { format: MainFormat::Ue8m0, ratio: 4, heads: 64, slots: 3, ring: 132, blocks: 3 };

fn query(slot: i32, position: u32) -> Query {
    Query { slot, position, list: Vec::new() }
}

/// A list of `rows` entries: some of those seen, in random order, padded.
fn list(random: &mut StdRng, seen: i32, rows: usize) -> Vec<i32> {
    let mut list: Vec<i32> = (0..seen).collect();
    list.shuffle(random);
    list.resize(rows, -1);
    list
}

/// Windows of every kind of length, padding among them, in both formats.
pub fn windows_equal_the_oracle<B: Backend>(device: &Device<B>) {
    for format in MainFormat::ALL {
        let layer = Layer::random(device, Shape { format, heads: 5, ..SHAPE }, 1);
        let queries = [query(0, 0), query(-1, 0), query(2, 63), query(1, 200), query(3, 7)];
        let heads = layer.random_heads(queries.len(), 2);
        assert_eq!(layer.check(&queries, Which::Nothing, &heads), 1, "a slot that does not exist");
    }
}

/// Lists with gaps, of lengths that are no multiple of anything.
pub fn lists_equal_the_oracle<B: Backend>(device: &Device<B>) {
    let mut random = StdRng::seed_from_u64(3);
    for (format, rows) in [(MainFormat::Ue8m0, 70), (MainFormat::F32, 3), (MainFormat::Ue8m0, 96)] {
        let layer = Layer::random(device, Shape { format, heads: 3, ..SHAPE }, 4);
        let mut listed = |slot, position: u32| {
            let mut list = list(&mut random, (position as i32 + 1) / 4, rows);
            let gap = random.random_range(0..rows);
            list[gap] = -1;
            Query { slot, position, list }
        };
        let queries = [listed(0, 383), listed(2, 2), listed(-1, 5), listed(1, 130)];
        let heads = layer.random_heads(queries.len(), 5);
        assert_eq!(layer.check(&queries, Which::List, &heads), 0);
    }
}

/// All entries of an HCA layer; all 64 heads, more than one block has, and all of two blocks.
pub fn all_entries_equal_the_oracle<B: Backend>(device: &Device<B>) {
    for heads in [64, 65, 128] {
        let shape = Shape { ratio: 128, heads, slots: 1, blocks: 9, ..SHAPE };
        let layer = Layer::random(device, shape, 6);
        let queries = [query(0, 9 * 128 - 1)];
        assert_eq!(layer.check(&queries, Which::All(9), &layer.random_heads(1, 7)), 0);
    }
}

/// Each key in turn outweighs all others, a key a head: its row is what comes out, and no other. Of a window and a list of
/// more tiles than blocks share.
pub fn every_key_can_dominate<B: Backend>(device: &Device<B>) {
    const HEADS: usize = 64;
    let shape = Shape { heads: HEADS as u32, slots: 1, ..SHAPE };
    let mut layer = Layer::random(device, shape, 8);
    layer.sinks = vec![-30.0; HEADS];
    let (format, mut random) =
        (crate::inputs::oracle(layer.shape.format), StdRng::seed_from_u64(22));
    // Of one size: a query along a short row might have a larger score with a long one.
    for row in layer.window.iter_mut().chain(&mut layer.entries) {
        *row = format.encode(&random_row(&mut random, 1.0));
    }
    let list = list(&mut random, 75, 70);
    let query = Query { slot: 0, position: 299, list };
    let keys = layer.keys(&query, Which::List).len();
    assert_eq!(keys, 128 + 70);
    let queries = vec![query.clone(); keys.div_ceil(HEADS)];
    let needle = |head| layer.along(&query, Which::List, head % keys);
    let heads: Vec<Vec<u16>> = (0..queries.len() * HEADS).map(needle).collect();
    let written = layer.attend(&queries, Which::List, &heads);
    for (at, out) in written.out.chunks(512).enumerate().take(keys) {
        let expected = layer.expected(&query, Which::List, at % HEADS, &heads[at]);
        assert!(layer.nearest(&query, Which::List, out) == at, "key {at} of {keys}");
        assert_near(out, &expected, &format!("key {at}"));
    }
}

/// The bits of a query are the same alone and in any batch, at any place in it, with drafts and padding around it.
pub fn a_query_has_the_same_bits_in_every_batch<B: Backend>(device: &Device<B>) {
    let mut random = StdRng::seed_from_u64(9);
    for (which, ratio, blocks) in
        [(Which::List, 4, 3), (Which::All(5), 128, 5), (Which::Nothing, 4, 3)]
    {
        let layer = Layer::random(device, Shape { heads: 2, ratio, blocks, ..SHAPE }, 10);
        let mut drawn = |slot: i32| {
            let position = random.random_range(0..blocks * 128);
            let list = list(&mut random, (position as i32 + 1) / ratio as i32, 100);
            Query { slot, position, list }
        };
        let queries: Vec<Query> = (0..7).map(|at| drawn(at % 3)).collect();
        let heads = layer.random_heads(queries.len(), 11);
        let of = |written: &Written, at: usize| {
            (written.out[at * 1024..][..1024].to_vec(), written.lse[2 * at..][..2].to_vec())
        };
        let alone: Vec<_> = queries
            .iter()
            .zip(heads.chunks(2))
            .map(|(query, heads)| of(&layer.attend(std::slice::from_ref(query), which, heads), 0))
            .collect();
        for _ in 0..3 {
            let mut order: Vec<usize> = (0..queries.len()).collect();
            order.shuffle(&mut random);
            order.truncate(random.random_range(2..=queries.len()));
            let mut batch: Vec<Query> = order.iter().map(|&at| queries[at].clone()).collect();
            let mut batch_heads: Vec<Vec<u16>> =
                order.iter().flat_map(|&at| heads[2 * at..][..2].to_vec()).collect();
            let padding = random.random_range(0..batch.len());
            batch.insert(padding, Query { slot: -1, ..queries[0].clone() });
            batch_heads.splice(2 * padding..2 * padding, heads[..2].to_vec());
            order.insert(padding, usize::MAX);
            let written = layer.attend(&batch, which, &batch_heads);
            for (place, &at) in order.iter().enumerate().filter(|(_, at)| **at != usize::MAX) {
                assert!(of(&written, place) == alone[at], "{which:?}, query {at} at {place}");
            }
        }
    }
}

/// NaN and infinities of one request, in its keys or its query, never reach another's result, and rows that do not
/// count may hold anything.
pub fn no_number_reaches_another_request<B: Backend>(device: &Device<B>) {
    let shape = Shape { heads: 2, slots: 2, ..SHAPE };
    let mut layer = Layer::random(device, shape, 12);
    let listed = |slot, position| Query { slot, position, list: vec![0, -1, 3, 2] };
    let queries = [listed(0, 100), listed(1, 17)];
    let mut heads = layer.random_heads(2, 13);
    let clean = layer.attend(&queries, Which::List, &heads);
    // All rows of the other request, all entries that are not listed, and the window rows that no query sees.
    let seen: Vec<_> = layer.keys(&queries[1], Which::List).into_iter().cloned().collect();
    layer.spoil_all_but(&seen);
    heads[0].fill(0x7FC0);
    heads[1].fill(0x7F80);
    let spoilt = layer.attend(&queries, Which::List, &heads);
    assert_eq!(spoilt.out[1024..], clean.out[1024..], "the other request");
    let is_nan = |&bits: &u16| bits & 0x7FFF > 0x7F80;
    assert!(spoilt.out[..1024].iter().all(is_nan), "NaN is not hidden");
}

/// A NaN code of a key makes its request's result NaN, in both formats: it never passes for a number.
pub fn a_nan_code_is_a_nan<B: Backend>(device: &Device<B>) {
    for format in MainFormat::ALL {
        for channel in [0, 63, 200, 447] {
            let shape = Shape { format, heads: 1, slots: 1, ..SHAPE };
            let mut layer = Layer::random(device, shape, 14);
            layer.window[5].data[channel] = 0x7F + 0x80 * (channel as u8 % 2);
            let written = layer.attend(&[query(0, 9)], Which::Nothing, &layer.random_heads(1, 15));
            let is_nan = |&bits: &u16| bits & 0x7FFF > 0x7F80;
            assert!(written.out.iter().all(is_nan), "{format:?}, channel {channel}");
        }
    }
}

/// Scales of every size, those that one multiplication of BF16 does not reach among them.
pub fn every_scale_equals_the_oracle<B: Backend>(device: &Device<B>) {
    for exponent in [-20, -1, 7, 8, 9, 30, 50] {
        let mut layer = Layer::random(device, Shape { heads: 1, slots: 1, ..SHAPE }, 16);
        let mut random = StdRng::seed_from_u64(17);
        for row in &mut layer.window {
            let values = random_row(&mut random, 448.0 * 2f32.powi(exponent));
            *row = crate::inputs::oracle(layer.shape.format).encode(&values);
        }
        let mut heads = layer.random_heads(1, 18);
        // Scores stay within reach of a softmax.
        let shrink = 2f32.powi(-exponent - 9);
        heads[0].iter_mut().for_each(|bits| {
            *bits = bf16::from_f32(bf16::from_bits(*bits).to_f32() * shrink).to_bits();
        });
        assert_eq!(layer.check(&[query(0, 30)], Which::Nothing, &heads), 0);
    }
}

/// Every way an entry can be wrong is counted, and does not count in the softmax.
pub fn wrong_entries_are_counted<B: Backend>(device: &Device<B>) {
    let mut layer = Layer::random(device, Shape { heads: 1, slots: 1, ..SHAPE }, 19);
    layer.table[1] = -1;
    layer.table[2] = i32::MAX;
    // Not seen twice, in blocks that are missing twice, negative but not -1 once.
    let list = vec![0, 75, i32::MAX, 33, 70, -7, -1, 3];
    let query = Query { slot: 0, position: 299, list };
    assert_eq!(layer.check(&[query], Which::List, &layer.random_heads(1, 20)), 5);
    let all = Query { slot: 0, position: 299, list: Vec::new() };
    let refused = layer.check(&[all], Which::All(20), &layer.random_heads(1, 21));
    assert_eq!(refused, 1, "a query that sees 75 entries, of which 20 may be attended to");
}
