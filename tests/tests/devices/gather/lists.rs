//! `gather_entries`, `gather_all` and `count_entries` compared with the oracle, byte for byte, in both formats, for
//! entries of 4 tokens (32 per block) and of 128 tokens (one per block).

use std::num::NonZeroU32;

use dsv4_kv::device::{Backend, Device, DeviceError};
use dsv4_kv::ops::{self, BlockTable, Entries};
use dsv4_kv_oracle::compressor::visible;
use kv_layout::geometry::HEAD_DIM;
use kv_layout::main_row::{DATA_BYTES, MainFormat};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use crate::gather::pool::{PADDING, Pool, Query, Shape, Step};
use crate::inputs::{assert_same, download, upload};
use crate::refused::named;

/// Runs `test` for each row format and each number of entries per block.
fn each_shape(test: impl Fn(MainFormat, u32)) {
    for format in MainFormat::ALL {
        [32, 1].into_iter().for_each(|entries_per_block| test(format, entries_per_block));
    }
}

/// Lists of several lengths, with gaps and duplicates, for a part of a step with padding.
pub fn lists_equal_the_oracle<B: Backend>(device: &Device<B>) {
    each_shape(|format, entries_per_block| {
        let seen = [1, 32, 33, 70];
        let pool = Pool::scattered(device, format, entries_per_block, &seen);
        let last = |slot: usize| (slot as i32, pool.shape.position(seen[slot]));
        // The last query of a request that does not see the last entry, and the first that does.
        let before = (3, last(3).1 - pool.shape.ratio() as i32);
        let after = (3, before.1 + 1);
        let queries = [PADDING, last(0), before, after, PADDING, last(2), last(1), PADDING];
        let mut random = StdRng::seed_from_u64(4);
        for length in [1, 3, 16, 17, 64] {
            let lists: Vec<Vec<i32>> = queries[1..]
                .iter()
                .map(|&(_, position)| {
                    let seen = (position + 1) / pool.shape.ratio() as i32;
                    (0..length).map(|_| random.random_range(-1..seen)).collect()
                })
                .collect();
            assert_eq!(pool.check_lists(&queries, 1, &lists), 0);
        }
    });
}

/// Lists as long as those of the released model: permutations of entries, as the indexer gives them.
pub fn a_long_list_equals_the_oracle<B: Backend>(device: &Device<B>) {
    for (format, entries_per_block) in [(MainFormat::Ue8m0, 32), (MainFormat::F32, 1)] {
        let pool = Pool::scattered(device, format, entries_per_block, &[600, 300]);
        let queries = [(0, pool.shape.position(600)), (1, pool.shape.position(300))];
        let mut random = StdRng::seed_from_u64(5);
        let mut list = |seen: i32| {
            let mut list: Vec<i32> = (0..seen).collect();
            list.shuffle(&mut random);
            list.resize(512, -1);
            list
        };
        let lists = [list(600), list(300)];
        assert_eq!(pool.check_lists(&queries, 0, &lists), 0);
    }
}

/// Every kind of wrong index is counted once per row, every wrong slot once per query.
pub fn lists_count_what_they_refuse<B: Backend>(device: &Device<B>) {
    each_shape(|format, entries_per_block| {
        let mut pool = Pool::scattered(device, format, entries_per_block, &[70, 70, 70]);
        let per_block = entries_per_block as i32;
        let query = |slot| (slot, pool.shape.position(70));
        // Entry 70 lies in a block that exists, or one after the end of the table's row. The query sees neither.
        let early = (0, pool.shape.position(40));
        let queries = [
            query(0),
            early,
            query(3),
            query(i32::MAX),
            PADDING,
            query(1),
            query(2),
            (0, -1),
            (0, i32::MIN),
        ];
        pool.name(1, 0, -1);
        pool.name(1, 1, pool.shape.num_blocks as i32);
        pool.name(2, 0, i32::MAX);
        pool.name(2, 1, i32::MIN);
        let list = |start: [i32; 6]| {
            let mut list = start.to_vec();
            list.resize(18, 2 * per_block);
            list
        };
        let lists = [
            list([70, i32::MAX, 69, 0, i32::MIN, -1]),
            list([39, 40, 69, 38, -1, -7]),
            list([0; 6]),
            list([0; 6]),
            list([0; 6]),
            list([0, per_block, -1, per_block - 1, 0, 0]),
            list([0, per_block, -1, per_block - 1, 2 * per_block - 1, 0]),
            list([0; 6]),
            list([0; 6]),
        ];
        let early_too_far = if entries_per_block == 32 { 12 } else { 0 };
        let counts = [2, 2 + early_too_far, 1, 1, 0, 5, 5, 1, 1];
        for (at, (list, &count)) in lists.iter().zip(&counts).enumerate() {
            assert_eq!(pool.check_lists(&queries, at, std::slice::from_ref(list)), count, "{at}");
        }
        let total = pool.check_lists(&queries, 0, &lists);
        assert_eq!(total, counts.iter().sum::<u32>());
    });
}

