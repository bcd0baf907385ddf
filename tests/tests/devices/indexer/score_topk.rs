//! Scores and lists in one launch, compared with a stable sort of the scores of another launch.

use dsv4_kv::device::{Backend, Device};
use dsv4_kv::ops::{self, IndexKeys, Scores, maxima_len};
use dsv4_kv_oracle::compressor::visible;
use dsv4_kv_oracle::indexer::top_k;
use kv_layout::index_row::IndexFormat;

use crate::indexer::scores::{Case, Layer, sees};
use crate::inputs::{assert_same, download, upload};
use crate::refused::named;

const CANARY: i32 = -77;

/// Lists the `case.skip` best entries of each query (slot, position), and compares the lists with those of the oracle
/// for the scores that `index_score` computes. Returns the count of the fault word, which must be equal for both.
fn check<B: Backend>(layer: &Layer<B>, queries: &[(i32, i32)], first: usize, case: &Case) -> u32 {
    let Layer { stream, .. } = layer;
    let Case { columns, skip: k, .. } = *case;
    let step = layer.step(queries, first, case);
    let (from, table, keys) = (step.quantised(), step.table(), layer.keys());

    let rows = u64::from(step.count);
    let scores = stream.device().allocate("scores", rows * u64::from(columns)).unwrap();
    let maxima = stream.device().allocate("maxima", rows * maxima_len(columns)).unwrap();
    let to = Scores { scores: &scores, maxima: &maxima, columns };
    let counted = [upload(stream, &[0]), upload(stream, &[0])];

    layer.score(&step, k, &to, &counted[0]);

    let len = (step.count * k) as usize;
    let selected = upload(stream, &vec![CANARY; len + 1]);

    // SAFETY: the arrays were uploaded before, in this stream, and nothing writes them again.
    unsafe {
        ops::index_score_topk(
            stream,
            &ops::ScoreSelection {
                queries: &step.queries(),
                from: &from,
                table: &table,
                keys: &keys,
                columns,
                k,
                selected: &selected,
                faults: &counted[1],
            },
        )
    }
    .unwrap();

    let (scores, lists) = (download(stream, &scores), download(stream, &selected));
    assert_eq!(lists[len], CANARY, "behind the lists");
    let (columns, k) = (columns as usize, k as usize);
    for (row, &(slot, position)) in queries[first..].iter().enumerate() {
        let slots = table.slots as i32;
        let exists = (0..slots).contains(&slot) && position >= 0;
        let seen = if exists { visible(position as usize, 4) } else { 0 };
        let seen = seen.min(columns);
        let want = if seen <= k {
            let all = (0..seen as i32).chain(std::iter::repeat(-1));
            all.take(k).collect()
        } else {
            top_k(&scores[row * columns..][..seen], k)
        };
        let what = format!("query {row} of {seen} entries, k {k}");
        assert_same(&lists[row * k..][..k], &want, &what);
    }
    let [of_scores, of_lists] = counted.map(|word| download(stream, &word)[0]);
    assert_eq!(of_lists, of_scores, "faults");
    of_lists
}

/// Queries of several requests: full and partial tiles; fewer entries than the list is long, and one more; padding; and
/// a missing block, whose entries come last.
pub fn lists_equal_a_stable_sort<B: Backend>(device: &Device<B>) {
    let format = IndexFormat::Mxfp4;
    let mut layer = Layer::new(device, format, (3, 5));
    let queries = [
        (0, 9),
        (1, sees(24)),
        (2, sees(70)),
        (-1, -1),
        (0, sees(160)),
        (1, sees(25)),
        (2, sees(129)),
        (0, 0),
    ];
    let case = |k| Case { heads: 64, columns: 160, skip: k, format, fall: 0 };
    assert_eq!(check(&layer, &queries, 1, &case(24)), 0);
    assert_eq!(check(&layer, &queries, 0, &case(1)), 0);
    let short = Case { columns: 32, ..case(64) };
    assert_eq!(check(&layer, &[(2, sees(100))], 0, &short), 1, "it sees more than a row has");
    layer.table[11] = -1;
    assert_eq!(check(&layer, &queries, 0, &case(60)), 2, "a tile of two queries");
    assert_eq!(check(&layer, &queries, 0, &case(128)), 1, "a tile of one");
}

