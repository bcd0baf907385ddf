//! Who set a limit that a step exceeds.

use std::fmt;

use serde::Serialize;

/// Who set a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitedBy {
    /// `CacheConfig`.
    Cache,
    /// The [`Bucket`](crate::Bucket) that the step was begun with.
    Bucket,
}

impl LimitedBy {
    /// The field that sets the limit: of [`crate::CacheConfig`], or of [`Bucket`](crate::Bucket).
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
