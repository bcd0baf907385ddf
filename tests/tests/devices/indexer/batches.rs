//! A query has the same scores and the same list in every batch.

use dsv4_kv::device::{Backend, Device};
use dsv4_kv::ops::{
    self, EntrySelection, IndexQueries, KeyScores, Scores, StepQueries, maxima_len,
};
use kv_layout::index_row::IndexFormat;

use crate::indexer::query::CANARY;
use crate::indexer::scores::{Case, Layer, Step, sees};
use crate::inputs::{download, upload};

fn bits(values: Vec<f32>) -> Vec<u32> {
    values.into_iter().map(f32::to_bits).collect()
}

/// The bits of the scores, and the lists, of `count` queries from `from` on, which are scored in one launch.
fn selected<B: Backend>(
    layer: &Layer<B>,
    step: &Step<B>,
    case: &Case,
    (from, count): (u32, u32),
) -> [Vec<u32>; 2] {
    const K: u32 = 24;
    let stream = &layer.stream;
    let all = step.quantised();
    let of = |elements: u32| [from, count].map(|rows| u64::from(rows) * u64::from(elements));
    let [at, len] = of(IndexFormat::MAX_QUERY_BYTES);
    let query = &all.query.slice(at, len).unwrap();
    let [at, len] = of(case.heads);
    let weight = &all.weight.slice(at, len).unwrap();
    let quantised = &IndexQueries { query, weight, heads: case.heads };
    let queries = step.queries();
    let queries = &StepQueries { first: queries.first + from, count, ..queries };
    let columns = case.columns;
    let scores = &upload(stream, &vec![CANARY; (count * columns) as usize]);
    let maxima = &upload(stream, &vec![CANARY; count as usize * maxima_len(columns) as usize]);
    let to = &Scores { scores, maxima, columns };
    let (table, keys, faults) = (&step.table(), &layer.keys(), &upload(stream, &[0]));
    let skip = case.skip;
    let launch = KeyScores { queries, from: quantised, table, keys, skip, to, faults };

    // SAFETY: the arrays were uploaded before, in this stream, and nothing writes them again.
    unsafe { ops::index_score(stream, &launch) }.unwrap();
    let list = &upload(stream, &vec![0; (count * K) as usize]);

    // SAFETY: the arrays were uploaded before, in this stream, and nothing writes them again.
    unsafe { ops::index_topk(stream, &EntrySelection { queries, from: to, k: K, selected: list }) }
        .unwrap();
    let list = download(stream, list).into_iter().map(i32::cast_unsigned).collect();
    [bits(download(stream, scores)), list]
}

/// In every format of keys. There are so many queries that the blocks of the largest launch have several tiles.
pub fn scores_and_lists_have_the_same_bits<B: Backend>(device: &Device<B>) {
    const QUERIES: u32 = 40;
    for format in IndexFormat::ALL {
        let layer = Layer::new(device, format, (3, 12));
        let case = Case { heads: 16, columns: 384, skip: 0, format, fall: 0 };
        let entries = |i: i32| 1 + i * 37 % 383;
        let queries: Vec<(i32, i32)> =
            (0..QUERIES as i32).map(|i| (i % 3, sees(entries(i)))).collect();
        let step = layer.step(&queries, 0, &case);
        let whole = selected(&layer, &step, &case, (0, QUERIES));
        let width = whole.each_ref().map(|values| values.len() / QUERIES as usize);
        for (first, count) in [(0, 1), (39, 1), (5, 2), (8, 31), (0, 33), (7, 33)] {
            let part = selected(&layer, &step, &case, (first, count));
            for ((part, whole), width) in part.iter().zip(&whole).zip(width) {
                let range = first as usize * width..(first + count) as usize * width;
                assert_eq!(part[..], whole[range], "{format:?}: {count} queries from {first} on");
            }
        }
    }
}
