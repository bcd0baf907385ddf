//! Ranks of one model whose caches receive the same calls must have equal bookkeeping, block for block, so that ranks
//! need not exchange anything else. The test runs two ledgers beside the stress test's model. The second ledger has its
//! own handles of the first one's requests.

use std::time::Duration;

use dsv4_kv::events::{Drained, EventBatch, EventSource};
use dsv4_kv::reuse::PinRefused;
use dsv4_kv::{Admission, BlockId, CacheConfig, KvError, LayerGroup, RequestId};
use dsv4_kv_stress::answer::{Answer, Counts, Pinned, Report};
use dsv4_kv_stress::drive::{Counts as Happened, Divergence};
use dsv4_kv_stress::generate::reuse::reuse_config;
use dsv4_kv_stress::generate::{Manners, config};
use dsv4_kv_stress::model::Model;
use dsv4_kv_stress::op::{Name, Step};
use dsv4_kv_stress::random_run;
use dsv4_kv_stress::reuse::Reuse;
use dsv4_kv_stress::subject::{LedgerOnly, Subject};
use dsv4_kv_stress::text::Text;
use serde_json::Value;

/// Operations between two comparisons of the whole state of the ledgers.
const WHOLE: u64 = 512;

/// The difference between the calls of the two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Nothing,
    /// The second rank misses every 50th release.
    ReleaseMissed,
    /// The second rank gets no prompts.
    PromptsMissed,
    /// The second rank expires leases with an earlier time.
    ClockBehind,
    /// The second rank misses steps that are begun and dropped.
    DropMissed,
}

/// Two ranks; the model follows the first.
struct Ranks {
    first: LedgerOnly,
    second: LedgerOnly,
    fault: Fault,
    calls: u64,
    /// The first difference between two answers.
    trouble: Option<String>,
}

impl Ranks {
    fn new(config: &CacheConfig, fault: Fault) -> Self {
        let rank = || LedgerOnly::new(config).unwrap();
        Self { first: rank(), second: rank(), fault, calls: 0, trouble: None }
    }

    fn differ(&mut self, what: &str, first: impl std::fmt::Debug, second: impl std::fmt::Debug) {
        self.trouble.get_or_insert(format!("{what}: {first:?} and {second:?}"));
    }

    fn same<T: PartialEq + std::fmt::Debug>(&mut self, what: &str, first: T, second: T) {
        if first != second {
            self.differ(what, first, second);
        }
    }

    /// Compares two answers to an admission. If both ledgers admitted the request, the slots must be equal, and the
    /// second ledger's handle is recorded.
    fn entered<E: std::fmt::Debug>(
        &mut self,
        what: &str,
        first: Result<RequestId, E>,
        second: Result<RequestId, E>,
    ) -> Result<RequestId, E> {
        match (&first, &second) {
            (Ok(first), Ok(second)) => {
                self.same(what, first.slot(), second.slot());
                self.second.ids.insert(*first, *second);
            }
            (Err(_), Err(_)) => {}
            _ => self.differ(what, &first, &second),
        }
        first
    }

    fn same_report(&mut self, first: &Report, second: &Report) {
        self.same("plans", first.begun.as_ref().ok(), second.begun.as_ref().ok());
        self.same("StepMeta", &first.array, &second.array);
        self.same("free blocks in a step", first.free, second.free);
        let ok = |answers: &[Answer<()>]| answers.iter().map(Result::is_ok).collect::<Vec<_>>();
        self.same("releases in a step", ok(&first.releases), ok(&second.releases));
        self.same("commits", ok(&first.commits), ok(&second.commits));
        match (&first.meanwhile, &second.meanwhile) {
            (Some(first), Some(second)) => self.same_report(first, second),
            (first, second) => self.same("steps in a step", first.is_some(), second.is_some()),
        }
    }

    /// Compares everything that can be read of the live requests.
    fn same_requests(&mut self, model: &Model) {
        let ids: Vec<_> = model.live().map(|(id, _)| id).collect();
        for id in ids {
            let (first, second) = (&self.first, &self.second);
            let tables = (first.blocks(id), second.blocks(id));
            let owned = (first.own_blocks(id), second.own_blocks(id));
            let tokens =
                [first, second].map(|rank| LayerGroup::ALL.map(|group| rank.tokens(group, id)));
            self.same("block tables", tables.0, tables.1);
            self.same("own blocks", owned.0, owned.1);
            self.same("final tokens", tokens[0], tokens[1]);
        }
    }

