//! Applies the operations of a script to a subject and to the model, and compares them after every operation.

mod tier;

use std::collections::BTreeMap;
use std::time::Duration;

use dsv4_kv::events::{Drained, EventBatch};
use dsv4_kv::{KvError, LayerGroup};
use serde::Serialize;

use super::answer::{Counts as Counted, Report};
use super::index::Index;
use super::model::Model;
use super::op::{Launches, Op, Step, TierOp};
use super::subject::Subject;
use super::tier::HostTier;

/// The first difference between a subject and its model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Divergence {
    /// Number of the operation, from 0.
    pub op: u64,
    /// The difference.
    pub what: String,
}

/// The error if a script has an operation on shared prefixes, and the cache does not share prefixes.
const NO_PREFIXES: &str = "prefixes are not shared here";

/// Operations between two comparisons of the events with the contents of the prefix tree.
const RESIDENT: u64 = 64;

/// Counts by name: answers of each kind, tokens, rejected tokens.
pub type Counts = BTreeMap<String, u64>;

/// A subject and its model, which run the same operations.
pub struct Run<S> {
    subject: S,
    model: Model,
    /// The blocks that exist according to the events.
    index: Index,
    batch: EventBatch,
    /// Counts so far.
    pub counts: Counts,
    ops: u64,
    /// Whether the last operation was refused.
    refused: bool,
    /// Whether the last operation entered a prefix that has arrived, even if it was refused.
    moved: bool,
}