/// A visible entry whose block lies after the end of the table's row is refused and not read.
pub fn a_table_that_is_too_narrow_is_counted<B: Backend>(device: &Device<B>) {
    each_shape(|format, entries_per_block| {
        let pool = Pool::scattered(device, format, entries_per_block, &[64, 64]);
        let width = pool.shape.max_blocks * entries_per_block;
        let queries = [(0, pool.shape.position(width + 9)), (1, pool.shape.position(width + 9))];
        let lists = [vec![width as i32, 63, 0], vec![1, width as i32 - 1, width as i32 + 8]];
        assert_eq!(pool.check_lists(&queries, 0, &lists), 3, "the second list meets a -1 as well");
    });
}

pub fn all_equals_the_oracle<B: Backend>(device: &Device<B>) {
    each_shape(|format, entries_per_block| {
        let seen = [1, 31, 32, 70];
        let pool = Pool::scattered(device, format, entries_per_block, &seen);
        let last = |slot: usize| (slot as i32, pool.shape.position(seen[slot]));
        let first = (3, last(3).1 + 1 - pool.shape.ratio() as i32);
        let queries = [last(1), PADDING, last(0), (2, 0), first, last(2), PADDING];
        for rows in [70, 71, 80, 97] {
            assert_eq!(pool.check_all(&queries, (1, 6), rows), 0);
        }
    });
}

pub fn all_counts_what_it_cannot_give<B: Backend>(device: &Device<B>) {
    each_shape(|format, entries_per_block| {
        let mut pool = Pool::scattered(device, format, entries_per_block, &[70, 70, 70]);
        let query = |slot| (slot, pool.shape.position(70));
        let queries = [query(0), query(3), PADDING, query(1), query(2), (0, -2)];
        for (rows, truncated) in [(1, 3), (16, 3), (33, 3), (69, 3), (70, 0)] {
            let got = pool.check_all(&queries, (0, 6), rows);
            assert_eq!(
                got,
                2 + truncated,
                "a wrong slot, a wrong position, and {truncated} that see more than {rows}"
            );
        }
        pool.name(1, 1, -1);
        pool.name(2, 0, pool.shape.num_blocks as i32);
        assert_eq!(pool.check_all(&queries, (0, 6), 70), 2 + 2 * entries_per_block);
    });
}

/// Requests of up to a million tokens, of which only a few blocks exist.
pub fn far_positions_equal_the_oracle<B: Backend>(device: &Device<B>) {
    each_shape(|format, entries_per_block| {
        let max_blocks = 8192;
        let shape = Shape { format, entries_per_block, num_blocks: 5, slots: 2, max_blocks };
        let mut pool = Pool::new(device, shape);
        let blocks = [(0, 8191, 3), (0, 0, 4), (1, 4095, 0), (1, 4096, 2), (1, 8190, 1)];
        blocks.into_iter().for_each(|(slot, logical, block)| pool.place(slot, logical, block));
        let per_block = entries_per_block as i32;
        let end = 1_048_576;
        let last = end / shape.ratio() as i32 - 1;
        let queries = [(0, end - 1), (1, end - 1), (1, end - 2)];
        let lists = [
            [last, last + 1 - per_block, 0, per_block - 1, -1],
            [4096 * per_block, 4096 * per_block - 1, 8190 * per_block, last - per_block, -1],
            // One token earlier: the query does not see the last entry.
            [4096 * per_block, last, 8191 * per_block - 1, -1, -1],
        ]
        .map(Vec::from);
        assert_eq!(pool.check_lists(&queries, 0, &lists), 1);
        check_entry_counts(&pool, &queries);
    });
}

pub fn entry_counts_equal_the_oracle<B: Backend>(device: &Device<B>) {
    each_shape(|format, entries_per_block| {
        let pool = Pool::scattered(device, format, entries_per_block, &[1]);
        let position = |p: i32| match p % 7 {
            5 => PADDING,
            6 => (p % 3, -p),
            _ => (p % 3, p),
        };
        check_entry_counts(&pool, &(0..300).map(position).collect::<Vec<_>>());
    });
}

/// Compares the numbers of entries of the queries from 1 on with the oracle.
fn check_entry_counts<B: Backend>(pool: &Pool<B>, queries: &[Query]) {
    let stream = &pool.stream;
    let step = Step::new(stream, queries);
    let count = queries.len() - 1;
    let lengths = upload(stream, &vec![-9_i32; count + 1]);
    let ratio = pool.shape.ratio();
    let nonzero = NonZeroU32::new(ratio).unwrap();
    ops::count_entries(
        stream,
        &ops::EntryCounts { queries: &step.queries(1, count), ratio: nonzero, lengths: &lengths },
    )
    .unwrap();
    let want = |&(slot, position): &Query| {
        if slot < 0 || position < 0 { 0 } else { visible(position as usize, ratio as usize) as i32 }
    };
    let mut want: Vec<i32> = queries[1..].iter().map(want).collect();
    want.push(-9);
    assert_same(&download(stream, &lengths), &want, &format!("ratio {ratio}"));
}

