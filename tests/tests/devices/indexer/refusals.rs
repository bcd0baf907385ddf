//! Numbers out of range in the launches of the indexer.

use dsv4_kv::device::{Backend, Buffer, Device, DeviceError};
use dsv4_kv::ops::{
    self, BlockTable, EntrySelection, IndexKeys, IndexQueries, KeyScores, QueryQuantisation,
    Scores, StepQueries, maxima_len,
};
use kv_layout::index_row::IndexFormat;

use crate::inputs::{filled, upload};
use crate::refused::named;

/// Memory for everything that the launches read and write. The contents do not matter; there is more than any launch
/// needs.
struct Memory<B: Backend> {
    words: Buffer<B, i32>,
    weights: Buffer<B, f32>,
    projected: Buffer<B, f32>,
    bytes: Buffer<B, u8>,
    query: Buffer<B, u8>,
    query_weights: Buffer<B, f32>,
    scores: Buffer<B, f32>,
    maxima: Buffer<B, f32>,
    selected: Buffer<B, i32>,
    faults: Buffer<B, u32>,
}

/// The numbers of a launch with one query.
#[derive(Clone, Copy)]
struct Numbers {
    first: u32,
    heads: u32,
    columns: u32,
    /// Length of a list.
    k: u32,
    blocks: u32,
}

const FORMAT: IndexFormat = IndexFormat::Mxfp4;

impl<B: Backend> Memory<B> {
    fn new(device: &Device<B>) -> Self {
        let stream = &device.stream().unwrap();
        Self {
            words: upload(stream, &[0; 2]),
            weights: filled(stream, 128),
            projected: filled(stream, 1 << 14),
            bytes: filled(stream, 1 << 16),
            query: filled(stream, 1 << 16),
            query_weights: filled(stream, 128),
            scores: filled(stream, 1 << 18),
            maxima: filled(stream, maxima_len(1 << 18) as usize),
            selected: filled(stream, 2048),
            faults: upload(stream, &[0]),
        }
    }

    /// Runs `index_query`, `index_score` and `index_topk` with these numbers.
    fn run(&self, device: &Device<B>, numbers: Numbers) -> [Result<(), DeviceError>; 3] {
        let Numbers { first, heads, columns, k, blocks: num_blocks } = numbers;
        let Self { words, weights, bytes, scores, maxima, faults, selected, .. } = self;
        let stream = &device.stream().unwrap();
        let (position, slot, index) = (words, words, words);
        let queries = &StepQueries { position, slot, index, first, count: 1 };
        let to = &IndexQueries { query: &self.query, weight: &self.query_weights, heads };
        let quantisation = QueryQuantisation {
            queries,
            projected: &self.projected,
            projected_weight: weights,
            frequencies: weights,
            format: FORMAT,
            to,
        };
        let (code, scale, format) = (bytes, bytes, FORMAT);
        let keys = &IndexKeys { code, scale, format, hadamard: true, num_blocks };
        let table = &BlockTable { table: words, slots: 1, max_blocks: 1 };
        let rows = &Scores { scores, maxima, columns };
        let of_keys = KeyScores { queries, from: to, table, keys, skip: 0, to: rows, faults };
        let lists = EntrySelection { queries, from: rows, k, selected };
        [
            ops::index_query(stream, &quantisation),
            // SAFETY: the arrays were uploaded before, in this stream, and nothing writes them again.
            unsafe { ops::index_score(stream, &of_keys) },
            // SAFETY: the arrays were uploaded before, in this stream, and nothing writes them again.
            unsafe { ops::index_topk(stream, &lists) },
        ]
    }
}

/// Each of the three launches refuses each of its numbers that is out of range by its name, and ignores the numbers of
/// the other launches.
pub fn numbers_out_of_range_are_refused_by_name<B: Backend>(device: &Device<B>) {
    let memory = Memory::new(device);
    let allowed = Numbers { first: 1, heads: 64, columns: 1 << 18, k: 2048, blocks: 1 };
    let (queries, heads) = (Some("first + count of queries"), Some("indexer heads"));
    let (columns, k) = (Some("columns of scores"), Some("indices of a list"));
    let blocks = Some("blocks of indexer keys");
    for (numbers, refused) in [
        (allowed, [None; 3]),
        (Numbers { first: u32::MAX, ..allowed }, [queries; 3]),
        (Numbers { heads: 0, ..allowed }, [heads, heads, None]),
        (Numbers { heads: 65, ..allowed }, [heads, heads, None]),
        (Numbers { columns: 0, ..allowed }, [None, columns, columns]),
        (Numbers { columns: 33, ..allowed }, [None, columns, columns]),
        (Numbers { columns: (1 << 18) + 32, ..allowed }, [None, columns, columns]),
        (Numbers { k: 0, ..allowed }, [None, None, k]),
        (Numbers { k: 2049, ..allowed }, [None, None, k]),
        (Numbers { blocks: 0, ..allowed }, [None, blocks, None]),
        (Numbers { blocks: 1 << 31, ..allowed }, [None, blocks, None]),
    ] {
        let named =
            memory.run(device, numbers).map(|result| result.is_err().then(|| named(result)));
        assert_eq!(named, refused);
    }
}
