//! A bucket: the largest step that a captured graph serves. Its constructor `decode` and `validate` are in
//! `ledger/limits.rs`: errors name buckets, and files import each other in no cycle.

use serde::{Deserialize, Serialize};

/// The largest step that a captured graph serves. Launches always cover the bucket's tokens. Tokens
/// that the step does not have are padding, which kernels ignore.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Bucket {
    /// Most tokens of the step.
    pub tokens: u32,
    /// Most tokens of one request: 1 for decode, `max_draft` + 1 to verify drafts. Up to that, a layer's
    /// update is one launch.
    pub tokens_per_request: u32,
    /// Most requests.
    pub requests: u32,
    /// Most tokens that a request has after the step.
    pub context: u32,
}
