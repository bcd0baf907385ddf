//! Compressed entries and indexer keys of a sampled request: reads them from the device, and computes them from the
//! tokens by the reference.

use std::ops::Range;

use anyhow::{Context, Result};
use dsv4_kv::device::{Backend, Stream, View};
use dsv4_kv::kv_layout::geometry::{CompressorKind, LayerKind};
use dsv4_kv::kv_layout::index_row::IndexFormat;
use dsv4_kv::kv_layout::main_row::{DATA_BYTES, MainFormat};
use dsv4_kv::{KvCacheManager, KvError, LayerId, PoolKind};
use dsv4_kv_oracle::compressor::Compressor;
use dsv4_kv_oracle::explain::{Codec, Stored};
use dsv4_kv_oracle::index::{EncodedKey, KeyFormat};
use dsv4_kv_oracle::row::{EncodedRow, RowFormat};
use rayon::prelude::*;

use super::history::Place;
use super::source::{Source, ValueTensor, shape};

/// The compressors of a layer.
pub const fn compressors(kind: LayerKind) -> &'static [CompressorKind] {
    match kind {
        LayerKind::Swa => &[],
        LayerKind::Csa => &[CompressorKind::CsaMain, CompressorKind::CsaIndex],
        LayerKind::Hca => &[CompressorKind::Hca],
    }
}

/// The reference's type for a row format.
pub const fn row_format(format: MainFormat) -> RowFormat {
    match format {
        MainFormat::Ue8m0 => RowFormat::Ue8m0,
        MainFormat::F32 => RowFormat::F32,
    }
}

/// The reference's type for a format of keys.
pub const fn key_format(format: IndexFormat) -> KeyFormat {
    match format {
        IndexFormat::Nvfp4 => KeyFormat::Nvfp4,
        IndexFormat::Mxfp4 => KeyFormat::Mxfp4,
        IndexFormat::Fp8 => KeyFormat::Fp8,
    }
}

/// The planes that hold the rows of a compressor.
pub struct Planes<B: Backend> {
    data: (View<B, u8>, u64),
    scale: (View<B, u8>, u64),
    /// Rows per block.
    per_block: usize,
    codec: Codec,
}

impl<B: Backend> Planes<B> {
    /// The planes of the compressor `which` in a layer.
    pub fn of(
        manager: &KvCacheManager<B>,
        layer: LayerId,
        which: CompressorKind,
    ) -> Result<Self, KvError> {
        let config = manager.config();
        let (main, index) = (config.main_format, config.index_format);
        let pool = |kind, row_bytes| Ok::<_, KvError>((manager.pool(layer, kind)?, row_bytes));
        let (data, scale, codec) = match which {
            CompressorKind::CsaMain | CompressorKind::Hca => (
                pool(PoolKind::EntryData, DATA_BYTES)?,
                pool(PoolKind::EntryScale, main.scale_bytes())?,
                Codec::Row(row_format(main)),
            ),
            CompressorKind::CsaIndex => (
                pool(PoolKind::IndexCode, index.code_bytes())?,
                pool(PoolKind::IndexScale, index.scale_bytes())?,
                Codec::Key(key_format(index)),
            ),
        };
        let kind = config.model.layers[layer.0 as usize];
        Ok(Self { data, scale, per_block: kind.entries_per_block() as usize, codec })
    }

    /// Reads rows of a request. `blocks` are its blocks, in the order of its tokens.
    pub fn fetch(&self, stream: &Stream<B>, blocks: &[u32], entries: Range<usize>) -> Result<Rows> {
        let mut rows = Rows::new(self.codec);
        let mut first = entries.start;
        while first < entries.end {
            let (block, row) = (first / self.per_block, first % self.per_block);
            let count = (self.per_block - row).min(entries.end - first);
            let block = *blocks.get(block).context("every entry has its block")?;
            let at = u64::from(block) * self.per_block as u64 + row as u64;
            for ((pool, row_bytes), plane) in
                [(&self.data, &mut rows.data), (&self.scale, &mut rows.scale)]
            {
                let old = plane.len();
                plane.resize(old + count * *row_bytes as usize, 0);
                stream.download(pool, at * row_bytes, &mut plane[old..])?;
            }
            rows.count += count;
            first += count;
        }
        Ok(rows)
    }
}