impl<S: Subject> Run<S> {
    /// An empty cache and its model.
    pub fn new(subject: S, model: Model) -> Self {
        let batch = EventBatch::with_capacity(model.config().event_capacity);
        let (index, counts) = (Index::default(), Counts::new());
        Self { subject, model, index, batch, counts, ops: 0, refused: false, moved: false }
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The subject.
    pub fn subject(&self) -> &S {
        &self.subject
    }

    /// Number of operations so far.
    pub fn ops(&self) -> u64 {
        self.ops
    }

    /// Applies one operation to both, and compares everything.
    ///
    /// # Errors
    /// [`Divergence`].
    pub fn apply(&mut self, op: &Op) -> Result<(), Divergence> {
        let turn = self.ops;
        self.ops += 1;
        let result = self
            .judge(op)
            .and_then(|()| self.settle())
            .and_then(|()| self.conserve())
            .and_then(|()| self.conserve_shared())
            .and_then(|()| self.check_events())
            .and_then(|()| self.subject.check_bytes(&self.model, turn));
        result.map_err(|what| Divergence { op: turn, what })
    }

    /// Releases every request, suspended ones too, and ends all leases. Then all blocks must be free or evictable.
    ///
    /// # Errors
    /// [`Divergence`].
    pub fn drain(&mut self) -> Result<(), Divergence> {
        let names: Vec<_> = self.model.live().map(|(_, request)| request.name).collect();
        names.into_iter().try_for_each(|name| self.apply(&Op::Release(name)))?;
        if self.model.has_tier() {
            self.apply(&Op::Tier(TierOp::Settle))?;
        }
        let names: Vec<_> = self.model.suspended().collect();
        names.into_iter().try_for_each(|name| self.apply(&Op::Discard(name)))?;
        if self.model.shares() {
            self.apply(&Op::Expire(u64::MAX))?;
        }
        // Blocks without a reference stay in the tree until room is needed.
        let kept = self.subject.reuse().counts().evictable;
        let (idle, total) = (self.subject.counts(), self.model.config().num_blocks);
        if idle == (total - kept, 0) {
            return Ok(());
        }
        let what = format!("an idle cache counts {idle:?} free blocks and requests of {total}");
        Err(Divergence { op: self.ops, what })
    }

    fn judge(&mut self, op: &Op) -> Result<(), String> {
        (self.refused, self.moved) = (false, false);
        match op {
            Op::Admit(name) => {
                let got = self.subject.admit();
                self.count("admit", &answer_name(&got));
                self.model.admitted(*name, got)
            }
            Op::Release(name) => {
                let got = self.subject.release(self.model.handle(*name));
                self.count("release", &answer_name(&got));
                self.model.released(*name, got)
            }
            Op::RewindDraft { request, committed } => {
                let got = self.subject.rewind_draft(self.model.handle(*request), *committed);
                self.count("rewind", &answer_name(&got));
                self.model.rewound(*request, *committed, got)
            }
            Op::Step(step) => {
                let report = self.subject.step(&self.model, step);
                self.count_step(step, &report);
                self.refused = report.begun.is_err();
                self.model.stepped(step, &report, S::HAS_LAYERS)
            }
            Op::AdmitWith { request, text } => self.judge_admission(*request, text, false),
            Op::Tier(op) => self.judge_tier(op),
            _ => self.judge_reuse(op),
        }
    }

    /// As `Self::judge`, for operations on shared prefixes, copies and suspended requests. Copies and suspended
    /// requests also exist in caches that share no prefixes.
    fn judge_reuse(&mut self, op: &Op) -> Result<(), String> {
        let Self { subject, model, .. } = self;
        if matches!(op, Op::Pin { .. } | Op::Unpin(_) | Op::Expire(_)) && !model.shares() {
            return Err(NO_PREFIXES.into());
        }
        let reuse = subject.reuse();
        let (what, refused, result) = match op {
            Op::Fork { of, request, answer } => {
                let got = reuse.fork(model.handle(*of));
                let refused = answer_name(&got);
                let blocks = got.as_ref().ok().and_then(|&id| subject.blocks(id));
                ("fork", refused, model.forked((*of, *request), *answer, got, blocks))
            }
            Op::Suspend(name) => {
                let got = reuse.suspend(*name, model.handle(*name));
                ("suspend", answer_name(&got), model.was_suspended(*name, got))
            }
            Op::Resume(name) => {
                let got = reuse.resume(*name);
                let refused = got.as_ref().map_or(Some("NoSuchName".into()), refusal);
                ("resume", refused, model.resumed(*name, got))
            }
            Op::Discard(name) => ("discard", None, model.discarded(*name, reuse.discard(*name))),
            Op::Pin { lease, text, until } => {
                let until = Duration::from_secs(*until);
                let got = reuse.pin(*lease, text, until);
                let refused = refusal(&got.map_err(|error| format!("{error:?}")));
                ("pin", refused, model.pinned(*lease, (text, until), got))
            }
            Op::Unpin(name) => ("unpin", None, model.unpinned(*name, reuse.unpin(*name))),
            Op::Expire(now) => {
                let now = Duration::from_secs(*now);
                ("expire", None, model.expired(now, reuse.expire(now)))
            }
            _ => return Ok(()),
        };
        self.refused = refused.is_some();
        self.count(what, &refused);
        result
    }

    /// Tells the model which blocks moved to the prefix tree.
    fn settle(&mut self) -> Result<(), String> {
        let Self { subject, model, .. } = self;
        let reuse = subject.reuse();
        model.settle(&|id| reuse.own_blocks(id))
    }

    /// Checks that no block is lost, that none has two owners, and that the counts of shared blocks and checkpoints add
    /// up.
    fn conserve_shared(&mut self) -> Result<(), String> {
        let Self { subject, model, .. } = self;
        let (free, _) = subject.counts();
        let reuse = subject.reuse();
        for (id, request) in model.live() {
            let got = reuse.own_blocks(id).unwrap_or_default();
            let want: Vec<_> =
                (0..request.blocks.len() as u32).map(|at| request.is_own(at)).collect();
            if got != want {
                return Err(format!("{id} has {got:?} of its blocks alone, should have {want:?}"));
            }
        }
        let counts = Counted { free, ..reuse.counts() };
        reuse.audit()?;
        self.counts.insert("blocks evicted".to_owned(), counts.evicted);
        let seen = subject.tier().filter(|_| model.has_tier()).map(HostTier::seen);
        let is_moving = seen.as_ref().is_some_and(|seen| seen.is_moving);
        model.conserved(counts, self.refused && !self.moved, is_moving)?;
        let (Some(seen), Some(tier)) = (seen, subject.tier()) else { return Ok(()) };
        model.check_tier(&seen)?;
        tier.audit()
    }

    /// Checks the blocks that exist according to the events.
    fn check_events(&mut self) -> Result<(), String> {
        let Self { subject, model, index, batch, ops, .. } = self;
        let reuse = subject.reuse();
        let drained = reuse.drain(batch);
        if (drained != Drained::Off) != (model.shares() && model.config().event_capacity > 0) {
            return Err(format!("events are {drained:?}"));
        }
        match drained {
            Drained::Off => return Ok(()),
            Drained::Events => index.apply(batch)?,
            Drained::Overflowed => *index = Index::of(&reuse.snapshot())?,
        }
        if ops.is_multiple_of(RESIDENT) {
            let resident = Index::of(&reuse.resident())?;
            if *index != resident {
                return Err(format!("events say that {index:?} is there, and {resident:?} is"));
            }
        }
        model.judge_events(&index.prefixes())?;
        match drained {
            Drained::Overflowed => self.add("event logs that overflowed", 1),
            _ if !self.batch.is_empty() => self.add("batches of events", 1),
            _ => {}
        }
        Ok(())
    }

    /// Counts the outcome of a step.
    fn count_step(&mut self, step: &Step, report: &Report) {
        let group = step.group;
        self.count(&format!("{group} step"), &refusal(&report.begun));
        let Ok(plan) = &report.begun else { return };
        match step.launches {
            Launches::Eager => {}
            Launches::Bucket(_) => self.add("steps in a bucket", 1),
            Launches::Replay(_) => self.add("steps in a captured bucket", 1),
        }
        if let (Some(other), Some(report)) = (step.meanwhile(), &report.meanwhile) {
            self.add("steps during another", 1);
            self.count_step(other, report);
        }
        for (commit, got) in step.commits.iter().zip(&report.commits) {
            self.count("commit", &refusal(got));
            if got.is_ok() {
                let accepted: u64 = commit.iter().map(|part| u64::from(part.accepted)).sum();
                self.add("tokens accepted", accepted);
                self.add("tokens rejected", u64::from(plan.tokens).saturating_sub(accepted));
                return;
            }
        }
        let touched = if self.model.touches(step) { "after kernels" } else { "untouched" };
        self.add(&format!("dropped {touched}"), 1);
        self.add("blocks given back by a drop", plan.new_blocks.into());
    }

    /// Checks that every request exists, with its blocks, and with as many tokens as its history.
    fn conserve(&self) -> Result<(), String> {
        let (_, live) = self.subject.counts();
        if live as usize != self.model.live().len() {
            return Err(format!("{live} requests are live, should be {}", self.model.live().len()));
        }
        for (id, request) in self.model.live() {
            let blocks = self.subject.blocks(id).ok_or_else(|| format!("{id} has no table"))?;
            if blocks != request.blocks {
                return Err(format!("{id} holds {blocks:?}, should hold {:?}", request.blocks));
            }
            for group in LayerGroup::ALL {
                let (got, want) = (self.subject.tokens(group, id), request.group(group).tokens);
                if got != Some(want) {
                    return Err(format!("{id} has {got:?} {group} tokens, should have {want}"));
                }
            }
        }
        Ok(())
    }

    fn count(&mut self, what: &str, refused: &Option<String>) {
        match refused {
            None => self.add(what, 1),
            Some(name) => self.add(&format!("{what} refused: {name}"), 1),
        }
    }

    fn add(&mut self, what: &str, count: u64) {
        match self.counts.get_mut(what) {
            Some(total) => *total += count,
            None => {
                self.counts.insert(what.to_owned(), count);
            }
        }
    }
}

/// The name of the error, if it is one.
fn answer_name<T>(got: &Result<T, KvError>) -> Option<String> {
    refusal(&got.as_ref().map_err(|error| format!("{error:?}")))
}

fn refusal<T, E: AsRef<str>>(got: &Result<T, E>) -> Option<String> {
    let error = got.as_ref().err()?.as_ref();
    error.split(|c: char| !c.is_alphanumeric()).next().map(str::to_owned)
}
