//! Which steps and commits are refused, and why: the first reason in the documented order.

use std::collections::BTreeSet;

use dsv4_kv::error::LimitedBy;
use dsv4_kv::layer_progress::LayerProgress;
use dsv4_kv::{Bucket, CacheConfig, KvError, LayerGroup, LayerId, StepPlan, StepRequest};
use kv_layout::geometry::LayerKind;

use super::{Model, OpenPart};
use crate::answer::TOKEN_IDS;
use crate::op::{Accept, Layers, Step};

impl Model {
    /// Why the step cannot begin. `has_layers` is whether the subject supports buckets.
    pub(super) fn begin_refusal(
        &self,
        step: &Step,
        requests: &[StepRequest],
        has_layers: bool,
    ) -> Option<KvError> {
        let CacheConfig { max_requests, max_context, max_step_tokens, .. } = self.config;
        let of_cache = Bucket {
            tokens: max_step_tokens,
            tokens_per_request: max_step_tokens,
            requests: max_requests,
            context: max_context,
        };
        let group = step.group;
        if self.config.group_layers(group).is_empty() {
            return Some(KvError::NoSuchGroup { group });
        }
        match step.launches.bucket().filter(|_| has_layers) {
            None => self.step_refusal(group, requests, of_cache, LimitedBy::Cache),
            Some(bucket) => self
                .bucket_refusal(*bucket)
                .or_else(|| self.step_refusal(group, requests, *bucket, LimitedBy::Bucket)),
        }
    }

    /// Why a bucket is not valid for the cache.
    fn bucket_refusal(&self, bucket: Bucket) -> Option<KvError> {
        let CacheConfig { max_requests, max_context, max_step_tokens, .. } = self.config;
        let Bucket { tokens, tokens_per_request, requests, context } = bucket;
        // A bucket for more tokens than its requests can have is an error.
        let reachable = u64::from(requests) * u64::from(tokens_per_request);
        let most_tokens = reachable.min(max_step_tokens.into()) as u32;
        [
            ("requests", requests, max_requests),
            ("context", context, max_context),
            ("tokens_per_request", tokens_per_request, max_step_tokens),
            ("tokens", tokens, most_tokens),
        ]
        .into_iter()
        .find(|&(_, value, most)| value == 0 || value > most)
        .map(|(field, value, most)| KvError::Bucket { field, value, most })
    }

    /// Why the step does not fit into `limits`, or one of its requests cannot take part.
    fn step_refusal(
        &self,
        group: LayerGroup,
        step: &[StepRequest],
        limits: Bucket,
        by: LimitedBy,
    ) -> Option<KvError> {
        if step.len() > limits.requests as usize {
            let (requests, limit) = (step.len(), limits.requests);
            return Some(KvError::TooManyRequests { requests, limit, by });
        }
        let mut before = BTreeSet::new();
        for part in step {
            if let Some(error) = self.part_refusal(group, part, limits, by) {
                return Some(error);
            }
            if !before.insert(part.id) {
                return Some(KvError::DuplicateRequest { request: part.id });
            }
        }
        let tokens: u64 = step.iter().map(|part| u64::from(part.tokens)).sum();
        if tokens > u64::from(limits.tokens) {
            return Some(KvError::StepTooLong { tokens, limit: limits.tokens, by });
        }
        let (needed, free) = (self.plan_of(group, step).new_blocks, self.available());
        (needed > free).then_some(KvError::OutOfBlocks { needed, free })
    }

    fn part_refusal(
        &self,
        group: LayerGroup,
        part: &StepRequest,
        limits: Bucket,
        by: LimitedBy,
    ) -> Option<KvError> {
        let StepRequest { id: request, start, tokens } = *part;
        let Some(live) = self.live.get(&request) else {
            return self.check_known(request).err();
        };
        let committed = live.group(group).tokens;
        if !live.group(group).is_whole_at(committed, self.max_decode_tokens()) {
            return Some(KvError::Overwritten { request, group, committed });
        }
        if start != committed {
            return Some(KvError::WrongStart { request, committed, start });
        }
        if tokens == 0 {
            return Some(KvError::NoTokens { request });
        }
        let end = u64::from(start) + u64::from(tokens);
        if end > u64::from(limits.context) {
            return Some(KvError::ContextTooLong { request, end, limit: limits.context, by });
        }
        let limit = limits.tokens_per_request;
        (tokens > limit).then_some(KvError::ChunkTooLong { request, tokens, limit, by })
    }

    /// The plan of a step that is not refused.
    pub(super) fn plan_of(&self, group: LayerGroup, step: &[StepRequest]) -> StepPlan {
        let new = |part: &StepRequest| {
            let held = self.live.get(&part.id).map_or(0, |request| request.blocks.len() as u32);
            self.blocks_of(group, part.start + part.tokens).saturating_sub(held)
        };
        StepPlan {
            tokens: step.iter().map(|part| part.tokens).sum(),
            tokens_per_request: step.iter().map(|part| part.tokens).max().unwrap_or(0),
            requests: step.len() as u32,
            context: step.iter().map(|part| part.start + part.tokens).max().unwrap_or(0),
            new_blocks: step.iter().map(new).sum(),
            ring_copies: None,
        }
    }

