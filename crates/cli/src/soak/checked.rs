//! A cache without memory, beside its model.

use std::ops::Deref;
use std::time::Duration;

use anyhow::Result;
use dsv4_kv::{CacheConfig, KvError, Ledger, RequestId, StepRequest, Suspended};

use super::model::Model;
use crate::replay::execute::{Bookkeeping, Disturb, Execute, KernelWork};

/// Runs everything in the cache, then in the model, and counts where the two differ.
pub struct Checked {
    cache: Bookkeeping,
    model: Model,
    pub found: Agreement,
}

/// What was reused, and what should have been.
#[derive(Clone, Copy, Debug, Default)]
pub struct Agreement {
    /// Requests that were admitted.
    pub admissions: u64,
    /// Those of them that reused other tokens than in the model.
    pub differing: u64,
    /// Tokens that were reused.
    pub reused: u64,
    /// Tokens that the model reused.
    pub expected: u64,
}

impl Checked {
    /// An empty cache, and the model of `expected`, which is to be the same configuration.
    pub fn new(config: &CacheConfig, expected: &CacheConfig) -> Result<Self, KvError> {
        let (cache, model) = (Bookkeeping::new(config)?, Model::new(expected));
        Ok(Self { cache, model, found: Agreement::default() })
    }
}

impl Execute for Checked {
    fn admit(&mut self, index: usize, prompt: Option<&[u32]>) -> Result<(RequestId, u32)> {
        let (id, reused) = self.cache.admit(index, prompt)?;
        let expected = self.model.admit(id, prompt, reused);
        self.found.admissions += 1;
        self.found.differing += u64::from(reused != expected);
        self.found.reused += u64::from(reused);
        self.found.expected += u64::from(expected);
        Ok((id, reused))
    }

    fn step(&mut self, step: &[StepRequest], tokens: &[u32]) -> Result<Duration> {
        let began = self.cache.step(step, tokens)?;
        self.model.step(step, tokens);
        Ok(began)
    }

    fn release(&mut self, id: RequestId) -> Result<()> {
        self.cache.release(id)?;
        self.model.release(id);
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
        Ok(copy)
    }

    fn suspend(&mut self, id: RequestId) -> Result<Suspended> {
        let suspended = self.cache.suspend(id)?;
        self.model.suspend(id);
        Ok(suspended)
    }

    /// The model knows no slots: to it the request only changes its name.
    fn resume(&mut self, from: RequestId, suspended: Suspended) -> Result<RequestId> {
        let id = self.cache.resume(from, suspended)?;
        self.model.rename(from, id);
        Ok(id)
    }
}
