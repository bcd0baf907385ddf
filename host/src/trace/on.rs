//! Spans and events, told.

pub(crate) use tracing::Span;
use tracing::field::Empty;
use tracing::level_filters::{LevelFilter, STATIC_MAX_LEVEL};
use tracing::{Level, debug, debug_span};

use crate::error::KvError;
use crate::ids::LayerGroup;
use crate::ledger::{Accepted, Admission, Prompt, StepPlan, StepRequest};
use crate::manager::host_tier::TierEvent;

/// Whether anyone may want to know.
fn is_off() -> bool {
    Level::DEBUG > STATIC_MAX_LEVEL || Level::DEBUG > LevelFilter::current()
}

/// An admission.
pub(crate) fn admission(prompt: Option<&Prompt<'_>>) -> Span {
    let tokens = prompt.map(|prompt| prompt.tokens.len());
    debug_span!(target: "dsv4_kv", "admission", prompt_tokens = tokens, reused = Empty, matched = Empty)
}

/// What came of an admission.
pub(crate) fn admitted(span: &Span, result: &Result<Admission, KvError>) {
    match result {
        Ok(admission) => {
            span.record("reused", admission.reused).record("matched", admission.matched);
        }
        Err(error) => refused(error),
    }
}

/// A step that begins. `decodes`: most tokens of a request in a decode step.
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

/// What a step that has begun takes.
pub(crate) fn begun(span: &Span, plan: StepPlan) {
    span.record("new_blocks", plan.new_blocks);
}

/// A step that was dropped.
pub(crate) fn rejected(span: &Span) {
    debug!(name: "rejected", target: "dsv4_kv", parent: span, "rejected");
}

/// The commit of a step.
pub(crate) fn commit(step: &Span, accepted: &[Accepted<'_>]) -> Span {
    if is_off() {
        return Span::none();
    }
    let tokens: u64 = accepted.iter().map(|part| u64::from(part.accepted)).sum();
    debug_span!(target: "dsv4_kv", parent: step, "commit", accepted = tokens)
}

/// A call that moves prefixes.
pub(crate) fn tier(call: &'static str) -> Span {
    debug_span!(target: "dsv4_kv", "tier", call)
}

/// Something that the host tier has done.
pub(crate) fn moved(event: &TierEvent) {
    debug!(name: "moved", target: "dsv4_kv", what = ?event, "moved");
}

/// Something that was refused.
pub(crate) fn refused(error: &KvError) {
    debug!(name: "refused", target: "dsv4_kv", %error, "refused");
}
