//! A stored row beside the values from which it was made: the error of quantisation in each group.

use dsv4_kv::kv_layout::geometry::{NOPE_DIM, ROPE_DIM};
use dsv4_kv::kv_layout::main_row::UE8M0_GROUP;
use dsv4_kv_oracle::number::bf16_value;
use dsv4_kv_oracle::row::{EncodedRow, RowFormat};
use schemars::JsonSchema;
use serde::Serialize;

/// Number of channels that are shown individually.
const SHOWN: usize = 8;

/// A main row, decoded.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Row {
    /// What it is of.
    pub what: String,
    /// Whether there is such a row. A draft layer may have none of a token that the request reused.
    pub exists: bool,
    /// Its bytes, data and scales; 0 if it does not exist.
    pub bytes: usize,
    /// Errors of the groups of channels that share a scale; the last one is stored in BF16. None of a row that does
    /// not exist.
    pub groups: Vec<Group>,
    /// The first channels. None of a row that does not exist.
    pub channels: Vec<Channel>,
}

/// Channels that share a scale.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Group {
    /// The first of them.
    pub first: u32,
    /// Their number.
    pub channels: u32,
    /// Largest magnitude of what was stored.
    pub largest: f64,
    /// Largest error.
    pub largest_error: f64,
    /// Root of the mean square error over that of the values: 0 is exact.
    pub relative_rms: f64,
}

/// One channel.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Channel {
    /// Its number.
    pub channel: u32,
    /// The byte that is stored.
    pub byte: u8,
    /// What it is read as.
    pub read: f64,
    /// What it was made from.
    pub from: f64,
}

impl Row {
    /// Compares the bytes `stored` with the values `from` (`[512]`) from which they were made.
    pub fn new(what: String, format: RowFormat, stored: &EncodedRow, from: &[f64]) -> Self {
        let read: Vec<_> = format.decode(stored).into_iter().map(bf16_value).collect();
        let groups = (0..NOPE_DIM).step_by(UE8M0_GROUP as usize).map(|first| (first, UE8M0_GROUP));
        let groups = groups.chain([(NOPE_DIM, ROPE_DIM)]);
        let channels = read.iter().zip(from).zip(&stored.data).zip(0..).take(SHOWN);
        Self {
            what,
            exists: true,
            bytes: stored.data.len() + stored.scale.len(),
            groups: groups
                .map(|(first, channels)| Group::new(first, channels, &read, from))
                .collect(),
            channels: channels
                .map(|(((&read, &from), &byte), channel)| Channel { channel, byte, read, from })
                .collect(),
        }
    }

    /// A row that does not exist.
    pub fn absent(what: String) -> Self {
        Self { what, exists: false, bytes: 0, groups: Vec::new(), channels: Vec::new() }
    }
}

impl Group {
    fn new(first: u32, channels: u32, read: &[f64], from: &[f64]) -> Self {
        let range = first as usize..(first + channels) as usize;
        let (read, from) = (&read[range.clone()], &from[range]);
        let errors = || read.iter().zip(from).map(|(read, from)| (read - from).abs());
        let squares =
            |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>();
        let all = squares(&mut from.iter().copied());
        Self {
            first,
            channels,
            largest: from.iter().fold(0.0, |largest, value| value.abs().max(largest)),
            largest_error: errors().fold(0.0, f64::max),
            relative_rms: if all > 0.0 { (squares(&mut errors()) / all).sqrt() } else { 0.0 },
        }
    }
}

#[cfg(test)]
mod tests {
    use dsv4_kv::kv_layout::format::bf16_from_f32;

    use super::*;

    #[test]
    fn errors_are_those_of_the_format_and_a_changed_byte_shows() {
        let bits: Vec<u16> =
            (0..512).map(|channel| bf16_from_f32((channel as f32 * 0.37).sin())).collect();
        let from: Vec<f64> = bits.iter().map(|&bits| bf16_value(bits)).collect();
        for format in [RowFormat::Ue8m0, RowFormat::F32] {
            let mut stored = format.encode(&bits);
            let row = Row::new("a row".into(), format, &stored, &from);
            assert_eq!((row.groups.len(), row.channels.len()), (8, SHOWN));
            // E4M3 has three mantissa bits, so the error is at most 1/16 of a value. Channels stored as BF16 have no
            // error.
            let (rope, main) = row.groups.split_last().expect("eight groups");
            assert!(
                main.iter().all(|group| (1e-3..1.0 / 16.0).contains(&group.relative_rms)),
                "{main:?}"
            );
            assert_eq!((rope.first, rope.largest_error), (448, 0.0));
            stored.data[70] ^= 0x80;
            let changed = Row::new("a row".into(), format, &stored, &from);
            assert!(changed.groups[1].relative_rms > 0.1, "{:?}", changed.groups[1]);
            assert_eq!(changed.groups[0].relative_rms, row.groups[0].relative_rms);
        }
    }
}