/// Rows of one compressor of one request, as stored on the device.
#[derive(Clone, Debug)]
pub struct Rows {
    codec: Codec,
    count: usize,
    /// `[count, data_bytes]`
    pub data: Vec<u8>,
    /// `[count, scale_bytes]`
    pub scale: Vec<u8>,
    /// `[count, 512]` BF16: main rows as attention reads them.
    read: Vec<u16>,
    /// `[count, 128]`: indexer keys as the scores read them.
    keys: Vec<f32>,
}

impl Rows {
    /// No rows.
    pub fn new(codec: Codec) -> Self {
        let (data, scale) = (Vec::new(), Vec::new());
        Self { codec, count: 0, data, scale, read: Vec::new(), keys: Vec::new() }
    }

    /// The storage format.
    pub fn codec(&self) -> Codec {
        self.codec
    }

    /// Number of rows.
    pub fn count(&self) -> usize {
        self.count
    }

    /// One row.
    pub fn row(&self, row: usize) -> Stored {
        let part = |plane: &[u8]| {
            let bytes = plane.len() / self.count;
            plane[row * bytes..][..bytes].to_vec()
        };
        Stored { data: part(&self.data), scale: part(&self.scale) }
    }

    /// Appends the following rows, including their decoded values.
    pub fn extend(&mut self, next: &Self) {
        self.count += next.count;
        self.data.extend_from_slice(&next.data);
        self.scale.extend_from_slice(&next.scale);
        for row in 0..next.count {
            let Stored { data, scale } = next.row(row);
            match self.codec {
                Codec::Row(format) => {
                    self.read.extend(format.decode(&EncodedRow { data, scale }));
                }
                Codec::Key(format) => {
                    self.keys.extend(format.decode(&EncodedKey { codes: data, scale }));
                }
            }
        }
    }

    /// The first `count` indexer keys as the scores read them, `[count, 128]`; `None` if there are fewer.
    pub fn keys(&self, count: usize) -> Option<&[f32]> {
        self.keys.get(..count * dsv4_kv_oracle::index::CHANNELS)
    }

    /// A main row as attention reads it, `[512]` BF16; `None` if there is no such row.
    pub fn read(&self, row: usize) -> Option<&[u16]> {
        self.read.chunks_exact(dsv4_kv_oracle::row::CHANNELS).nth(row)
    }
}

/// Compares `rows`, which are the entries from `first`, with those that the reference computes from the tokens. One
/// result per row: a description if it differs.
pub fn judge(
    source: &Source,
    place: Place<'_>,
    which: CompressorKind,
    first: usize,
    rows: &Rows,
) -> Vec<Option<String>> {
    let judge = |row: usize| {
        let want = entry(source, place, which, first + row);
        let got = rows.row(row);
        (!rows.codec.explains(&got, &want)).then(|| describe(rows.codec, first + row, &got, &want))
    };
    (0..rows.count).into_par_iter().map(judge).collect()
}

/// Describes the first byte that differs from the reference's.
fn describe(codec: Codec, entry: usize, got: &Stored, want: &[f64]) -> String {
    let want = codec.store(want);
    let name = match codec {
        Codec::Row(_) => "entry",
        Codec::Key(_) => "key",
    };
    let differs = |got: &[u8], want: &[u8]| got.iter().zip(want).position(|(a, b)| a != b);
    let at = differs(&got.data, &want.data)
        .map(|byte| format!("byte {byte}"))
        .or_else(|| differs(&got.scale, &want.scale).map(|byte| format!("scale byte {byte}")))
        .unwrap_or_default();
    format!("{name} {entry}, {at}: not what its tokens give")
}

