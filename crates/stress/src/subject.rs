//! What is put to the test: something that answers like a cache.

use dsv4_kv::ledger::Written;
use dsv4_kv::{Accepted, BlockId, CacheConfig, KvError, LayerGroup, Ledger, RequestId};

use super::answer::{Report, TOKEN_IDS, answer};
use super::model::Model;
use super::op::{Accept, Step};

/// What a commit names.
pub(super) fn accepted(model: &Model, commit: &[Accept]) -> Vec<Accepted<'static>> {
    let one = |accept: &Accept| Accepted {
        id: model.handle(accept.request),
        accepted: accept.accepted,
        tokens: &TOKEN_IDS[..(accept.told as usize).min(TOKEN_IDS.len())],
    };
    commit.iter().map(one).collect()
}

/// A cache, or its ledger alone.
pub trait Subject {
    /// Whether it runs layers and knows buckets, and answers for them.
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

    /// Takes a request's draft layers back.
    ///
    /// # Errors
    /// The cache's refusal.
    fn rewind_draft(&mut self, id: RequestId, committed: u32) -> Result<(), KvError>;

    /// Begins a step, runs it and ends it. `model`: before the step.
    fn step(&mut self, model: &Model, step: &Step) -> Report;

    /// The block table of a request.
    fn blocks(&self, id: RequestId) -> Option<Vec<BlockId>>;

    /// Final tokens of a request in a layer group.
    fn tokens(&self, group: LayerGroup, id: RequestId) -> Option<u32>;

    /// Blocks that are free, and requests that are admitted, as the subject counts them.
    fn counts(&self) -> (u32, u32);

    /// Compares bytes with the model's; `turn` chooses which.
    ///
    /// # Errors
    /// Which bytes differ.
    fn check_bytes(&mut self, _model: &Model, _turn: u64) -> Result<(), String> {
        Ok(())
    }
}

/// The ledger alone: [`Ledger`], and each group's StepMeta in host memory.
#[derive(Debug)]
pub struct LedgerOnly {
    /// The ledger.
    pub ledger: Ledger,
    /// StepMeta, by [`LayerGroup::index`].
    pub arrays: [Vec<i32>; 2],
}

impl LedgerOnly {
    /// An empty ledger.
    ///
    /// # Errors
    /// As [`Ledger::new`].
    pub fn new(config: &CacheConfig) -> Result<Self, KvError> {
        let ledger = Ledger::new(config)?;
        let arrays = LayerGroup::ALL.map(|_| vec![0; ledger.largest_layout().elements()]);
        Ok(Self { ledger, arrays })
    }
}

impl Subject for LedgerOnly {
    const HAS_LAYERS: bool = false;

    fn admit(&mut self) -> Result<RequestId, KvError> {
        self.ledger.admit()
    }

    fn release(&mut self, id: RequestId) -> Result<(), KvError> {
        self.ledger.release(id)
    }

    fn rewind_draft(&mut self, id: RequestId, committed: u32) -> Result<(), KvError> {
        self.ledger.rewind_draft(id, committed)
    }

    fn step(&mut self, model: &Model, step: &Step) -> Report {
        let (group, requests) = (step.group, model.requests_of(step));
        let Self { ledger, arrays } = self;
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
            let result = self.ledger.commit_step(group, &accepted(model, commit));
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
        self.ledger.block_table(id).ok().map(Iterator::collect)
    }

    fn tokens(&self, group: LayerGroup, id: RequestId) -> Option<u32> {
        self.ledger.committed_in(group, id).ok()
    }

    fn counts(&self) -> (u32, u32) {
        (self.ledger.free_blocks(), self.ledger.live_requests())
    }
}
