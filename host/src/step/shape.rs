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
    /// Most tokens of a request in a decode step ([`CacheConfig::max_decode_tokens`]). A rejection undoes so many
    /// without loss.
    pub max_decode_tokens: u32,
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
        let max_decode_tokens = config.max_decode_tokens();
        Self { tokens, tokens_per_request, requests, context, max_decode_tokens }
    }

    pub fn of_plan(plan: StepPlan, config: &CacheConfig) -> Self {
        let StepPlan { tokens, tokens_per_request, requests, context, .. } = plan;
        let max_decode_tokens = config.max_decode_tokens();
        Self { tokens, tokens_per_request, requests, context, max_decode_tokens }
    }

    /// Whether it is a decode step: no request has more than `max_draft` + 1 tokens. Then a layer's update and append
    /// are one launch, without a work list: no token overwrites a ring row that the step still reads.
    pub fn is_decode(&self) -> bool {
        self.tokens_per_request <= self.max_decode_tokens
    }
}
