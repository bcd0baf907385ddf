//! Values of options, with their limits.

use std::ops::RangeInclusive;

use bytesize::ByteSize;
use clap::ValueEnum;
use dsv4_kv::kv_layout::attention::KeyCluster;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Largest size that an option takes.
const MAX_SIZE: ByteSize = ByteSize::pib(1);

/// How many thread blocks share the keys of one query (64 heads) in attention in place.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum ClusterChoice {
    /// Two, a cluster that combines its results: lower latency with few queries.
    #[default]
    TwoBlocks,
    /// One: higher throughput with many queries, as in large batches and chunks.
    OneBlock,
}

impl From<ClusterChoice> for KeyCluster {
    fn from(choice: ClusterChoice) -> Self {
        match choice {
            ClusterChoice::TwoBlocks => Self::TwoBlocks,
            ClusterChoice::OneBlock => Self::OneBlock,
        }
    }
}

/// A parser of numbers in `range`, both ends included.
pub fn number(
    range: RangeInclusive<f64>,
) -> impl Fn(&str) -> Result<f64, String> + Clone + Send + Sync + 'static {
    move |text| match text.parse::<f64>() {
        Ok(value) if range.contains(&value) => Ok(value),
        _ => Err(format!("it must be a number from {} to {}", range.start(), range.end())),
    }
}

/// A parser of whole numbers in `range`, both ends included.
pub fn integer(
    range: RangeInclusive<u32>,
) -> impl Fn(&str) -> Result<u32, String> + Clone + Send + Sync + 'static {
    move |text| match text.parse() {
        Ok(value) if range.contains(&value) => Ok(value),
        _ => Err(format!("it must be a whole number from {} to {}", range.start(), range.end())),
    }
}

/// A seed of random numbers.
///
/// # Errors
/// A message if it is no whole number of 64 bits.
pub fn seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("it must be a whole number from 0 to {}", u64::MAX))
}

/// A size in bytes, such as `64GiB`, of at most 1 PiB.
///
/// # Errors
/// A message if it is no size or a larger one.
pub fn size(text: &str) -> Result<ByteSize, String> {
    match text.parse::<ByteSize>() {
        Ok(size) if size <= MAX_SIZE => Ok(size),
        _ => Err(format!("it must be a size such as 64GiB, of at most {MAX_SIZE}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_out_of_range_are_refused_with_the_limits() {
        let parse = number(0.001..=1e6);
        for text in ["0.001", "1000000", "3", "1e3"] {
            assert_eq!(parse(text), Ok(text.parse().expect("a number")));
        }
        for text in [
            "0",
            "-0",
            "-1",
            "NaN",
            "inf",
            "-inf",
            "1e308",
            "1e-308",
            "1e400",
            "1000000.1",
            "many",
            "",
        ] {
            assert_eq!(
                parse(text),
                Err("it must be a number from 0.001 to 1000000".into()),
                "{text}"
            );
        }
    }

    #[test]
    fn whole_numbers_out_of_range_are_refused_with_the_limits() {
        let parse = integer(2..=16);
        assert_eq!((parse("2"), parse("16")), (Ok(2), Ok(16)));
        for text in ["1", "17", "-1", "4294967298", "99999999999999999999", "3.5", "many", ""] {
            let message = parse(text).expect_err(text);
            assert_eq!(message, "it must be a whole number from 2 to 16");
        }
        assert_eq!(seed("18446744073709551615"), Ok(u64::MAX));
        let message = seed("18446744073709551616").expect_err("over 64 bits");
        assert_eq!(message, "it must be a whole number from 0 to 18446744073709551615");
    }

    #[test]
    fn sizes_over_a_pebibyte_are_refused() {
        assert_eq!(size("64GiB"), Ok(ByteSize::gib(64)));
        assert_eq!(size("1PiB"), Ok(ByteSize::pib(1)));
        for text in
            ["1.1PiB", "16EiB", "9007199254740993PiB", "99999999999999999999", "-5", "lots", ""]
        {
            let message = size(text).expect_err(text);
            assert_eq!(message, "it must be a size such as 64GiB, of at most 1.0 PiB");
        }
    }
}
