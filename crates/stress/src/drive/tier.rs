//! Applies admissions with a prompt, and operations on the host tier.

use dsv4_kv::{TierEvent, TierMiss};

use super::{NO_PREFIXES, Run, answer_name};
use crate::op::{Name, TierOp};
use crate::subject::Subject;
use crate::text::Text;

/// The error if a script has an operation on a host tier, and the cache has none.
const NO_TIER: &str = "there is no host tier here";

impl<S: Subject> Run<S> {
    /// Admits a request with a prompt. If `waits`, the admission waits until the prefix that host memory has is on the
    /// device.
    pub(super) fn judge_admission(
        &mut self,
        name: Name,
        text: &Text,
        waits: bool,
    ) -> Result<(), String> {
        let Self { subject, model, .. } = self;
        let mut there = 0;
        let got = if waits {
            let tier = subject.tier().filter(|_| model.has_tier()).ok_or(NO_TIER)?;
            there = tier.there(text);
            model.found(text, there)?;
            tier.admit_waiting(text)
        } else {
            model.shares().then(|| subject.reuse()).ok_or(NO_PREFIXES)?.admit_with(text)
        };
        let blocks = got.as_ref().ok().and_then(|admission| subject.blocks(admission.id));
        let refused = answer_name(&got);
        let reused = got.as_ref().ok().map(|admission| admission.reused);
        let events = self.events();
        let Self { model, .. } = self;
        if waits {
            model.waited((name, text), there, reused, &events)?;
        } else {
            model.moved(&events, true)?;
        }
        model.admitted_with(name, text, got, &blocks.unwrap_or_default())?;
        self.refused = refused.is_some();
        self.count(if waits { "admit and wait" } else { "admit with a prompt" }, &refused);
        self.add("tokens reused", reused.unwrap_or(0).into());
        Ok(())
    }

    /// Applies an operation on the host tier.
    pub(super) fn judge_tier(&mut self, op: &TierOp) -> Result<(), String> {
        if let TierOp::AdmitWaiting { request, text } = op {
            return self.judge_admission(*request, text, true);
        }
        let Self { subject, model, .. } = self;
        let tier = subject.tier().filter(|_| model.has_tier()).ok_or(NO_TIER)?;
        let (what, refused) = match op {
            TierOp::Prefetch { name, text } => {
                let there = tier.there(text);
                model.found(text, there)?;
                let got = tier.prefetch(*name, text);
                let events = self.events();
                self.model.prefetched((*name, text), there, &got, &events)?;
                match got {
                    Ok(true) => ("prefetch", None),
                    Ok(false) => ("prefetch of nothing", None),
                    Err(_) => ("prefetch", answer_name(&got)),
                }
            }
            TierOp::Cancel(name) => {
                let got = tier.cancel(*name);
                let events = self.events();
                self.model.cancelled(*name, got, &events)?;
                (if got { "cancel" } else { "cancel of nothing" }, None)
            }
            TierOp::Advance | TierOp::Settle => {
                let settles = *op == TierOp::Settle;
                let got = if settles { tier.settle() } else { tier.advance() };
                let (refused, events) = (answer_name(&got), self.events());
                self.model.advanced(got, &events, settles)?;
                (if settles { "settle" } else { "advance" }, refused)
            }
            TierOp::CatchUp | TierOp::AdmitWaiting { .. } => {
                tier.catch_up();
                model.caught_up();
                ("catch up", None)
            }
        };
        self.refused = refused.is_some();
        self.count(what, &refused);
        Ok(())
    }

    /// The events of the tier since the last call.
    fn events(&mut self) -> Vec<TierEvent> {
        let tier = self.subject.tier().filter(|_| self.model.has_tier());
        let events = tier.map_or(Vec::new(), |tier| tier.seen().events);
        for event in &events {
            match event {
                TierEvent::Stored { blocks, .. } => {
                    self.add("checkpoints stored", 1);
                    self.add("blocks stored", (*blocks).into());
                }
                TierEvent::Restored { blocks, .. } => {
                    self.add("checkpoints restored", 1);
                    self.add("blocks restored", (*blocks).into());
                }
                TierEvent::Missed { miss } => self.add(&format!("not moved: {miss:?}"), 1),
            }
        }
        let stays = |event: &TierEvent| matches!(event, TierEvent::Missed { miss } if *miss == TierMiss::NoRoomOnDevice);
        self.moved |= !events.iter().all(stays);
        events
    }
}