/// A pool of more than 4 GiB: its first and last blocks, and those around 2 and 4 GiB.
pub fn a_pool_over_4_gib_equals_the_oracle<B: Backend>(device: &Device<B>) {
    each_shape(|format, entries_per_block| {
        let block_bytes = u64::from(entries_per_block) * DATA_BYTES;
        let num_blocks = ((1 << 32) / block_bytes + 9) as u32;
        let around = |bytes: u64| [-1, 0, 1].map(|by| (bytes / block_bytes) as i32 + by);
        let blocks = [vec![0], around(1 << 31).to_vec(), around(1 << 32).to_vec()].concat();
        let blocks = [blocks, vec![num_blocks as i32 - 1]].concat();
        let max_blocks = blocks.len() as u32;
        let shape = Shape { format, entries_per_block, num_blocks, slots: 1, max_blocks };
        let mut pool = Pool::new(device, shape);
        for (logical, &block) in blocks.iter().enumerate() {
            pool.place(0, logical as u32, block);
        }
        let entries = max_blocks * entries_per_block;
        let queries = [(0, shape.position(entries))];
        assert_eq!(pool.check_all(&queries, (0, 1), entries as usize), 0);
        let list = (0..entries as i32).rev().collect();
        assert_eq!(pool.check_lists(&queries, 0, &[list]), 0);
    });
}

pub fn wrong_shapes_are_refused<B: Backend>(device: &Device<B>) {
    let pool = Pool::scattered(device, MainFormat::Ue8m0, 32, &[40]);
    let stream = &pool.stream;
    let step = Step::new(stream, &[(0, 160), PADDING]);
    let (queries, tile) = (step.queries(0, 2), pool.tile(2, 4));
    let words = upload(stream, &[0_i32; 8]);
    let kv = |queries: &_, selected: &_, rows, table: &_, entries: &_, tile: &_| {
        ops::gather_entries(
            stream,
            &ops::EntryGather { queries, rows, table, entries, tile, faults: &pool.faults },
            selected,
        )
    };
    let (table, entries) = (pool.table(), pool.entries());
    kv(&queries, &words, 4, &table, &entries, &tile).unwrap();
    let short_tile = tile.slice(0, 8 * u64::from(HEAD_DIM) - 1).unwrap();
    let short_words = words.slice(0, 7).unwrap();
    let short_data = pool.data.slice(0, pool.data.len() - 1).unwrap();
    let short_scale = pool.scale.slice(0, pool.scale.len() - 1).unwrap();
    let wide = BlockTable { max_blocks: table.max_blocks + 1, ..pool.table() };
    let lengths = |result| match result {
        Err(DeviceError::TooShort { argument, .. }) => argument,
        other => panic!("{other:?}"),
    };
    let refused = [
        (kv(&step.queries(1, 2), &words, 4, &table, &entries, &tile), "token_position"),
        (kv(&queries, &short_words, 4, &table, &entries, &tile), "selected"),
        (kv(&queries, &words, 4, &wide, &entries, &tile), "table"),
        (
            kv(
                &queries,
                &words,
                4,
                &table,
                &Entries { data: &short_data, ..pool.entries() },
                &tile,
            ),
            "entry_data",
        ),
        (
            kv(
                &queries,
                &words,
                4,
                &table,
                &Entries { scale: &short_scale, ..pool.entries() },
                &tile,
            ),
            "entry_scale",
        ),
        (kv(&queries, &words, 4, &table, &entries, &short_tile), "tile"),
        (
            ops::gather_all(
                stream,
                &ops::EntryGather {
                    queries: &queries,
                    rows: 4,
                    table: &table,
                    entries: &entries,
                    tile: &short_tile,
                    faults: &pool.faults,
                },
                &words,
            ),
            "tile",
        ),
        (
            ops::gather_all(
                stream,
                &ops::EntryGather {
                    queries: &queries,
                    rows: 4,
                    table: &table,
                    entries: &entries,
                    tile: &tile,
                    faults: &pool.faults,
                },
                &words.slice(0, 1).unwrap(),
            ),
            "lengths",
        ),
        (
            ops::count_entries(
                stream,
                &ops::EntryCounts {
                    queries: &queries,
                    ratio: NonZeroU32::MIN,
                    lengths: &words.slice(0, 1).unwrap(),
                },
            ),
            "lengths",
        ),
    ];
    for (result, what) in refused {
        assert_eq!(lengths(result), what);
    }
    let far = kv(&step.queries(u32::MAX as usize, 2), &words, 4, &table, &entries, &tile);
    assert_eq!(named(far), "first + count of queries");
    let no_rows = kv(&queries, &words, 0, &table, &entries, &tile);
    assert!(matches!(no_rows, Err(DeviceError::BadGrid { x: 0, .. })), "{no_rows:?}");
    for entries_per_block in [0, 3, 256] {
        let entries = Entries { entries_per_block, ..pool.entries() };
        let result = kv(&queries, &words, 4, &table, &entries, &tile);
        assert!(matches!(result, Err(DeviceError::NotADivisor { .. })), "{result:?}");
    }
}
