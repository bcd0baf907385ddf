//! Quantiles of waiting times.

use schemars::JsonSchema;
use serde::Serialize;

use super::timeline::percentile;

/// Two quantiles of some waits; none if nobody waited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct Quantiles {
    /// The median.
    pub p50: Option<f32>,
    /// What 99 of 100 do not exceed.
    pub p99: Option<f32>,
}

impl Quantiles {
    /// The quantiles of unsorted times.
    pub fn of_unsorted(mut waits: Vec<f32>) -> Self {
        waits.sort_unstable_by(f32::total_cmp);
        Self::of(&waits)
    }

    /// The quantiles of sorted times.
    pub fn of(sorted: &[f32]) -> Self {
        let at = |percent| (!sorted.is_empty()).then(|| percentile(sorted, percent));
        Self { p50: at(50), p99: at(99) }
    }
}
