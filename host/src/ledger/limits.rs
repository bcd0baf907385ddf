//! Limits of a step, from the cache configuration or from a bucket.

use serde::Serialize;

use crate::bucket::Bucket;
use crate::config::CacheConfig;
use crate::error::{KvError, LimitedBy};

impl Bucket {
    /// The bucket for decode steps of up to `requests` requests, one token each, of any length that
    /// the cache allows.
    #[must_use]
    pub const fn decode(config: &CacheConfig, requests: u32) -> Self {
        let context = config.max_context;
        Self { tokens: requests, tokens_per_request: 1, requests, context }
    }

    /// Checks the bucket against the cache that it is for.
    ///
    /// # Errors
    /// [`KvError::Bucket`] names the field, its value and the range.
    pub fn validate(&self, config: &CacheConfig) -> Result<(), KvError> {
        let range = |field, value: u32, most: u32| {
            if (1..=most).contains(&value) {
                Ok(())
            } else {
                Err(KvError::Bucket { field, value, most })
            }
        };
        let Self { tokens, tokens_per_request, requests, context } = *self;
        range("requests", requests, config.max_requests)?;
        range("context", context, config.max_context)?;
        range("tokens_per_request", tokens_per_request, config.max_step_tokens)?;
        let reachable = requests.saturating_mul(tokens_per_request);
        range("tokens", tokens, config.max_step_tokens.min(reachable))
    }
}

/// The limits that a step is checked against.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct StepLimits {
    pub tokens: u32,
    pub tokens_per_request: u32,
    pub requests: u32,
    pub context: u32,
    pub by: LimitedBy,
}

impl StepLimits {
    /// The limits of a cache.
    pub fn of_cache(config: &CacheConfig) -> Self {
        Self {
            tokens: config.max_step_tokens,
            tokens_per_request: config.max_step_tokens,
            requests: config.max_requests,
            context: config.max_context,
            by: LimitedBy::Cache,
        }
    }

    /// The limits of a bucket.
    pub fn of_bucket(bucket: &Bucket) -> Self {
        let Bucket { tokens, tokens_per_request, requests, context } = *bucket;
        Self { tokens, tokens_per_request, requests, context, by: LimitedBy::Bucket }
    }
}