    fn same_books(&mut self) {
        let counts = [&self.first, &self.second].map(Subject::counts);
        self.same("counts", counts[0], counts[1]);
        let shared = [&self.first, &self.second].map(|rank| format!("{:?}", Reuse::counts(rank)));
        self.same("shared", &shared[0], &shared[1]);
        let reused = [&self.first, &self.second].map(|rank| {
            let stats = rank.ledger.reuse_stats();
            (stats.hits, stats.reused, stats.evicted_blocks, stats.evicted_checkpoints)
        });
        self.same("reused", reused[0], reused[1]);
    }
}

/// The whole state of a ledger without its id.
fn whole(rank: &LedgerOnly) -> Value {
    fn without_number(value: &mut Value) {
        match value {
            Value::Object(fields) => {
                fields.remove("ledger");
                fields.values_mut().for_each(without_number);
            }
            Value::Array(values) => values.iter_mut().for_each(without_number),
            _ => {}
        }
    }
    let mut value = serde_json::to_value(&rank.ledger).unwrap();
    without_number(&mut value);
    value
}

impl Subject for Ranks {
    const HAS_LAYERS: bool = false;

    fn admit(&mut self) -> Result<RequestId, KvError> {
        let (first, second) = (self.first.admit(), self.second.admit());
        self.entered("admit", first, second)
    }

    fn release(&mut self, id: RequestId) -> Result<(), KvError> {
        let first = self.first.release(id);
        self.calls += u64::from(first.is_ok());
        if self.fault != Fault::ReleaseMissed || !self.calls.is_multiple_of(50) {
            let second = self.second.release(id);
            self.same("release", first.is_ok(), second.is_ok());
        }
        first
    }

    fn rewind_draft(&mut self, id: RequestId, committed: u32) -> Result<(), KvError> {
        let first = self.first.rewind_draft(id, committed);
        let second = self.second.rewind_draft(id, committed);
        self.same("rewind", first.is_ok(), second.is_ok());
        first
    }

    fn step(&mut self, model: &Model, step: &Step) -> Report {
        let first = self.first.step(model, step);
        let dropped = first.begun.is_ok() && !first.commits.iter().any(Result::is_ok);
        if self.fault == Fault::DropMissed && dropped {
            return first;
        }
        let second = self.second.step(model, step);
        self.same_report(&first, &second);
        first
    }

    fn blocks(&self, id: RequestId) -> Option<Vec<BlockId>> {
        self.first.blocks(id)
    }

    fn tokens(&self, group: LayerGroup, id: RequestId) -> Option<u32> {
        self.first.tokens(group, id)
    }

    fn counts(&self) -> (u32, u32) {
        Subject::counts(&self.first)
    }

    fn reuse(&mut self) -> &mut dyn Reuse {
        self
    }

    /// Compares the ranks.
    fn check_bytes(&mut self, model: &Model, turn: u64) -> Result<(), String> {
        self.same_requests(model);
        self.same_books();
        if turn.is_multiple_of(WHOLE) {
            self.same("ledgers", whole(&self.first), whole(&self.second));
        }
        self.trouble.take().map_or(Ok(()), Err)
    }
}

impl Reuse for Ranks {
    fn admit_with(&mut self, text: &Text) -> Result<Admission, KvError> {
        let first = self.first.admit_with(text);
        let second = match self.fault {
            Fault::PromptsMissed => {
                let plain = |id| Admission { id, reused: 0, matched: 0 };
                self.second.admit().map(plain)
            }
            _ => self.second.admit_with(text),
        };
        let ids = (&first, &second);
        let ids = (ids.0.as_ref().map(|a| a.id), ids.1.as_ref().map(|a| a.id));
        let _ = self.entered("admit with a prompt", ids.0, ids.1);
        let found = |admission: &Result<Admission, KvError>| {
            admission.as_ref().map(|admission| (admission.reused, admission.matched)).ok()
        };
        self.same("reused", found(&first), found(&second));
        first
    }

    fn fork(&mut self, of: RequestId) -> Result<RequestId, KvError> {
        let (first, second) = (self.first.fork(of), self.second.fork(of));
        self.entered("fork", first, second)
    }

