//! `topk_select` compared with a stable sort, and on the golden scores.

use dsv4_kv::device::{Backend, Device, DeviceError};
use dsv4_kv::ops::{self, EntrySelection, Scores, StepQueries, maxima_len};
use dsv4_kv_oracle::indexer::top_k;
use dsv4_kv_tests::golden;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::indexer::scores::sees;
use crate::inputs::{assert_same, download, upload};
use crate::refused::named;

/// The lists of rows of scores of any lengths. Asserts that nothing after the lists was written.
fn select<B: Backend>(
    device: &Device<B>,
    rows: &[Vec<f32>],
    columns: u32,
    k: u32,
) -> Vec<Vec<i32>> {
    const CANARY: i32 = -77;
    let stream = device.stream().unwrap();
    let padded = rows.iter().flat_map(|row| {
        // Elements after the end of a row: they would win if the kernel read them.
        let behind = std::iter::repeat_n(f32::INFINITY, columns as usize - row.len());
        row.iter().copied().chain(behind)
    });
    let scores = upload(&stream, &padded.collect::<Vec<_>>());
    let maxima = device.allocate("maxima", rows.len() as u64 * maxima_len(columns)).unwrap();
    let lengths: Vec<i32> = rows.iter().map(|row| row.len() as i32).collect();
    let lengths = upload(&stream, &lengths);
    let selected = upload(&stream, &vec![CANARY; rows.len() * k as usize + 1]);
    let from = Scores { scores: &scores, maxima: &maxima, columns };

    // SAFETY: the arrays were uploaded before, in this stream, and nothing writes them again.
    unsafe {
        ops::topk_select(
            &stream,
            &ops::RowSelection {
                from: &from,
                lengths: &lengths,
                rows: rows.len() as u32,
                k,
                selected: &selected,
            },
        )
    }
    .unwrap();
    let lists = download(&stream, &selected);
    assert_eq!(lists[lists.len() - 1], CANARY, "behind the lists");
    lists.chunks_exact(k as usize).map(<[i32]>::to_vec).collect()
}

fn check<B: Backend>(device: &Device<B>, rows: &[Vec<f32>], columns: u32, k: u32) {
    let lists = select(device, rows, columns, k);
    for (at, (row, list)) in rows.iter().zip(&lists).enumerate() {
        let what = format!("row {at} of {} scores in {columns} columns, k {k}", row.len());
        assert_same(list, &top_k(row, k as usize), &what);
    }
}

/// Number of kinds of rows; see [`row`].
const KINDS: u32 = 11;

/// A row of `length` scores. Each kind makes some selection algorithm go wrong.
fn row(kind: u32, length: usize, random: &mut StdRng) -> Vec<f32> {
    let special =
        [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN, 0.0, -0.0, f32::MAX, 1e-42, -1e-42];
    let mut one = |at: usize| match kind {
        // Any value, one of 40 values, one of two, one.
        0 => random.random_range(-1.0..1.0),
        1 => f32::from(random.random_range(-20_i8..20)),
        2 => f32::from(random.random_range(0_u8..2)),
        3 => 0.0,
        // Ascending and descending: the whole list lies in one group, or in one thread.
        4 => at as f32,
        5 => -(at as f32),
        // Any bits, special values alone, mostly NaN.
        6 => f32::from_bits(random.random()),
        7 => special[random.random_range(0..special.len())],
        8 => {
            if random.random_ratio(1, 50) {
                random.random()
            } else {
                f32::NAN
            }
        }
        // Numbers between -1 and 1, and sometimes an infinity, a NaN or a zero: the finite values keep their range.
        9 => {
            if random.random_ratio(1, 50) {
                special[random.random_range(0..6)]
            } else {
                random.random_range(-1.0..1.0)
            }
        }
        // Many equal scores just where the list ends.
        _ => (random.random_range(-3.0..3.0_f32)).min(2.9),
    };
    (0..length).map(&mut one).collect()
}

