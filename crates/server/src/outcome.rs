//! Counts the outcome of each request once.

use std::time::Instant;

use crate::api_error::ApiError;
use crate::error::Failure;
use crate::metrics::Metrics;

/// A request that is being answered. Dropping it counts the request as cancelled: its client has left.
pub struct Outcome {
    metrics: Metrics,
    begin: Instant,
    is_counted: bool,
}

impl Outcome {
    /// A request that has just arrived.
    #[must_use]
    pub fn new(metrics: &Metrics) -> Self {
        Self { metrics: metrics.clone(), begin: Instant::now(), is_counted: false }
    }

    /// Counts the request as completed, and records its latency.
    pub fn completed(mut self) {
        self.is_counted = true;
        self.metrics.completed.increment(1);
        self.metrics.end_to_end.record(self.begin.elapsed());
    }

    /// Counts an accepted request as failed, also if a shutdown has cut it short, and returns the error.
    #[must_use]
    pub fn failed(mut self, failure: Failure) -> ApiError {
        self.is_counted = true;
        self.metrics.failed.increment(1);
        failure.into()
    }

    /// Counts a request that was not accepted as refused (4xx or 503), cancelled or failed, and returns the error.
    #[must_use]
    pub fn error(mut self, error: ApiError) -> ApiError {
        if error.has_client_left() {
            return error;
        }
        self.is_counted = true;
        let is_refusal = error.status.is_client_error() || error.status.as_u16() == 503;
        let counter = if is_refusal { &self.metrics.refused } else { &self.metrics.failed };
        counter.increment(1);
        error
    }
}

impl Drop for Outcome {
    fn drop(&mut self) {
        if !self.is_counted {
            self.metrics.cancelled.increment(1);
        }
    }
}
