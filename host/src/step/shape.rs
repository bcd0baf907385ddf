//! Sizes that the launches of a step cover, padding included.

use crate::bucket::Bucket;
use crate::config::CacheConfig;
use crate::ledger::StepPlan;

/// Sizes that the launches of a step cover, padding included.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepShape {
    /// Tokens that launches cover.
    pub tokens: u32,
    /// Most tokens of one request.
    pub tokens_per_request: u32,
    /// Most requests.
    pub requests: u32,
    /// Most tokens that a request has after the step.
    pub context: u32,
    /// Most tokens of a request that a rejection undoes without loss: `max_draft` + 1.
    pub rollback: u32,
}

/// Which capture records the launches of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recording {
    /// None: the launches run.
    Nothing,
    /// The capture of a whole step.
    Step,
    /// The capture of reads of updated layers ([`Layers::record_reads`](super::Layers::record_reads)).
    Reads,
}

/// A step that has begun, or is captured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BegunStep {
    /// Sizes that its launches cover.
    pub shape: StepShape,
    /// Its sizes without padding; all zero in a capture.
    pub plan: StepPlan,
    /// The bucket that it runs under.
    pub bucket: Option<Bucket>,
    /// Which capture records it. Recorded launches run in the steps that replay the graph.
    pub recording: Recording,
}

impl StepShape {
    pub fn of_bucket(bucket: &Bucket, config: &CacheConfig) -> Self {
        let Bucket { tokens, tokens_per_request, requests, context } = *bucket;
        let rollback = config.step_tokens_with_rollback();
        Self { tokens, tokens_per_request, requests, context, rollback }
    }

    pub fn of_plan(plan: StepPlan, config: &CacheConfig) -> Self {
        let StepPlan { tokens, tokens_per_request, requests, context, .. } = plan;
        let rollback = config.step_tokens_with_rollback();
        Self { tokens, tokens_per_request, requests, context, rollback }
    }

    /// Whether a layer's update and append are one launch, without a work list. This needs at most `max_draft` + 1
    /// tokens per request: then no token overwrites a ring row that the step still reads.
    pub fn is_fused(&self) -> bool {
        self.tokens_per_request <= self.rollback
    }
}