/// Rows of every kind, and of any length up to each number of columns: rows that are read whole, rows that are filtered
/// by maxima of groups of 8 and of 32, and rows with more equal scores than fit a bin.
pub fn lists_equal_a_stable_sort<B: Backend>(device: &Device<B>) {
    let on_gpu = device.info().sm.is_some();
    let mut random = StdRng::seed_from_u64(1);
    // The emulator takes every third row; with three rounds each kind comes once.
    for (columns, rounds) in [(32, 8), (512, 8), (2048, 4), (4096, 3), (4128, 3), (16_384, 3)] {
        let (rounds, every) = if on_gpu { (8 * rounds, 1) } else { (rounds, 3) };
        for k in [1, 6, 64, 512, 1024, 2048] {
            let kinds = (0..KINDS * rounds).step_by(every).map(|at| at % KINDS);
            let rows: Vec<_> = kinds
                .enumerate()
                .map(|(at, kind)| {
                    let shortest = if at % 3 == 0 { 0 } else { columns * 7 / 8 };
                    let length = random.random_range(shortest..=columns) as usize;
                    row(kind, length, &mut random)
                })
                .collect();
            check(device, &rows, columns, k);
        }
    }
}

/// The longest rows, of the kinds that take different paths through the selection.
pub fn long_rows_equal_a_stable_sort<B: Backend>(device: &Device<B>) {
    let on_gpu = device.info().sm.is_some();
    let mut random = StdRng::seed_from_u64(2);
    for (columns, k) in
        [(32_768, 1024), (65_536, 2048), (65_568, 512), (1 << 18, 512), (1 << 18, 1)]
    {
        // Any value, any bits, mostly NaN, and numbers with a few special values.
        let kinds = if on_gpu { (0..KINDS).collect() } else { vec![0, 6, 8, 9] };
        let rows: Vec<_> = kinds
            .into_iter()
            .map(|kind| {
                let length = columns as usize - 13 * (kind as usize % 3);
                row(kind, length, &mut random)
            })
            .collect();
        check(device, &rows, columns, k);
    }
}

/// Rows that use few of many columns, as those of a captured step do. Some have fewer groups of 32 than the list is
/// long, or few more.
pub fn short_uses_of_long_rows_equal_a_stable_sort<B: Backend>(device: &Device<B>) {
    let mut random = StdRng::seed_from_u64(4);
    for k in [512, 1024, 2048] {
        let lengths = [0, 1, 4096, 4097, 16_384, 20_001, 32_769, 65_535, 65_536, 65_537];
        let rows: Vec<_> = lengths.iter().map(|&length| row(0, length, &mut random)).collect();
        check(device, &rows, 1 << 18, k);
    }
}

/// As many equal scores as a bin may have, one fewer and one more: at the top, inside the list, and where it ends.
pub fn crowds_equal_a_stable_sort<B: Backend>(device: &Device<B>) {
    let mut random = StdRng::seed_from_u64(5);
    for columns in [2048, 4096, 32_768] {
        let mut rows = Vec::new();
        for equal in [126, 127, 128, 129, 1000] {
            for rank in [0, 300, 512 - 64, 512, 700] {
                let mut scores = row(0, columns as usize, &mut random);
                let mut sorted = scores.clone();
                sorted.sort_unstable_by(|a, b| b.total_cmp(a));
                for score in &mut scores {
                    let above = sorted.partition_point(|other| *other > *score);
                    if (rank..rank + equal).contains(&above) {
                        *score = sorted[rank];
                    }
                }
                rows.push(scores);
            }
        }
        check(device, &rows, columns, 512);
    }
}

