//! The subject of a stress test: it answers like a cache.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use dsv4_kv::events::{Drained, EventBatch, EventSource};
use dsv4_kv::ledger::Written;
use dsv4_kv::reuse::{Lease, PinRefused};
use dsv4_kv::{
    Accepted, Admission, BlockId, CacheConfig, KvError, LayerGroup, Ledger, RequestId, Suspended,
};

use super::answer::{Answer, Counts, Pinned, Report, TOKEN_IDS, answer};
use super::model::Model;
use super::op::{Accept, Name, Step};
use super::reuse::Reuse;
use super::text::Text;
use super::tier::HostTier;

/// The parts of a commit; `ids` are the token ids of each part.
pub(super) fn accepted<'t>(
    model: &Model,
    commit: &[Accept],
    ids: &'t [Cow<'static, [u32]>],
) -> Vec<Accepted<'t>> {
    let one = |(accept, tokens): (&Accept, &'t Cow<'static, [u32]>)| Accepted {
        id: model.handle(accept.request),
        accepted: accept.accepted,
        tokens,
    };
    commit.iter().zip(ids).map(one).collect()
}

/// The token ids of each part of a commit: those of its text for a request that shares prefixes, else arbitrary ones.
pub(super) fn token_ids(model: &Model, commit: &[Accept]) -> Vec<Cow<'static, [u32]>> {
    let one = |accept: &Accept| {
        let told = accept.told.min(TOKEN_IDS.len() as u32);
        match model.named(accept.request).and_then(|request| Some((request, request.text()?))) {
            Some((request, text)) if told > 0 => {
                let start = request.group(LayerGroup::Trunk).tokens;
                Cow::Owned(text.tokens(start..start + told))
            }
            _ => Cow::Borrowed(&TOKEN_IDS[..told as usize]),
        }
    };
    commit.iter().map(one).collect()
}

/// A cache, or its ledger alone.
pub trait Subject {
    /// Whether it runs layers and supports buckets, with the errors of a cache.
    const HAS_LAYERS: bool;

    /// Admits a request.
    ///
    /// # Errors
    /// The cache's refusal.
    fn admit(&mut self) -> Result<RequestId, KvError>;

    /// Releases a request.
    ///
    /// # Errors
    /// The cache's refusal.
    fn release(&mut self, id: RequestId) -> Result<(), KvError>;

    /// Rewinds a request's draft layers.
    ///
    /// # Errors
    /// The cache's refusal.
    fn rewind_draft(&mut self, id: RequestId, committed: u32) -> Result<(), KvError>;

    /// Begins a step, runs it and ends it. `model` is the model before the step.
    fn step(&mut self, model: &Model, step: &Step) -> Report;

    /// The block table of a request.
    fn blocks(&self, id: RequestId) -> Option<Vec<BlockId>>;

    /// Final tokens of a request in a layer group.
    fn tokens(&self, group: LayerGroup, id: RequestId) -> Option<u32>;

    /// Number of free blocks and of admitted requests, as the subject counts them.
    fn counts(&self) -> (u32, u32);

    /// The subject's operations on shared prefixes.
    fn reuse(&mut self) -> &mut dyn Reuse;

    /// The subject's operations on its host tier; `None` if there is none.
    fn tier(&mut self) -> Option<&mut dyn HostTier> {
        None
    }

    /// Compares bytes in memory with those of the model; `turn` selects which.
    ///
    /// # Errors
    /// Which bytes differ.
    fn check_bytes(&mut self, _model: &Model, _turn: u64) -> Result<(), String> {
        Ok(())
    }
}

/// The ledger alone: [`Ledger`], and the StepMeta of each group in host memory.
#[derive(Debug)]
pub struct LedgerOnly {
    /// The ledger.
    pub ledger: Ledger,
    /// StepMeta, by [`LayerGroup::index`].
    pub arrays: [Vec<i32>; 2],
    /// Suspended requests.
    pub suspended: BTreeMap<Name, Suspended>,
    /// Leases that were not ended by their holder; some may have expired.
    pub leases: BTreeMap<Name, Lease>,
    /// Maps handles of another ledger to those of this one. A rank that receives the operations of another rank needs
    /// it.
    pub ids: HashMap<RequestId, RequestId>,
}

impl LedgerOnly {
    /// An empty ledger.
    ///
    /// # Errors
    /// As [`Ledger::new`].
    pub fn new(config: &CacheConfig) -> Result<Self, KvError> {
        let ledger = Ledger::new(config)?;
        let arrays = LayerGroup::ALL.map(|_| vec![0; ledger.largest_layout().elements()]);
        let (suspended, leases, ids) = (BTreeMap::new(), BTreeMap::new(), HashMap::new());
        Ok(Self { ledger, arrays, suspended, leases, ids })
    }

    /// The handle in this ledger.
    fn own(&self, id: RequestId) -> RequestId {
        self.ids.get(&id).copied().unwrap_or(id)
    }
}

impl Subject for LedgerOnly {
    const HAS_LAYERS: bool = false;

    fn admit(&mut self) -> Result<RequestId, KvError> {
        self.ledger.admit()
    }

    fn release(&mut self, id: RequestId) -> Result<(), KvError> {
        self.ledger.release(self.own(id))
    }

