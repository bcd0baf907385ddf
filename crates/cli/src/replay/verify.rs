//! The comparison of cache contents with the reference implementation, row by row.
//!
//! The expected contents follow from the token history of a request and from the formulas of `dsv4-kv-oracle`, which
//! shares no code with the kernels.

use std::fmt;

use dsv4_kv::CacheConfig;
use dsv4_kv::kv_layout::geometry::CompressorKind;
use dsv4_kv_oracle::attention;
use dsv4_kv_oracle::compressor::{Shape, visible};
use dsv4_kv_oracle::index::{self, KeyFormat};
use dsv4_kv_oracle::number::bf16_value;
use dsv4_kv_oracle::rope::Table;
use dsv4_kv_oracle::row::{CHANNELS, EncodedRow, QUANTISED, RowFormat};
use dsv4_kv_oracle::swa::{Ring, window};

use super::attend::Head;
use super::entries::{self, Rows};
use super::history::Place;
use super::lists::{self, Query, Right};
use super::source::Source;
use super::verification::Verification;

/// The row where there is no entry and no key.
const ZERO: [u16; CHANNELS] = [0; CHANNELS];
/// Number of mismatches that are described; further ones are only counted.
const DESCRIBED: usize = 8;

/// The planes of one ring, as stored on the device.
#[derive(Clone, Copy, Debug)]
pub struct RingPlanes<'a> {
    /// Number of rows of the ring.
    pub rows: usize,
    /// `[rows, 576]`
    pub data: &'a [u8],
    /// `[rows, scale_bytes]`
    pub scale: &'a [u8],
}

/// A query of a step, and the batch in which it is scored.
#[derive(Clone, Copy, Debug)]
pub struct Batched {
    /// The step, from 0.
    pub step: u64,
    /// The first row of the batch among the step's tokens.
    pub first: u32,
    /// The row of the query among the step's tokens.
    pub query: u32,
}

/// A row of the source: as the reference stores it, and as it is read back.
struct Reference {
    stored: EncodedRow,
    read: Vec<u16>,
}

/// Compares, and counts the results.
pub struct Verifier {
    format: RowFormat,
    key_format: KeyFormat,
    /// Heads of the indexer.
    heads: usize,
    source: Source,
    /// By row of the source; computed on first use.
    references: Vec<Option<Reference>>,
    found: Verification,
}

impl Verifier {
    /// A verifier for a cache of this configuration, whose inputs come from `source`.
    pub fn new(config: &CacheConfig, source: Source) -> Self {
        let rows = source.rows();
        Self {
            format: entries::row_format(config.main_format),
            key_format: entries::key_format(config.index_format),
            heads: config.model.index_heads as usize,
            source,
            references: std::iter::repeat_with(|| None).take(rows).collect(),
            found: Verification::default(),
        }
    }

    /// The pools from which the cache's inputs come.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// Counts a request that has ended.
    pub fn count_request(&mut self) {
        self.found.requests += 1;
    }

    /// Counts reused tokens of a request.
    pub fn count_reused(&mut self, tokens: usize) {
        self.found.reused += tokens as u64;
    }

    /// The result.
    pub fn into_found(self) -> Verification {
        self.found
    }

    /// Compares every row that a ring holds for the request. Old rows are included, since no other request may have
    /// overwritten them.
    pub fn check_ring(&mut self, place: Place<'_>, planes: RingPlanes<'_>) {
        let tokens = place.history.len();
        let mut ring = Ring::new(planes.rows);
        ring.write(tokens.saturating_sub(planes.rows)..tokens);
        for (row, position) in ring.slots().iter().enumerate() {
            let Some(position) = *position else { continue };
            let reference = self.reference(place, position);
            let of = |plane: &'_ [u8], bytes: usize| plane[row * bytes..][..bytes].to_vec();
            let data = of(planes.data, reference.stored.data.len());
            let scale = of(planes.scale, reference.stored.scale.len());
            if position < place.without_rows && data.iter().chain(&scale).all(|&byte| byte == 0) {
                self.count_row(place, None);
                continue;
            }
            let mismatch = differing(&data, &reference.stored.data)
                .map(|(byte, got, want)| {
                    let channel = channel_of_byte(byte);
                    format!("ring, position {position}, channel {channel}: byte {got:#04x}, expected {want:#04x}")
                })
                .or_else(|| {
                    differing(&scale, &reference.stored.scale).map(|(byte, got, want)| {
                        format!("ring, position {position}, scale byte {byte}: {got:#04x}, expected {want:#04x}")
                    })
                });
            self.count_row(place, mismatch);
        }
    }

