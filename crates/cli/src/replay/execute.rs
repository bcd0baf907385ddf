//! What a step is made to do: [`Bookkeeping`] here, the kernels as well in [`super::full`].

use std::time::{Duration, Instant};

use anyhow::Result;
use dsv4_kv::{CacheConfig, KvError, Ledger, RequestId, StepRequest};

use super::verify::Verification;

/// A cache that a load is replayed through.
pub trait Execute {
    /// Admits the request at `index` of the load.
    fn admit(&mut self, index: usize) -> Result<RequestId>;

    /// Prepares, runs and commits a step; how long `prepare_forward` took.
    fn step(&mut self, step: &[StepRequest]) -> Result<Duration>;

    /// Ends a request.
    fn release(&mut self, id: RequestId) -> Result<()>;

    /// Who holds what.
    fn ledger(&self) -> &Ledger;

    /// Checks what can only be checked in the end; what the kernels did.
    fn finish(self) -> Result<KernelWork>;
}

/// What the kernels of a replay did.
#[derive(Debug, Default)]
pub struct KernelWork {
    /// Milliseconds between the first and the last launch of each step, summed; `None` if none ran.
    pub kernel_ms: Option<f64>,
    /// Compressed entries that were written, over all layers.
    pub entries: u64,
    /// The comparison with the reference.
    pub verification: Verification,
}

/// The allocator and the planner alone.
pub struct Bookkeeping {
    ledger: Ledger,
    step: Vec<i32>,
}

impl Bookkeeping {
    /// An empty cache of the given shape, with no memory behind it.
    pub fn new(config: &CacheConfig) -> Result<Self, KvError> {
        let ledger = Ledger::new(config)?;
        let step = vec![0; ledger.layout().elements()];
        Ok(Self { ledger, step })
    }
}

impl Execute for Bookkeeping {
    fn admit(&mut self, _index: usize) -> Result<RequestId> {
        Ok(self.ledger.admit()?)
    }

    fn step(&mut self, step: &[StepRequest]) -> Result<Duration> {
        let begin = Instant::now();
        self.ledger.prepare_forward(step, &mut self.step)?;
        let prepare = begin.elapsed();
        for part in step {
            self.ledger.commit(part.id, part.tokens)?;
        }
        Ok(prepare)
    }

    fn release(&mut self, id: RequestId) -> Result<()> {
        Ok(self.ledger.release(id)?)
    }

    fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    fn finish(self) -> Result<KernelWork> {
        Ok(KernelWork::default())
    }
}
