//! What launches of a step look like, with padding.

use crate::bucket::Bucket;
use crate::ledger::StepPlan;

/// What launches of a step look like, with padding.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepShape {
    /// Tokens that launches cover.
    pub tokens: u32,
    /// Most tokens of one request.
    pub tokens_per_request: u32,
    /// Most requests.
    pub requests: u32,
}

impl StepShape {
    pub fn of_bucket(bucket: &Bucket) -> Self {
        let Bucket { tokens, tokens_per_request, requests, .. } = *bucket;
        Self { tokens, tokens_per_request, requests }
    }

    pub fn of_plan(plan: StepPlan) -> Self {
        let StepPlan { tokens, tokens_per_request, requests, .. } = plan;
        Self { tokens, tokens_per_request, requests }
    }

    /// Whether a layer's update and append are one launch, without a work list.
    pub fn is_fused(&self) -> bool {
        self.tokens_per_request <= 1
    }
}