/// So many queries, most of them padding, that multiprocessors take several: rows that are read whole, read twice, and
/// filtered by maxima of groups of 8 and of 32, and rows with more equal scores than fit a bin.
pub fn lists_of_many_queries_equal_a_stable_sort<B: Backend>(device: &Device<B>) {
    const QUERIES: usize = 265;
    let stream = device.stream().unwrap();
    let mut random = StdRng::seed_from_u64(6);
    // The last but one has the most groups, and those of the last are longer.
    for (columns, k) in [(4096, 6), (8192, 512), (8192, 2048), (65_536, 600), (65_568, 1024)] {
        let rows = Vec::from_iter((0..KINDS).map(|kind| {
            let length = if kind == 1 { k } else { columns - 13 * kind };
            row(kind, length as usize, &mut random)
        }));
        let padding = QUERIES - rows.len();
        let mut slot = vec![0; rows.len()];
        slot.extend(vec![-1; padding]);
        let position = slot
            .iter()
            .enumerate()
            .map(|(at, _)| sees(rows.get(at).map_or(0, |row| row.len() as i32)));
        let (position, slot) = (upload(&stream, &Vec::from_iter(position)), upload(&stream, &slot));
        let mut scores = vec![f32::INFINITY; QUERIES * columns as usize];
        let groups = maxima_len(columns) as usize;
        let mut maxima = vec![f32::INFINITY; QUERIES * groups];
        for (at, row) in rows.iter().enumerate() {
            scores[at * columns as usize..][..row.len()].copy_from_slice(row);
            for (group, scores) in row.chunks(columns as usize / groups).enumerate() {
                let largest = scores.iter().copied().fold(f32::NAN, f32::max);
                maxima[at * groups + group] = largest;
            }
        }
        let (scores, maxima) = (upload(&stream, &scores), upload(&stream, &maxima));
        let from = &Scores { scores: &scores, maxima: &maxima, columns };
        let selected = &upload(&stream, &vec![-77; QUERIES * k as usize]);
        let (position, slot) = (&position, &slot);
        let queries = &StepQueries { position, slot, index: slot, first: 0, count: QUERIES as u32 };
        // SAFETY: the arrays were uploaded before, in this stream, and nothing writes them again.
        unsafe { ops::index_topk(&stream, &EntrySelection { queries, from, k, selected }) }
            .unwrap();
        let lists = download(&stream, selected);
        for (at, list) in lists.chunks_exact(k as usize).enumerate() {
            let all = |row: &Vec<f32>| {
                Vec::from_iter((0..k as i32).map(|i| if i < row.len() as i32 { i } else { -1 }))
            };
            let wanted = match rows.get(at) {
                Some(row) if row.len() > k as usize => top_k(row, k as usize),
                Some(row) => all(row),
                None => vec![-1; k as usize],
            };
            assert_same(list, &wanted, &format!("row {at} of {columns} columns, k {k}"));
        }
    }
}

/// A query that sees more entries than a row has columns, and more than its list is long: the row, none of which was
/// scored, is listed in order.
pub fn rows_shorter_than_lists_are_listed_in_order<B: Backend>(device: &Device<B>) {
    const K: u32 = 64;
    let stream = device.stream().unwrap();
    let (position, slot) = (&upload(&stream, &[sees(100)]), &upload(&stream, &[0]));
    let rising = Vec::from_iter((0..32).map(|i| i as f32));
    let (scores, maxima) = (upload(&stream, &rising), upload(&stream, &[31.0; 4]));
    let from = &Scores { scores: &scores, maxima: &maxima, columns: 32 };
    let selected = &upload(&stream, &[-77; K as usize]);
    let queries = &StepQueries { position, slot, index: slot, first: 0, count: 1 };
    // SAFETY: the arrays were uploaded before, in this stream, and nothing writes them again.
    unsafe { ops::index_topk(&stream, &EntrySelection { queries, from, k: K, selected }) }.unwrap();
    let wanted = Vec::from_iter((0..K as i32).map(|i| if i < 32 { i } else { -1 }));
    assert_same(&download(&stream, selected), &wanted, "the list");
}

