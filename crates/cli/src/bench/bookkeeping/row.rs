//! One line of the result.

use schemars::JsonSchema;
use serde::Serialize;

use super::samples::Samples;

/// Times of one part of the host's work.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Row {
    /// What is timed.
    pub what: String,
    /// Of which steps.
    pub size: String,
    /// Median, in microseconds: of a step, or of a launch.
    pub p50_us: f64,
    /// 99 of 100 take no longer.
    pub p99_us: f64,
}

impl Row {
    /// A row of `samples`, each of which contains `parts` units.
    pub fn new(
        what: impl Into<String>,
        size: impl Into<String>,
        samples: &Samples,
        parts: u64,
    ) -> Self {
        let [p50_us, p99_us] = [0.5, 0.99].map(|part| samples.quantile(part) / parts as f64);
        Self { what: what.into(), size: size.into(), p50_us, p99_us }
    }
}
