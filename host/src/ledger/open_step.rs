//! The types that describe a step to the ledger: its requests, the open step, and its outcome; the largest layout of
//! its StepMeta.

use serde::Serialize;

use crate::bucket::Bucket;
use crate::checkpoints::CheckpointStorage;
use crate::config::CacheConfig;
use crate::ids::{LayerGroup, RequestId, SlotId};
use crate::step_meta::StepLayout;

/// The part of one request in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct StepRequest {
    /// The request.
    #[serde(skip)]
    pub id: RequestId,
    /// Tokens that the request has in the step's layer group before the step. Any other number is refused.
    pub start: u32,
    /// Tokens it adds: 1 in decode, a chunk in prefill, drafts + 1 in verification.
    pub tokens: u32,
}

/// The tokens of one request that become final when its step is committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accepted<'t> {
    /// The request.
    pub id: RequestId,
    /// Number of its tokens in the step that become final, counted from the first.
    pub accepted: u32,
    /// Token ids of those, for later reuse of the prefix: `accepted` of them, or none if the caller
    /// does not pass them.
    pub tokens: &'t [u32],
}

impl Accepted<'_> {
    /// The first `accepted` tokens of `id` become final; their token ids are not given.
    #[must_use]
    pub const fn count(id: RequestId, accepted: u32) -> Self {
        Self { id, accepted, tokens: &[] }
    }
}

/// Sizes of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    /// Tokens of all requests.
    pub tokens: u32,
    /// Most tokens of one request.
    pub tokens_per_request: u32,
    /// Requests that take part.
    pub requests: u32,
    /// Tokens of its longest request after the step.
    pub context: u32,
    /// Blocks taken for the step.
    pub new_blocks: u32,
    /// `Some` if the step may write checkpoints: the number of them that need rows copied from the rings
    /// before the step.
    pub ring_copies: Option<u32>,
}

impl StepPlan {
    /// Layout of its StepMeta if launches cover exactly the tokens of the step.
    #[must_use]
    pub const fn layout(self) -> StepLayout {
        self.layout_of(self.tokens)
    }

    const fn layout_of(self, tokens: u32) -> StepLayout {
        let layout = StepLayout::new(tokens, self.new_blocks);
        match self.ring_copies {
            None => layout,
            Some(copies) => layout.saving(copies),
        }
    }

    /// Layout of its StepMeta if launches cover the tokens of `bucket`; without a bucket, as [`Self::layout`].
    pub(crate) fn layout_in(self, bucket: Option<&Bucket>) -> StepLayout {
        bucket.map_or(self.layout(), |bucket| self.layout_of(bucket.tokens))
    }
}

/// Whether kernels may have written rows of a step that is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// No kernel of a layer was queued.
    Nothing,
    /// A kernel of a layer was queued.
    Rows,
}

/// Whether steps of a group can write checkpoints: only those of the trunk, in a cache with checkpoints.
pub(crate) fn may_save(group: LayerGroup, config: &CacheConfig) -> bool {
    group == LayerGroup::Trunk && config.num_checkpoints > 0
}

/// The largest layout of the StepMeta of a group's steps.
pub(crate) fn largest_layout(group: LayerGroup, config: &CacheConfig) -> StepLayout {
    let layout = StepLayout::largest(config.max_step_tokens, config.max_requests);
    // One copy per request at most: only its first checkpoint in a step has rows from before the step.
    if may_save(group, config) { layout.saving(config.max_requests) } else { layout }
}

/// The step that a group runs, if any.
#[derive(Debug, Serialize)]
pub(super) struct OpenStep {
    pub is_open: bool,
    /// The slot of each of its requests.
    pub slots: Vec<SlotId>,
    /// The slots that took blocks, and how many. The number of blocks before the step would not do: a step
    /// of the other group may take more while this one is open.
    pub taken: Vec<(SlotId, u32)>,
    /// Checkpoints that its kernels write.
    pub saving: Vec<OpenSave>,
}

/// A request that a step saves in a checkpoint.
#[derive(Debug, Serialize)]
pub(super) struct OpenSave {
    pub slot: SlotId,
    pub boundary: u32,
    pub storage: CheckpointStorage,
}

/// A checkpoint that a step is to write.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlannedSave {
    pub slot: SlotId,
    pub boundary: u32,
    /// Index in the step of the first token of its request; `start` is the position of that token.
    pub token: u32,
    pub start: u32,
}

/// A request that needs more blocks than it holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Growth {
    pub slot: SlotId,
    pub held: u32,
    pub needed: u32,
}

impl OpenStep {
    /// No open step; capacity for a step of `requests` requests that writes `checkpoints` checkpoints.
    pub fn new(requests: u32, checkpoints: u32) -> Self {
        let room = requests as usize;
        Self {
            is_open: false,
            slots: Vec::with_capacity(room),
            taken: Vec::with_capacity(room),
            saving: Vec::with_capacity(checkpoints as usize),
        }
    }
}