    fn rewind_draft(&mut self, id: RequestId, committed: u32) -> Result<(), KvError> {
        self.ledger.rewind_draft(self.own(id), committed)
    }

    fn step(&mut self, model: &Model, step: &Step) -> Report {
        let (group, mut requests) = (step.group, model.requests_of(step));
        requests.iter_mut().for_each(|part| part.id = self.own(part.id));
        let Self { ledger, arrays, .. } = self;
        let begun = ledger.begin_step(group, &requests, &mut arrays[group.index()]);
        let array = Some(arrays[group.index()].clone());
        let plan = match begun {
            Ok(plan) => plan,
            Err(error) => return Report::refused(&error, array),
        };
        let mut report = Report {
            array,
            free: Some(ledger.free_blocks()),
            releases: requests.iter().map(|part| answer(ledger.release(part.id))).collect(),
            ..Report::begun(Ok(plan))
        };
        let meanwhile = step.meanwhile().map(|other| Box::new(self.step(model, other)));
        report.meanwhile = meanwhile;
        for commit in &step.commits {
            let result = {
                let ids = token_ids(model, commit);
                let mut accepted = accepted(model, commit, &ids);
                accepted.iter_mut().for_each(|part| part.id = self.own(part.id));
                self.ledger.commit_step(group, &accepted)
            };
            report.commits.push(answer(result));
            if report.commits.last().is_some_and(Result::is_ok) {
                return report;
            }
        }
        let touched = model.touches(step);
        self.ledger.reject_step(group, if touched { Written::Rows } else { Written::Nothing });
        report
    }

    fn blocks(&self, id: RequestId) -> Option<Vec<BlockId>> {
        self.ledger.block_table(self.own(id)).ok().map(Iterator::collect)
    }

    fn tokens(&self, group: LayerGroup, id: RequestId) -> Option<u32> {
        self.ledger.committed_in(group, self.own(id)).ok()
    }

    fn counts(&self) -> (u32, u32) {
        (self.ledger.free_blocks(), self.ledger.live_requests())
    }

    fn reuse(&mut self) -> &mut dyn Reuse {
        self
    }
}

/// Calls `with` with the prompt of a text.
pub(super) fn told<T>(text: &Text, with: impl FnOnce(&dsv4_kv::Prompt<'_>) -> T) -> T {
    let tokens = text.tokens(0..text.prompt_tokens());
    with(&Text::prompt(&tokens, &[text.salt]))
}

impl Reuse for LedgerOnly {
    fn admit_with(&mut self, text: &Text) -> Result<Admission, KvError> {
        told(text, |prompt| self.ledger.admit_with(prompt))
    }

    fn fork(&mut self, of: RequestId) -> Result<RequestId, KvError> {
        self.ledger.fork(self.own(of))
    }

    fn suspend(&mut self, name: Name, id: RequestId) -> Result<(), KvError> {
        let suspended = self.ledger.suspend(self.own(id))?;
        self.suspended.insert(name, suspended);
        Ok(())
    }

    fn resume(&mut self, name: Name) -> Option<Answer<RequestId>> {
        let suspended = self.suspended.remove(&name)?;
        Some(self.ledger.resume(suspended).map_err(|refused| {
            let text = format!("{:?}", refused.error());
            self.suspended.insert(name, refused.into_suspended());
            text
        }))
    }

    fn discard(&mut self, name: Name) -> bool {
        let suspended = self.suspended.remove(&name);
        suspended.is_some_and(|suspended| self.ledger.discard(suspended).is_ok())
    }

    fn pin(&mut self, lease: Name, text: &Text, until: Duration) -> Result<Pinned, PinRefused> {
        let pinned = told(text, |prompt| self.ledger.pin(prompt, until))?;
        let what = (pinned.tokens(), pinned.bytes());
        self.leases.insert(lease, pinned);
        Ok(what)
    }

    fn unpin(&mut self, lease: Name) -> bool {
        let lease = self.leases.remove(&lease);
        lease.is_some_and(|lease| self.ledger.unpin(lease))
    }

    fn expire(&mut self, now: Duration) -> usize {
        self.ledger.expire(now)
    }

    fn own_blocks(&self, id: RequestId) -> Option<Vec<bool>> {
        self.ledger.own_blocks(self.own(id)).ok().map(Iterator::collect)
    }

    fn counts(&self) -> Counts {
        counts(&self.ledger)
    }

    fn drain(&mut self, batch: &mut EventBatch) -> Drained {
        self.ledger.drain_events(batch)
    }

    fn snapshot(&mut self) -> EventBatch {
        self.ledger.snapshot_events()
    }

    fn resident(&self) -> EventBatch {
        self.ledger.resident_events()
    }

    fn audit(&self) -> Result<(), String> {
        self.ledger.audit()
    }
}

/// The counts of a ledger.
pub(super) fn counts(ledger: &Ledger) -> Counts {
    let tree = ledger.tree_counts();
    Counts {
        free: ledger.free_blocks(),
        tree: tree.blocks,
        evictable: tree.evictable_blocks,
        free_checkpoints: ledger.free_checkpoints(),
        tree_checkpoints: tree.checkpoints,
        outputs: ledger.output_checkpoints(),
        evicted: ledger.reuse_stats().evicted_blocks,
    }
}
