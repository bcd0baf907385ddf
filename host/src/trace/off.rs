//! The functions of `on`, for builds without the feature `tracing`: they do nothing.

use crate::error::KvError;
use crate::ids::LayerGroup;
use crate::ledger::{Accepted, Admission, Prompt, StepPlan, StepRequest};
use crate::manager::host_tier::TierEvent;

/// Stands for a span.
#[derive(Clone)]
pub(crate) struct Span;

impl Span {
    pub fn none() -> Self {
        Self
    }

    pub fn entered(self) -> Self {
        self
    }

    pub fn in_scope<R>(&self, work: impl FnOnce() -> R) -> R {
        work()
    }
}

pub(crate) fn admission(_: Option<&Prompt<'_>>) -> Span {
    Span
}

pub(crate) fn admitted(_: &Span, _: &Result<Admission, KvError>) {}

pub(crate) fn step(_: LayerGroup, _: &[StepRequest], _: u32) -> Span {
    Span
}

pub(crate) fn begun(_: &Span, _: StepPlan) {}

pub(crate) fn rejected(_: &Span) {}

pub(crate) fn commit(_: &Span, _: &[Accepted<'_>]) -> Span {
    Span
}

pub(crate) fn tier(_: &'static str) -> Span {
    Span
}

pub(crate) fn moved(_: &TierEvent) {}

pub(crate) fn refused(_: &KvError) {}