    /// Compares the gathered window of the query at `position`, `[128, 512]` BF16 bits, oldest key first, unused rows
    /// zero; and its length.
    pub fn check_window(&mut self, place: Place<'_>, position: usize, tile: &[u16], length: i32) {
        let keys = window(position);
        self.check_length(place, position, length, keys.len());
        for (j, got) in tile.chunks_exact(CHANNELS).enumerate() {
            let key = Some(keys.start + j).filter(|key| keys.contains(key));
            let is_zero = key.is_some_and(|key| key < place.without_rows) && got == ZERO;
            let want = match key.filter(|_| !is_zero) {
                Some(key) => &self.reference(place, key).read[..],
                None => &ZERO[..],
            };
            let mismatch = differing(got, want).map(|(channel, got, want)| {
                let row = key.map_or(format!("unused row {j}"), |key| format!("position {key}"));
                format!("window of {position}, {row}, channel {channel}: {got:#06x}, expected {want:#06x}")
            });
            self.count_row(place, mismatch);
        }
    }

    /// Compares the length of a tile of the query at `position`.
    pub fn check_length(&mut self, place: Place<'_>, position: usize, got: i32, want: usize) {
        if got != want as i32 {
            let text = format!("tile of {position}: length {got}, expected {want}");
            self.count_mismatch(place, &text);
        }
    }

    /// Compares new rows, the entries from `first`, with those that the reference computes from the tokens.
    pub fn check_closed(
        &mut self,
        place: Place<'_>,
        which: CompressorKind,
        first: usize,
        rows: &Rows,
    ) {
        for mismatch in entries::judge(&self.source, place, which, first, rows) {
            self.found.entries += 1;
            if let Some(text) = mismatch {
                self.count_mismatch(place, &text);
            }
        }
    }

    /// Compares the rows of a request's blocks with their contents when they were new.
    pub fn check_unchanged(
        &mut self,
        place: Place<'_>,
        which: CompressorKind,
        now: &Rows,
        then: &Rows,
    ) {
        for row in 0..then.count() {
            let changed = now.row(row) != then.row(row);
            self.count_row(place, changed.then(|| format!("{which:?} row {row} has changed")));
        }
    }

    /// Compares the list of the query at `position` with the scores of the keys that it sees. `rows` are the request's
    /// indexer keys.
    pub fn check_list(
        &mut self,
        place: Place<'_>,
        position: usize,
        Batched { step, first, query }: Batched,
        list: &[i32],
        rows: Option<&Rows>,
    ) {
        let at = self.source.query_offsets(step, place.layer.0, first);
        let part = |start: usize, columns: usize| {
            let start = start + (query - first) as usize * columns;
            &self.source.as_floats()[start..][..columns]
        };
        let (vectors, weights) =
            (part(at.query, self.heads * index::CHANNELS), part(at.weight, self.heads));
        let query = Query { position, vectors, weights };
        let seen = visible(position, Shape::INDEX.ratio);
        let judged = match rows.map_or(Some(&[][..]), |rows| rows.keys(seen)) {
            Some(keys) => lists::judge(list, query, self.key_format, keys),
            None => Err(format!("it sees {seen} keys, and not all have closed")),
        };
        self.found.lists += 1;
        self.found.scored += u64::from(seen > list.len());
        match judged {
            Ok(right) => self.found.near += u64::from(right == Right::Near),
            Err(text) => self.count_mismatch(place, &format!("list of {position}: {text}")),
        }
    }

    /// Compares the gathered entries of the query at `position`: `[rows, 512]` BF16 bits, the entries in `list`, and
    /// zero where the list names none. `rows` are those of the cache.
    pub fn check_gathered(
        &mut self,
        place: Place<'_>,
        position: usize,
        list: &[i32],
        tile: &[u16],
        rows: Option<&Rows>,
    ) {
        for (got, &entry) in tile.chunks_exact(CHANNELS).zip(list) {
            let row = usize::try_from(entry).ok();
            let want = row.map_or(Some(&ZERO[..]), |row| rows?.read(row));
            let mismatch = match want.map(|want| differing(got, want)) {
                Some(None) => None,
                Some(Some((channel, got, want))) => Some(format!(
                    "entries of {position}, entry {entry}, channel {channel}: {got:#06x}, expected {want:#06x}"
                )),
                None => Some(format!("entries of {position}: entry {entry} has not closed")),
            };
            self.count_row(place, mismatch);
        }
    }