/// A hundred thousand rows, on the CPU only by hand: most of at most 2,048 scores, 5,000 of up to 32,768, and a hundred
/// of up to 262,144.
pub fn very_many_rows_equal_a_stable_sort<B: Backend>(device: &Device<B>) {
    let mut random = StdRng::seed_from_u64(3);
    for round in 0..404 {
        let (tiles, rows) = match round {
            400.. => (1 << 13, 25),
            _ if round % 20 == 0 => (1 << 10, 250),
            _ => (1 << 6, 250),
        };
        let columns = 32 * random.random_range(1..=tiles);
        let k = random.random_range(1..=2048);
        let rows: Vec<_> = (0..rows)
            .map(|at| {
                let length = random.random_range(0..=columns) as usize;
                row(at % KINDS, length, &mut random)
            })
            .collect();
        check(device, &rows, columns, k);
    }
}

/// The golden scores give the golden lists, exactly.
pub fn golden_scores_give_the_golden_lists<B: Backend>(device: &Device<B>) {
    let long = golden::load::<f32>("idxlong_score").unwrap().data;
    let wanted = golden::load::<i32>("idxlong_topk").unwrap().data;
    assert_eq!(select(device, &[long], 1024, 512)[0], wanted);
    let scores = golden::load::<f32>("idx_score_fp32").unwrap();
    let wanted = golden::load::<i32>("idx_topk").unwrap();
    let visible = |(token, row): (usize, &[f32])| row[..(token + 1) / 4].to_vec();
    let rows: Vec<_> = scores.rows().enumerate().map(visible).collect();
    assert_eq!(select(device, &rows, 32, 4).concat(), wanted.data);
}

/// Sizes that the kernels do not support are refused by name.
pub fn wrong_sizes_are_refused<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let scores = device.allocate("scores", 64).unwrap();
    let maxima = device.allocate("maxima", 8).unwrap();
    let (lengths, selected) = (upload(&stream, &[0]), upload(&stream, &[0; 4]));
    let run = |columns, rows, k| {
        let from = Scores { scores: &scores, maxima: &maxima, columns };

        // SAFETY: the arrays were uploaded before, in this stream, and nothing writes them again.
        unsafe {
            ops::topk_select(
                &stream,
                &ops::RowSelection { from: &from, lengths: &lengths, rows, k, selected: &selected },
            )
        }
    };
    run(64, 1, 4).unwrap();
    run(64, 0, 4).unwrap();
    for (columns, rows, k, what) in [
        (0, 1, 4, "columns of scores"),
        (33, 1, 4, "columns of scores"),
        (1 << 19, 1, 4, "columns of scores"),
        (64, 1, 0, "indices of a list"),
        (64, 1, 2049, "indices of a list"),
        (96, 1, 4, "scores"),
        (64, 2, 4, "scores"),
        (64, 1, 5, "selected"),
    ] {
        assert_eq!(named(run(columns, rows, k)), what, "{columns} columns, {rows} rows, {k}");
    }
}

/// Long rows take two launches. Neither is queued if the second would be refused.
pub fn a_refused_selection_writes_no_maxima<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let (scores, lengths) = (upload(&stream, &[1.0; 8192]), upload(&stream, &[8192]));
    let maxima = upload(&stream, &[7.0; 1024]);
    let from = Scores { scores: &scores, maxima: &maxima, columns: 8192 };
    let run = |len| {
        let selected = device.allocate("lists", len).unwrap();
        let (from, lengths, selected) = (&from, &lengths, &selected);

        // SAFETY: the arrays were uploaded before, in this stream, and nothing writes them again.
        unsafe {
            ops::topk_select(&stream, &ops::RowSelection { from, lengths, rows: 1, k: 4, selected })
        }
    };
    let refused = run(3).unwrap_err();
    assert!(matches!(refused, DeviceError::TooShort { argument: "selected", .. }), "{refused}");
    assert_same(&download(&stream, &maxima), &[7.0; 1024], "maxima");
    run(4).unwrap();
    assert_same(&download(&stream, &maxima), &[1.0; 1024], "maxima");
}
