//! The inputs of attention in one layer of a step: lists, and the tiles of gathers, at addresses that stay the same.

use dsv4_kv::device::{Backend, Buffer, Memory, Stream, bf16};
use dsv4_kv::step::EntryLists;
use dsv4_kv::{KvCacheManager, KvError};
use dsv4_kv_oracle::compressor::visible;
use kv_layout::geometry::LayerKind;

use crate::fed::Updated;
use crate::inputs::{CANARY, download, filled};

/// Length of a query's list.
const LIST: u32 = 3;

/// The lists and tiles of one layer, for steps of up to `bucket` tokens.
pub struct Gathered<B: Backend> {
    kind: LayerKind,
    /// Rows of a tile for all entries of a query.
    all_rows: u32,
    selected: Buffer<B, i32>,
    window: Buffer<B, bf16>,
    window_lengths: Buffer<B, i32>,
    listed: Buffer<B, bf16>,
    all: Buffer<B, bf16>,
    lengths: Buffer<B, i32>,
}

impl<B: Backend> Gathered<B> {
    /// For every layer of a cache, with room for the entries of `tokens` tokens.
    pub fn of_layers(
        manager: &KvCacheManager<B>,
        stream: &Stream<B>,
        bucket: u32,
        tokens: u32,
    ) -> Vec<Self> {
        let of_kind = |&kind: &LayerKind| {
            let all_rows = kind.ratio().map_or(0, |ratio| tokens / ratio);
            let tile = |rows: u32| filled(stream, (bucket * rows * 512) as usize);
            let words = |count: u32| filled(stream, (bucket * count) as usize);
            Self {
                kind,
                all_rows,
                selected: words(LIST),
                window: tile(128),
                window_lengths: words(1),
                listed: tile(if all_rows == 0 { 0 } else { LIST }),
                all: tile(all_rows),
                lengths: words(1),
            }
        };
        manager.config().model.layers.iter().map(of_kind).collect()
    }

    /// Sets the lists of queries at `positions` to the newest entry, none, and the oldest. Fills the tiles with
    /// canaries, and the lengths with 0, which is the length of padding.
    pub fn reset(&self, stream: &Stream<B>, positions: &[usize]) {
        for tile in [&self.window, &self.listed, &self.all] {
            stream.fill(tile, CANARY).unwrap();
        }
        for lengths in [&self.window_lengths, &self.lengths] {
            stream.fill(lengths, 0).unwrap();
        }
        let Some(ratio) = self.kind.ratio() else { return };
        let newest = |&position: &usize| visible(position, ratio as usize) as i32 - 1;
        let lists: Vec<i32> =
            positions.iter().map(newest).flat_map(|newest| [newest, -1, newest.min(0)]).collect();
        stream.upload(&lists, &self.selected, 0).unwrap();
    }

    /// Queues the gathers of this layer, for `bucket` queries.
    pub fn gather(&self, layer: &Updated<'_, B>, bucket: u32) -> Result<(), KvError> {
        layer.gather_window(0..bucket, &self.window, &self.window_lengths)?;
        let lists = EntryLists { queries: 0..bucket, k: LIST, indices: &self.selected };
        layer.gather_entries(0..bucket, &lists, &self.listed)?;
        layer.gather_all(0..bucket, self.all_rows, &self.all, &self.lengths)
    }

    /// All memory, for a graph to retain.
    pub fn memory(&self) -> [Memory<B>; 6] {
        let Self { selected, window, window_lengths, listed, all, lengths, .. } = self;
        let (selected, lengths) = (selected.memory(), lengths.memory());
        let (window, window_lengths) = (window.memory(), window_lengths.memory());
        [selected, window, window_lengths, listed.memory(), all.memory(), lengths]
    }

    /// The bytes that the gathers wrote.
    pub fn bytes(&self, stream: &Stream<B>) -> Vec<u8> {
        let Self { window, window_lengths, listed, all, lengths, .. } = self;
        [window.cast(), window_lengths.cast(), listed.cast(), all.cast(), lengths.cast()]
            .map(|output| download::<_, u8>(stream, &output.unwrap()))
            .concat()
    }
}