    /// Compares the attention results of heads of the query at `position` with attention in `f64` over its window and
    /// the entries in `list`, taken from the cache's `rows`. Does nothing if the window has rows that were never
    /// computed.
    pub fn check_attended(
        &mut self,
        place: Place<'_>,
        (position, table): (usize, Table),
        (list, rows): (&[i32], Option<&Rows>),
        heads: &[Head<'_>],
    ) {
        let window = window(position);
        if window.start < place.without_rows {
            return;
        }
        let values = |bits: &[u16]| -> Vec<f64> { bits.iter().map(|&x| bf16_value(x)).collect() };
        let mut keys: Vec<Vec<f64>> =
            window.map(|key| values(&self.reference(place, key).read)).collect();
        let listed = list.iter().filter_map(|&entry| usize::try_from(entry).ok());
        // An entry that has not closed was already counted as a mismatch where it was gathered.
        keys.extend(listed.filter_map(|entry| rows?.read(entry)).map(values));
        for Head { number, query, sink, got } in heads {
            let query: Vec<f64> = query.iter().map(|x| x.to_f64()).collect();
            let expected = attention::attend(&query, &keys, (*sink).into(), (table, position));
            let channels = values(got).into_iter().zip(&expected.sum).zip(expected.bound());
            let is_near = |got: f64, want: f64, most: f64| (got - want).abs() <= most;
            // The comparison is false for NaN, so NaN counts as wrong.
            let wrong =
                channels.enumerate().find(|(_, ((got, want), most))| !is_near(*got, **want, *most));
            self.found.attended += 1;
            if let Some((channel, ((got, want), _))) = wrong {
                let text = format!(
                    "attention of {position}, head {number}, channel {channel}: {got}, expected {want}"
                );
                self.count_mismatch(place, &text);
            }
        }
    }

    fn reference(&mut self, place: Place<'_>, position: usize) -> &Reference {
        let row = Source::row_of(place.history[position], Source::row_set(place.layer.0));
        let (format, source) = (self.format, &self.source);
        self.references[row as usize].get_or_insert_with(|| {
            let stored = format.encode(source.row(row));
            let read = format.decode(&stored);
            Reference { stored, read }
        })
    }

    fn count_row(&mut self, place: Place<'_>, mismatch: Option<String>) {
        self.found.rows += 1;
        if let Some(text) = mismatch {
            self.count_mismatch(place, &text);
        }
    }

    fn count_mismatch(&mut self, place: Place<'_>, text: &str) {
        self.found.mismatches += 1;
        if self.found.examples.len() < DESCRIBED {
            let Place { request, layer, .. } = place;
            self.found.examples.push(format!("request {request}, layer {}, {text}", layer.0));
        }
    }
}

/// The first difference: index, found value, expected value.
fn differing<T: Copy + PartialEq + fmt::LowerHex>(got: &[T], want: &[T]) -> Option<(usize, T, T)> {
    let at = got.iter().zip(want).position(|(got, want)| got != want)?;
    Some((at, got[at], want[at]))
}

/// The channel of a byte of the data plane: 448 channels of one byte, then 64 of two.
fn channel_of_byte(byte: usize) -> usize {
    if byte < QUANTISED { byte } else { QUANTISED + (byte - QUANTISED) / 2 }
}

#[cfg(test)]
mod tests {
    use dsv4_kv::LayerId;
    use dsv4_kv::kv_layout::config::ModelConfig;

    use super::*;
    use crate::replay::history::Prefix;
    use dsv4_kv_oracle::explain::Codec;

    const ROWS: usize = 128;

    /// The history of a request of 200 tokens.
    fn history() -> Vec<Prefix> {
        Prefix::EMPTY.each(&(0..200).collect::<Vec<_>>()).collect()
    }

    fn place(request: usize, layer: LayerId, history: &[Prefix]) -> Place<'_> {
        Place { request, layer, history, without_rows: 0 }
    }

    fn verifier() -> Verifier {
        let tiny = ModelConfig::preset("tiny").expect("a preset");
        Verifier::new(&CacheConfig::new(tiny), Source::new(11, 3))
    }

    /// A correct ring after all of `history`, made by the reference's functions.
    fn ring(history: &[Prefix], layer: LayerId) -> (Vec<u8>, Vec<u8>) {
        let source = Source::new(11, 3);
        let (mut data, mut scale) = (vec![0; ROWS * 576], vec![0; ROWS * 8]);
        for (p, token) in history.iter().enumerate() {
            let row = Source::row_of(*token, Source::row_set(layer.0));
            let stored = RowFormat::Ue8m0.encode(source.row(row));
            data[p % ROWS * 576..][..576].copy_from_slice(&stored.data);
            scale[p % ROWS * 8..][..8].copy_from_slice(&stored.scale);
        }
        (data, scale)
    }

    /// The result of a check of that ring after `spoil` has changed it.
    fn check_ring(spoil: impl FnOnce(&mut [u8], &mut [u8])) -> Verification {
        let (history, layer) = (history(), LayerId(1));
        let (mut data, mut scale) = ring(&history, layer);
        spoil(&mut data, &mut scale);
        let mut verifier = verifier();
        let place = place(9, layer, &history);
        verifier.check_ring(place, RingPlanes { rows: ROWS, data: &data, scale: &scale });
        verifier.into_found()
    }

