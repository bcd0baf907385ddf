//! A bucket: the largest step that a captured graph serves.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The largest step that a captured graph serves. Launches cover a bucket's tokens, however many the
/// step has: the rest is padding and touches nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Bucket {
    /// Tokens of the step.
    pub tokens: u32,
    /// Tokens of one request: 1 for decode, `max_draft` + 1 to verify drafts. Up to that, a layer's update
    /// is one launch.
    pub tokens_per_request: u32,
    /// Requests.
    pub requests: u32,
    /// Tokens that a request has after the step.
    pub context: u32,
}

/// Who set a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitedBy {
    /// `CacheConfig`.
    Cache,
    /// The [`Bucket`] that the step was begun with.
    Bucket,
}

impl LimitedBy {
    /// The field that sets the limit: of [`crate::CacheConfig`], or of [`Bucket`].
    pub(crate) const fn setting(self, cache: &'static str, bucket: &'static str) -> &'static str {
        match self {
            Self::Cache => cache,
            Self::Bucket => bucket,
        }
    }

    /// The field that limits the tokens of one request in a step.
    pub(crate) const fn chunk_setting(self) -> &'static str {
        self.setting("max_step_tokens", "tokens_per_request")
    }
}

impl fmt::Display for LimitedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cache => "the cache is configured for",
            Self::Bucket => "the bucket is for",
        })
    }
}