    /// Number of blocks for `tokens` tokens: one entry for each four tokens, 32 entries to a block. Draft layers have
    /// no entries.
    pub(super) fn blocks_of(&self, group: LayerGroup, tokens: u32) -> u32 {
        let has_entries = self.has_entries && group == LayerGroup::Trunk;
        let newest = (tokens / 4).checked_sub(1).filter(|_| has_entries);
        newest.map_or(0, |entry| entry / 32 + 1)
    }

    /// The layer that is left out at first, if any, and the layers that are run.
    #[must_use]
    pub fn layers_of(&self, step: &Step) -> (Option<LayerId>, Vec<LayerId>) {
        let layers = self.config.group_layers(step.group);
        let (Layers::Without(at) | Layers::Unappended(at)) = step.layers else {
            let none = step.layers == Layers::None;
            return (None, layers.filter(|_| !none).map(LayerId).collect());
        };
        let Some(at) = at.checked_rem(layers.len() as u32) else { return (None, Vec::new()) };
        let left = layers.start + at;
        (Some(LayerId(left)), layers.filter(|&layer| layer != left).map(LayerId).collect())
    }

    /// Whether a kernel of a layer is queued in a step that ends without a commit.
    #[must_use]
    pub fn touches(&self, step: &Step) -> bool {
        let (left, run) = self.layers_of(step);
        // The update of a layer that has only a window queues nothing if the append is a separate launch.
        let updated = left.filter(|_| matches!(step.layers, Layers::Unappended(_)));
        let kind = |layer: LayerId| self.config.model.layers[layer.0 as usize];
        let is_one = self.is_one_launch(step);
        let half = updated.is_some_and(|layer| is_one || kind(layer) != LayerKind::Swa);
        !run.is_empty() || half || step.commits.len() > 1
    }

    /// Whether the update of a layer includes its append. All tokens of such a step can be rejected.
    fn is_one_launch(&self, step: &Step) -> bool {
        let most = step.parts.iter().map(|part| part.tokens).max().unwrap_or(0);
        let most = step.launches.bucket().map_or(most, |bucket| bucket.tokens_per_request);
        most <= self.config.max_decode_tokens()
    }

    /// The layer that prevents the first commit, and its progress.
    fn unfinished(&self, step: &Step) -> Option<(LayerId, LayerProgress)> {
        let (left, run) = self.layers_of(step);
        let first = self.config.group_layers(step.group).start;
        match step.layers {
            Layers::Unappended(_) => {
                let left = left.filter(|_| !self.is_one_launch(step));
                left.map(|layer| (layer, LayerProgress::Updated))
            }
            Layers::None | Layers::Without(_) => {
                let layer = left.or(run.is_empty().then_some(LayerId(first)));
                layer.map(|layer| (layer, LayerProgress::NotStarted))
            }
            Layers::All => None,
        }
    }

    /// Why a commit of the open step is refused. `turn` is the number of commits that were tried before.
    pub(super) fn commit_refusal(
        &self,
        step: &Step,
        (turn, commit): (usize, &[Accept]),
        has_layers: bool,
    ) -> Option<KvError> {
        let unfinished = self.unfinished(step).filter(|_| turn == 0 && has_layers);
        if let Some((layer, progress)) = unfinished {
            return Some(KvError::LayerUnfinished { layer, progress });
        }
        let group = step.group;
        let Some(open) = &self.open[group.index()] else {
            return Some(KvError::NoOpenStep { group });
        };
        if commit.len() != open.len() {
            let (named, requests) = (commit.len(), open.len());
            return Some(KvError::CommitMismatch { named, requests });
        }
        let mut before = BTreeSet::new();
        for accept in commit {
            if let Some(error) = self.accept_refusal(group, open, accept) {
                return Some(error);
            }
            let request = self.handle(accept.request);
            if !before.insert(request) {
                return Some(KvError::DuplicateRequest { request });
            }
        }
        None
    }

    fn accept_refusal(
        &self,
        group: LayerGroup,
        open: &[OpenPart],
        accept: &Accept,
    ) -> Option<KvError> {
        let (request, accepted) = (self.handle(accept.request), accept.accepted);
        let Some(live) = self.live.get(&request) else {
            return self.check_known(request).err();
        };
        let Some(part) = open.iter().find(|part| part.id == request) else {
            return Some(KvError::NotInStep { request, group });
        };
        let (written, limit) = (part.tokens, self.max_decode_tokens());
        if accepted > written {
            return Some(KvError::AcceptedTooMany { request, accepted, written });
        }
        let mut after = live.group(group);
        after.written_to = after.written_to.max(after.tokens + written);
        if !after.is_whole_at(after.tokens + accepted, limit) {
            return Some(KvError::NotRollbackable { request, accepted, written, limit });
        }
        let told = (accept.told as usize).min(TOKEN_IDS.len());
        (told != 0 && told != accepted as usize).then_some(KvError::TokenCount {
            request,
            accepted,
            given: told,
        })
    }
}