    #[test]
    fn a_correct_ring_passes() {
        let found = check_ring(|_, _| {});
        assert_eq!((found.rows, found.mismatches), (128, 0));
    }

    #[test]
    fn one_flipped_bit_in_either_plane_is_found_and_described() {
        let found = check_ring(|data, _| data[5 * 576 + 450] ^= 1);
        assert_eq!((found.rows, found.mismatches), (128, 1));
        let example = &found.examples[0];
        assert!(
            example.contains("request 9, layer 1, ring, position 133, channel 449"),
            "{example}"
        );
        let found = check_ring(|_, scale| scale[127 * 8 + 6] ^= 0x80);
        assert_eq!(found.mismatches, 1);
        assert!(found.examples[0].contains("position 127, scale byte 6"), "{found:?}");
    }

    #[test]
    fn the_ring_of_another_layer_is_found() {
        let other = ring(&history(), LayerId(2));
        let found = check_ring(|data, _| data.copy_from_slice(&other.0));
        assert_eq!(found.mismatches, 128);
        assert_eq!(found.examples.len(), DESCRIBED);
    }

    /// The result of a check of the window of `position` after `spoil` has changed it.
    fn check_window(position: usize, length: i32, spoil: impl FnOnce(&mut [u16])) -> Verification {
        let (history, layer) = (history(), LayerId(0));
        let source = Source::new(11, 3);
        let rows: Vec<Vec<u16>> =
            history.iter().map(|token| source.row(Source::row_of(*token, 0)).to_vec()).collect();
        let (mut tile, _) = dsv4_kv_oracle::swa::gather(RowFormat::Ue8m0, &rows, position);
        spoil(&mut tile);
        let mut verifier = verifier();
        let place = place(0, layer, &history);
        verifier.check_window(place, position, &tile, length);
        verifier.into_found()
    }

    #[test]
    fn a_correct_window_passes_full_or_not() {
        for (position, length) in [(0, 1), (100, 101), (127, 128), (199, 128)] {
            let found = check_window(position, length, |_| {});
            assert_eq!((found.rows, found.mismatches), (128, 0), "{found:?}");
        }
    }

    #[test]
    fn a_wrong_length_a_wrong_value_and_a_leftover_are_found() {
        assert_eq!(check_window(100, 100, |_| {}).mismatches, 1);
        let found = check_window(199, 128, |tile| tile[3 * CHANNELS + 17] ^= 0x8000);
        assert_eq!(found.mismatches, 1);
        assert!(found.examples[0].contains("window of 199, position 75, channel 17"), "{found:?}");
        let found = check_window(100, 101, |tile| tile[101 * CHANNELS] = 1);
        assert!(found.examples[0].contains("unused row 101"), "{found:?}");
    }

    /// The result of a check of the entries gathered for the query at 199, after `spoil` has changed the list, the
    /// tile, and the number of closed entries.
    fn check_gathered(spoil: impl FnOnce(&mut [i32], &mut [u16], &mut usize)) -> Verification {
        let (history, source) = (history(), Source::new(11, 3));
        let place = place(9, LayerId(1), &history);
        let kind = (CompressorKind::CsaMain, Codec::Row(RowFormat::Ue8m0));
        let all = Rows::reference(&source, place, kind, 12);
        let mut list = [7, 0, 11, -1];
        let row = |entry: i32| match usize::try_from(entry) {
            Ok(entry) => all.read(entry).expect("it has closed"),
            Err(_) => &ZERO[..],
        };
        let mut tile: Vec<u16> = list.into_iter().flat_map(row).copied().collect();
        let mut closed = 12;
        spoil(&mut list, &mut tile, &mut closed);
        let rows = Rows::reference(&source, place, kind, closed);
        let mut verifier = verifier();
        verifier.check_gathered(place, 199, &list, &tile, Some(&rows));
        verifier.into_found()
    }

    #[test]
    fn gathered_entries_are_those_of_the_list() {
        let found = check_gathered(|_, _, _| {});
        assert_eq!((found.rows, found.mismatches), (4, 0), "{found:?}");
        let found = check_gathered(|list, _, _| list.swap(0, 1));
        assert_eq!(found.mismatches, 2);
        let found = check_gathered(|_, tile, _| tile[2 * CHANNELS + 500] ^= 1);
        assert!(found.examples[0].contains("entries of 199, entry 11, channel 500"), "{found:?}");
        let found = check_gathered(|_, tile, _| tile[3 * CHANNELS] = 1);
        assert!(found.examples[0].contains("entry -1, channel 0"), "{found:?}");
        let found = check_gathered(|_, _, closed| *closed = 11);
        assert!(found.examples[0].contains("entry 11 has not closed"), "{found:?}");
    }
}
