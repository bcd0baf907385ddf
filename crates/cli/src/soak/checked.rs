//! A cache without memory for rows, compared with its model.

use std::ops::Deref;
use std::time::Duration;

use anyhow::Result;
use dsv4_kv::{CacheConfig, KvError, Ledger, RequestId, StepRequest, Suspended};

use super::model::{COUNTED, Model};
use crate::replay::execute::{Bookkeeping, Disturb, Execute, KernelWork};

/// Applies everything to the cache and then to the model, and counts differences.
pub struct Checked {
    cache: Bookkeeping,
    model: Model,
    pub found: Agreement,
}

/// The tokens that were reused, and those that should have been.
#[derive(Clone, Debug, Default)]
pub struct Agreement {
    /// Number of admissions.
    pub admissions: u64,
    /// Number of admissions that reused another number of tokens than the model.
    pub differing: u64,
    /// Tokens that were reused.
    pub reused: u64,
    /// Tokens that the model reused.
    pub expected: u64,
    /// Number of operations.
    pub operations: u64,
    /// The first operation after which the cache held other than the model, in words.
    pub first: Option<String>,
}

impl Checked {
    /// An empty cache, and a model for `expected`, which should be the same configuration.
    pub fn new(config: &CacheConfig, expected: &CacheConfig) -> Result<Self, KvError> {
        let (cache, model) = (Bookkeeping::new(config)?, Model::new(expected));
        Ok(Self { cache, model, found: Agreement::default() })
    }

    /// Compares what the cache and the model hold after an operation.
    fn compare(&mut self, operation: &str) {
        let Agreement { operations, first, .. } = &mut self.found;
        *operations += 1;
        if first.is_some() {
            return;
        }
        let (found, expected) = (counts(&self.cache.ledger()), self.model.counts());
        let mut both = COUNTED.into_iter().zip(found.into_iter().zip(expected));
        let wrong = both.find(|(_, (found, expected))| found != expected);
        *first = wrong.map(|(what, (found, expected))| {
            format!("after operation {operations}, {operation}: {found} {what}, not {expected}")
        });
    }
}

/// The numbers of [`COUNTED`] in the ledger.
fn counts(ledger: &Ledger) -> [i64; 8] {
    let tree = ledger.tree_counts();
    let counts = [
        ledger.free_blocks(),
        ledger.free_checkpoints(),
        ledger.output_checkpoints(),
        tree.blocks,
        tree.checkpoints,
        tree.evictable_blocks,
        tree.evictable_checkpoints,
        tree.segments,
    ];
    counts.map(i64::from)
}

impl Execute for Checked {
    fn admit(&mut self, index: usize, prompt: Option<&[u32]>) -> Result<(RequestId, u32)> {
        let (id, reused) = self.cache.admit(index, prompt)?;
        let expected = self.model.admit(id, prompt, reused);
        self.found.admissions += 1;
        self.found.differing += u64::from(reused != expected);
        self.found.reused += u64::from(reused);
        self.found.expected += u64::from(expected);
        self.compare("an admission");
        Ok((id, reused))
    }

    fn step(&mut self, step: &[StepRequest], tokens: &[u32]) -> Result<Duration> {
        let began = self.cache.step(step, tokens)?;
        self.model.step(step, tokens);
        self.compare("a step");
        Ok(began)
    }

    fn release(&mut self, id: RequestId) -> Result<()> {
        self.cache.release(id)?;
        self.model.release(id);
        self.compare("a release");
        Ok(())
    }

    fn ledger(&self) -> impl Deref<Target = Ledger> {
        self.cache.ledger()
    }

    fn reads_tokens(&self) -> bool {
        true
    }

    fn finish(self) -> Result<KernelWork> {
        self.cache.finish()
    }
}

impl Disturb for Checked {
    fn fork(&mut self, id: RequestId) -> Result<RequestId> {
        let copy = self.cache.fork(id)?;
        self.model.fork(id, copy);
        self.compare("a fork");
        Ok(copy)
    }

    fn suspend(&mut self, id: RequestId) -> Result<Suspended> {
        let suspended = self.cache.suspend(id)?;
        self.model.suspend(id);
        self.compare("a suspension");
        Ok(suspended)
    }

    /// The model has no slots: for the model the request only changes its handle.
    fn resume(&mut self, from: RequestId, suspended: Suspended) -> Result<RequestId> {
        let id = self.cache.resume(from, suspended)?;
        self.model.rename(from, id);
        self.compare("a resumption");
        Ok(id)
    }
}
