//! A bucket: the largest step that a captured graph serves.

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