/// The reference's entry before it is rounded: `[512]`, or `[128]` for an indexer key.
///
/// An entry pools only the tokens of its window and, with overlap, of the previous window. So the computation uses only
/// the history of these tokens, in which it is the first or second entry.
pub fn entry(source: &Source, place: Place<'_>, which: CompressorKind, entry: usize) -> Vec<f64> {
    let shape = shape(which);
    let before = if shape.overlap { entry.min(1) } else { 0 };
    let tokens = &place.history[(entry - before) * shape.ratio..(entry + 1) * shape.ratio];
    let (columns, layer) = (shape.columns(), place.layer.0);
    let floats = |start: usize, len: usize| &source.as_floats()[start..][..len];
    let (mut kv, mut gate) = (Vec::new(), Vec::new());
    for &token in tokens {
        let of = |tensor| &source.as_floats()[Source::values_of(token, which, tensor)];
        kv.extend_from_slice(of(ValueTensor::keys(layer)));
        gate.extend_from_slice(of(ValueTensor::gates(layer)));
    }
    let weights = source.weights(layer, which);
    let (ape, norm_w) =
        (floats(weights.ape, shape.ratio * columns), floats(weights.norm, shape.channels));
    let compressor = Compressor { shape, kv: &kv, gate: &gate, ape, norm_w };
    compressor.norm_and_rotate(&compressor.pooled(before), entry)
}

#[cfg(test)]
impl Rows {
    /// The first `count` rows of a compressor, as the reference stores them.
    pub fn reference(
        source: &Source,
        place: Place<'_>,
        (which, codec): (CompressorKind, Codec),
        count: usize,
    ) -> Self {
        let mut rows = Self::new(codec);
        for row in 0..count {
            let Stored { data, scale } = codec.store(&entry(source, place, which, row));
            rows.extend(&Self { count: 1, data, scale, ..Self::new(codec) });
        }
        rows
    }
}

#[cfg(test)]
mod tests {
    use dsv4_kv::LayerId;

    use super::*;
    use crate::replay::history::Prefix;

    /// The differences found in the first rows of a compressor. The rows are those of the reference for a request of
    /// 270 tokens, changed by `spoil`.
    fn check(which: CompressorKind, codec: Codec, spoil: impl FnOnce(&mut Rows)) -> Vec<String> {
        let source = Source::new(11, 3);
        let history: Vec<_> = Prefix::EMPTY.each(&(0..270).collect::<Vec<_>>()).collect();
        let layer = LayerId(1);
        let place = Place { request: 9, layer, history: &history, without_rows: 0 };
        let count = (270 / shape(which).ratio).min(20);
        let mut rows = Rows::reference(&source, place, (which, codec), count);
        spoil(&mut rows);
        judge(&source, place, which, 0, &rows).into_iter().flatten().collect()
    }

    const ROW: Codec = Codec::Row(RowFormat::Ue8m0);
    const KEY: Codec = Codec::Key(KeyFormat::Mxfp4);
    const KINDS: [(CompressorKind, Codec); 4] = [
        (CompressorKind::CsaMain, ROW),
        (CompressorKind::CsaMain, Codec::Row(RowFormat::F32)),
        (CompressorKind::CsaIndex, KEY),
        (CompressorKind::Hca, ROW),
    ];

    #[test]
    fn rows_as_the_reference_stores_them_pass() {
        for (which, codec) in KINDS {
            assert!(check(which, codec, |_| {}).is_empty());
        }
    }

    #[test]
    fn a_flipped_byte_of_an_entry_and_of_a_key_is_found() {
        let found = check(CompressorKind::CsaMain, ROW, |rows| rows.data[3 * 576 + 40] ^= 0x10);
        assert_eq!(found, ["entry 3, byte 40: not what its tokens give"]);
        let found = check(CompressorKind::CsaMain, ROW, |rows| rows.scale[4 * 8 + 2] ^= 1);
        assert_eq!(found, ["entry 4, scale byte 2: not what its tokens give"]);
        let found = check(CompressorKind::CsaIndex, KEY, |rows| rows.data[5 * 64 + 9] ^= 0x02);
        assert_eq!(found, ["key 5, byte 9: not what its tokens give"]);
    }

    #[test]
    fn entries_in_the_wrong_order_are_found() {
        for (which, codec) in KINDS {
            let found = check(which, codec, |rows| {
                for plane in [&mut rows.data, &mut rows.scale] {
                    let row = plane.len() / rows.count;
                    plane[..2 * row].rotate_left(row);
                }
            });
            assert_eq!(found.len(), 2, "{which:?}: {found:?}");
        }
    }
}
