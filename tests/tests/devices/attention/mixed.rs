//! Random queries in any order, half of them invalid. All forms of a launch give the same bits, each valid query has
//! the bits that it has alone, and the results of invalid queries stay untouched.

use std::ops::Range;

use dsv4_kv::device::{Backend, Device};
use dsv4_kv::ops::QueryForm;
use kv_layout::geometry::WINDOW;
use kv_layout::main_row::MainFormat;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use super::blocks::Blocks;
use super::decode::{SHAPE, query_of, shape_of};
use super::forms::{assert_same, comparable, spoil_head, spoil_list};
use super::layer::{Layer, Query, Shape, Which, random_rows};
use crate::inputs::{CANARY_BF16, CANARY_F32};

/// Windows, lists and all entries, with up to three splits, and with more than 64 heads.
pub fn queries_that_are_not_valid_change_no_bit<B: Backend>(device: &Device<B>) {
    windows(device, 0..6);
    lists(device, 0..3);
    all_entries(device, 0..2);
    many_heads(device, 0..1);
}

/// As above, with other seeds.
pub fn more_queries_that_are_not_valid_change_no_bit<B: Backend>(device: &Device<B>) {
    windows(device, 6..12);
    lists(device, 3..6);
    all_entries(device, 2..3);
    many_heads(device, 1..2);
}

/// As above, with many other seeds.
pub fn many_queries_that_are_not_valid_change_no_bit<B: Backend>(device: &Device<B>) {
    windows(device, 12..100);
    lists(device, 6..36);
    all_entries(device, 3..19);
    many_heads(device, 2..8);
}

fn windows<B: Backend>(device: &Device<B>, seeds: Range<u64>) {
    seeds.for_each(|seed| check(device, seed, (Which::Nothing, 0), [1, 2, 17][seed as usize % 3]));
}

fn lists<B: Backend>(device: &Device<B>, seeds: Range<u64>) {
    for seed in seeds {
        let entries = [386, 3, 641, 130, 1, 513, 1025, 64, 2][seed as usize % 9];
        let heads = [1, 2, 17][seed as usize / 9 % 3];
        check(device, 1000 + seed, (Which::List, entries), heads);
    }
}

fn all_entries<B: Backend>(device: &Device<B>, seeds: Range<u64>) {
    for seed in seeds {
        let entries = [1025, 641, 3, 2050, 130, 1, 962, 386][seed as usize % 8];
        let heads = [2, 1, 17][seed as usize / 8 % 3];
        check(device, 2000 + seed, (Which::All(entries as u32), entries), heads);
    }
}

fn many_heads<B: Backend>(device: &Device<B>, seeds: Range<u64>) {
    for seed in seeds {
        let keys = [(Which::List, 70), (Which::Nothing, 0), (Which::All(962), 962)];
        check(device, 3000 + seed, keys[seed as usize % 3], [65, 66, 127][seed as usize / 3 % 3]);
    }
}

/// The queries of a launch, which of them are valid, and their heads.
struct Mixed {
    queries: Vec<Query>,
    is_valid: Vec<bool>,
    heads: Vec<Vec<u16>>,
}

fn check<B: Backend>(
    device: &Device<B>,
    seed: u64,
    (which, entries): (Which, usize),
    head_count: u32,
) {
    let random = &mut StdRng::seed_from_u64(seed);
    let format = *MainFormat::ALL.choose(random).unwrap();
    let shape = Shape { slots: 2, heads: head_count, format, ..SHAPE };
    let mut layer = Layer::random(device, shape_of(which, entries.max(3), shape), seed);
    let count = random.random_range(2..6);
    if random.random_range(0..3) == 0 {
        layer.own = random_rows(random, format, 1 + count, -3..2);
    }
    // In one of three cases all window rows of one request are NaN.
    if random.random_range(0..3) == 0 {
        let ring = layer.shape.ring as usize;
        let first = ring * random.random_range(0..2_usize);
        layer.window[first..first + ring].iter_mut().for_each(|row| row.data.fill(0x7F));
    }
    layer.form = *[QueryForm::Rotated, QueryForm::Rotated, QueryForm::Raw].choose(random).unwrap();
    let mixed = mixed(&layer, (which, entries), count, random);
    let what = format!("seed {seed}: {which:?}, {entries} entries, valid {:?}", mixed.is_valid);
    for &cluster in which.clusters() {
        layer.at_once = None;
        layer.blocks = Blocks::whole(cluster);
        let whole = comparable(layer.attend(&mixed.queries, which, &mixed.heads));
        check_alone(&layer, which, &mixed, (&whole.0, &whole.1), &what);
        let some = 8 * random.random_range(1..5);
        let more = [Blocks { multiprocessors: some, ..Blocks::whole(cluster) }];
        let consecutive = Blocks::of_own_rows(&layer.own).filter(|_| which == Which::Nothing);
        for blocks in Blocks::others(cluster).chain(more).chain(consecutive) {
            layer.blocks = blocks;
            // Spread queries have a single launch or none, so their memory may be for one query at a time.
            let at_once =
                if blocks.spread_clusters > 0 { 1 } else { random.random_range(1..=count as u32) };
            layer.at_once = *[None, Some(at_once)].choose(random).unwrap();
            let got = comparable(layer.attend(&mixed.queries, which, &mixed.heads));
            assert_same(&got, &whole, &format!("{what}, {blocks:?}, {:?} at once", layer.at_once));
        }
    }
}