    fn suspend(&mut self, name: Name, id: RequestId) -> Result<(), KvError> {
        let (first, second) = (self.first.suspend(name, id), self.second.suspend(name, id));
        self.same("suspend", first.is_ok(), second.is_ok());
        first
    }

    fn resume(&mut self, name: Name) -> Option<Answer<RequestId>> {
        match (self.first.resume(name), self.second.resume(name)) {
            (Some(first), Some(second)) => Some(self.entered("resume", first, second)),
            (first, second) => {
                self.same("resume", first.is_some(), second.is_some());
                first
            }
        }
    }

    fn discard(&mut self, name: Name) -> bool {
        let (first, second) = (self.first.discard(name), self.second.discard(name));
        self.same("discard", first, second);
        first
    }

    fn pin(&mut self, lease: Name, text: &Text, until: Duration) -> Result<Pinned, PinRefused> {
        let (first, second) =
            (self.first.pin(lease, text, until), self.second.pin(lease, text, until));
        self.same("pin", first.as_ref().ok(), second.as_ref().ok());
        first
    }

    fn unpin(&mut self, lease: Name) -> bool {
        let (first, second) = (self.first.unpin(lease), self.second.unpin(lease));
        self.same("unpin", first, second);
        first
    }

    fn expire(&mut self, now: Duration) -> usize {
        let behind = if self.fault == Fault::ClockBehind { now / 2 } else { now };
        let (first, second) = (self.first.expire(now), self.second.expire(behind));
        self.same("expire", first, second);
        first
    }

    fn own_blocks(&self, id: RequestId) -> Option<Vec<bool>> {
        self.first.own_blocks(id)
    }

    fn counts(&self) -> Counts {
        Reuse::counts(&self.first)
    }

    fn drain(&mut self, batch: &mut EventBatch) -> Drained {
        let mut other = EventBatch::with_capacity(self.second.ledger.event_capacity());
        let drained = (self.first.drain(batch), self.second.drain(&mut other));
        self.same("what is drained", drained.0, drained.1);
        self.same("events", batch.iter().count(), other.iter().count());
        drained.0
    }

    fn snapshot(&mut self) -> EventBatch {
        self.second.snapshot();
        self.first.snapshot()
    }

    fn resident(&self) -> EventBatch {
        self.first.resident()
    }

    fn audit(&self) -> Result<(), String> {
        self.first.audit().and_then(|()| self.second.audit())
    }
}

/// Runs `ops` operations of a seed. Every other seed shares prefixes.
fn run(seed: u64, ops: u64, fault: Fault) -> Result<Happened, Divergence> {
    let config = if seed.is_multiple_of(2) { config(seed) } else { reuse_config(seed) };
    random_run(seed, ops, Manners::Any, &config, &|| Ranks::new(&config, fault), &mut |_| ())
}

fn all_equal(ops: u64) {
    let mut happened = Happened::new();
    for seed in 0..16 {
        let counts = run(seed, ops, Fault::Nothing).unwrap_or_else(|found| panic!("{found:?}"));
        counts.into_iter().for_each(|(what, n)| *happened.entry(what).or_default() += n);
    }
    for what in
        ["admit", "admit with a prompt", "blocks evicted", "commit", "fork", "pin", "resume"]
    {
        assert!(happened.get(what).is_some_and(|&n| n > ops / 100), "{what}: {happened:#?}");
    }
    println!("{} operations, commits {}", 16 * ops, happened["commit"]);
}

#[test]
fn ranks_that_are_told_the_same_have_equal_books() {
    all_equal(2_000);
}

#[test]
#[ignore = "a million operations: docs/reliability.md"]
fn ranks_that_are_told_the_same_have_equal_books_a_million_times() {
    all_equal(62_500);
}

/// A rank that misses a call is detected.
#[test]
fn what_a_rank_is_not_told_is_found() {
    use Fault::{ClockBehind, DropMissed, PromptsMissed, ReleaseMissed};
    for fault in [ReleaseMissed, PromptsMissed, ClockBehind, DropMissed] {
        let found = run(1, 20_000, fault).expect_err(&format!("{fault:?} is not found"));
        println!("{fault:?}: operation {}, {:.120}", found.op, found.what);
    }
}