/// Rows of the maximum length, so that warps take several tiles in turn.
pub fn long_rows_equal_a_stable_sort<B: Backend>(device: &Device<B>) {
    let format = IndexFormat::Mxfp4;
    let layer = Layer::new(device, format, (1, 64));
    let queries = [(0, sees(2048)), (0, sees(1990))];
    for k in [7, 512, 1989] {
        let case = Case { heads: 4, columns: 2048, skip: k, format, fall: 0 };
        assert_eq!(check(&layer, &queries, 0, &case), 0);
    }
}

/// Hundreds of equal scores: up to as many as a bin holds, and more, which are searched digit by digit.
pub fn crowds_equal_a_stable_sort<B: Backend>(device: &Device<B>) {
    let format = IndexFormat::Mxfp4;
    for distinct in [1, 3, 7, 40] {
        let mut layer = Layer::new(device, format, (1, 22));
        let keys: Vec<_> = layer.encoded[..distinct].to_vec();
        let cycled = keys.into_iter().cycle();
        layer.encoded.iter_mut().zip(cycled).for_each(|(key, same)| *key = same);
        layer.upload_keys();
        let case = Case { heads: 4, columns: 704, skip: 300, format, fall: 0 };
        assert_eq!(check(&layer, &[(0, sees(700)), (0, sees(301))], 0, &case), 0);
    }
}

/// Queries whose groups have scales too far apart for integers, so that all tiles are scored a second time.
pub fn distant_queries_equal_a_stable_sort<B: Backend>(device: &Device<B>) {
    let format = IndexFormat::Mxfp4;
    let layer = Layer::new(device, format, (1, 9));
    let case = Case { heads: 20, columns: 288, skip: 100, format, fall: 9 };
    assert_eq!(check(&layer, &[(0, sees(280))], 0, &case), 0);
}

/// A slot that does not exist gets an empty list. A query that sees more entries than a row holds gets a list of those
/// that fit. Both are counted. Numbers that do not fit are refused by name.
pub fn bad_input_is_refused<B: Backend>(device: &Device<B>) {
    let format = IndexFormat::Mxfp4;
    let layer = Layer::new(device, format, (2, 4));
    let case = |columns, skip| Case { heads: 16, columns, skip, format, fall: 0 };
    let queries = [(0, sees(40)), (2, sees(64)), (i32::MAX, sees(9)), (1, sees(96))];
    assert_eq!(check(&layer, &queries, 0, &case(96, 20)), 2, "two slots");
    assert_eq!(check(&layer, &queries, 0, &case(64, 20)), 3, "one query sees too much");
    let negative = [(0, -1), (1, -2), (0, i32::MIN), (1, sees(30))];
    assert_eq!(check(&layer, &negative, 0, &case(64, 20)), 0, "they see nothing");

    let Layer { stream, .. } = &layer;
    let step = layer.step(&queries, 0, &case(64, 20));
    let num_blocks = layer.keys().num_blocks;
    let faults = device.allocate("fault word", 1).unwrap();
    let selected = device.allocate("lists", 4 * 2048).unwrap();
    let list = |columns, k, keys: IndexKeys<'_, B>, len| {
        let selection = ops::ScoreSelection {
            queries: &step.queries(),
            from: &step.quantised(),
            table: &step.table(),
            keys: &keys,
            columns,
            k,
            selected: &selected.slice(0, len).unwrap(),
            faults: &faults,
        };

        // SAFETY: the arrays were uploaded before, in this stream, and nothing writes them again.
        unsafe { ops::index_score_topk(stream, &selection) }
    };
    let blocks = |num_blocks| IndexKeys { num_blocks, ..layer.keys() };
    list(2048, 2048, layer.keys(), 4 * 2048).unwrap();
    let fp8 = IndexKeys { format: IndexFormat::Fp8, ..layer.keys() };
    for (columns, k, keys, len, what) in [
        (0, 20, layer.keys(), 4 * 20, "columns of scores in one launch"),
        (48, 20, layer.keys(), 4 * 20, "columns of scores in one launch"),
        (2080, 20, layer.keys(), 4 * 20, "columns of scores in one launch"),
        (64, 0, layer.keys(), 4 * 20, "indices of a list"),
        (64, 2049, layer.keys(), 4 * 20, "indices of a list"),
        (64, 20, blocks(0), 4 * 20, "blocks of indexer keys"),
        (64, 20, fp8, 4 * 20, "bytes of an indexer key"),
        (64, 20, blocks(num_blocks + 1), 4 * 20, "index_code"),
        (64, 20, layer.keys(), 4 * 20 - 1, "selected"),
    ] {
        assert_eq!(named(list(columns, k, keys, len)), what, "{columns} columns, {k} of a list");
    }
}