fn mixed<B: Backend>(
    layer: &Layer<B>,
    (which, entries): (Which, usize),
    count: usize,
    random: &mut StdRng,
) -> Mixed {
    let is_valid: Vec<bool> = (0..count).map(|_| random.random()).collect();
    let has_own = !layer.own.is_empty();
    let queries = (0..count).map(|at| {
        let mut query = some_query((which, entries), random);
        if has_own {
            query.index = random.random_range(0..=(at as i32 + 1).min(query.position as i32));
        }
        if !is_valid[at] {
            invalidate(&mut query, at, has_own, random);
        }
        query
    });
    let queries: Vec<Query> = queries.collect();
    let mut heads = layer.random_heads(count, random.random());
    for (at, head) in heads.iter_mut().enumerate() {
        if !is_valid[at / layer.shape.heads as usize] {
            head.fill(*[0x7FC0, 0x7F80, 0xFFFF].choose(random).unwrap());
        } else if random.random_range(0..4) == 0 {
            spoil_head(head, 256.0, random);
        }
    }
    Mixed { queries, is_valid, heads }
}

/// A query that sees all entries, some, or none, and whose list may name entries that do not exist.
fn some_query((which, entries): (Which, usize), random: &mut StdRng) -> Query {
    let seen = *[entries, entries / 2, entries / 3, 1, 0].choose(random).unwrap();
    let slot = random.random_range(0..2);
    let seen_or_one = seen.max(usize::from(which != Which::Nothing));
    let mut query = query_of(which, seen_or_one, slot, random);
    if seen == 0 {
        query.position = random.random_range(0..WINDOW / 64);
    }
    let rows = if which == Which::List { entries } else { 0 };
    spoil_list(&mut query, rows, random);
    query
}

/// Turns a query into padding, or gives it a slot, a position or own rows that do not exist.
fn invalidate(query: &mut Query, at: usize, has_own: bool, random: &mut StdRng) {
    match random.random_range(0..if has_own { 7 } else { 5 }) {
        0 => query.slot = -1,
        1 => query.slot = 2,
        2 => query.slot = i32::MIN,
        3 => query.position = u32::MAX,
        4 => query.position = i32::MIN.cast_unsigned(),
        5 => query.index = at as i32 + 2,
        _ => query.index = *[-1, i32::MIN, i32::MAX].choose(random).unwrap(),
    }
}

/// Asserts that valid queries have the bits that they have alone, and that the results of the others are untouched.
fn check_alone<B: Backend>(
    layer: &Layer<B>,
    which: Which,
    mixed: &Mixed,
    (out, lse): (&[u16], &[u32]),
    what: &str,
) {
    let heads = layer.shape.heads as usize;
    let results = out.chunks(heads * 512).zip(lse.chunks(heads));
    for (at, (out, lse)) in results.enumerate() {
        if !mixed.is_valid[at] {
            let are_untouched = out.iter().all(|&bits| bits == CANARY_BF16);
            assert!(are_untouched && lse.iter().all(|&bits| bits == CANARY_F32), "{what}: {at}");
        } else if layer.own.is_empty() {
            // With own rows, the place of a query in the step decides which rows are its own, so it cannot run alone at
            // another place.
            let (query, head) = (&mixed.queries[at..=at], &mixed.heads[at * heads..][..heads]);
            let alone = comparable(layer.attend(query, which, head));
            assert!(alone.0 == out && alone.1 == lse, "{what}: {at} alone");
        }
    }
}
