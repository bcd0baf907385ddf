//! Spans and events, for builds with the feature `tracing`.

pub(crate) use tracing::Span;
use tracing::field::Empty;
use tracing::level_filters::{LevelFilter, STATIC_MAX_LEVEL};
use tracing::{Level, debug, debug_span};

use crate::error::KvError;
use crate::ids::LayerGroup;
use crate::ledger::{Accepted, Admission, Prompt, StepPlan, StepRequest};
use crate::manager::host_tier::TierEvent;

/// Whether no subscriber wants level `DEBUG`.
fn is_off() -> bool {
    Level::DEBUG > STATIC_MAX_LEVEL || Level::DEBUG > LevelFilter::current()
}

/// The span of an admission.
pub(crate) fn admission(prompt: Option<&Prompt<'_>>) -> Span {
    let tokens = prompt.map(|prompt| prompt.tokens.len());
    debug_span!(target: "dsv4_kv", "admission", prompt_tokens = tokens, reused = Empty, matched = Empty)
}

/// Records the result of an admission.
pub(crate) fn admitted(span: &Span, result: &Result<Admission, KvError>) {
    match result {
        Ok(admission) => {
            span.record("reused", admission.reused).record("matched", admission.matched);
        }
        Err(error) => refused(error),
    }
}

/// The span of a step that begins. `decodes`: most tokens of a request in a decode step.
pub(crate) fn step(group: LayerGroup, requests: &[StepRequest], decodes: u32) -> Span {
    if is_off() {
        return Span::none();
    }
    let tokens: u64 = requests.iter().map(|part| u64::from(part.tokens)).sum();
    let requested = requests.len();
    if requests.iter().all(|part| part.tokens <= decodes) {
        debug_span!(target: "dsv4_kv", "decode", %group, requests = requested, tokens, new_blocks = Empty)
    } else {
        debug_span!(target: "dsv4_kv", "prefill", %group, requests = requested, tokens, new_blocks = Empty)
    }
}

/// Records the blocks that a step took when it began.
pub(crate) fn begun(span: &Span, plan: StepPlan) {
    span.record("new_blocks", plan.new_blocks);
}

/// The event of a step that was dropped.
pub(crate) fn rejected(span: &Span) {
    debug!(name: "rejected", target: "dsv4_kv", parent: span, "rejected");
}

/// The span of the commit of a step.
pub(crate) fn commit(step: &Span, accepted: &[Accepted<'_>]) -> Span {
    if is_off() {
        return Span::none();
    }
    let tokens: u64 = accepted.iter().map(|part| u64::from(part.accepted)).sum();
    debug_span!(target: "dsv4_kv", parent: step, "commit", accepted = tokens)
}

/// The span of a call that moves prefixes.
pub(crate) fn tier(call: &'static str) -> Span {
    debug_span!(target: "dsv4_kv", "tier", call)
}

/// An event of the host tier.
pub(crate) fn moved(event: &TierEvent) {
    debug!(name: "moved", target: "dsv4_kv", what = ?event, "moved");
}

/// The event of an admission, step or commit that returns an error.
pub(crate) fn refused(error: &KvError) {
    debug!(name: "refused", target: "dsv4_kv", %error, "refused");
}
