//! What is put to the test: something that answers like a ledger.

use dsv4_kv::{BlockId, CacheConfig, KvError, Ledger, RequestId, StepPlan, StepRequest};

use super::model::Model;
use super::op::Part;

/// A cache, or only its books.
pub trait Subject {
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

    /// Prepares a step and runs it; `parts` says what its tokens are, `step` what the cache is told.
    ///
    /// # Errors
    /// The cache's refusal.
    fn prepare(
        &mut self,
        model: &Model,
        parts: &[Part],
        step: &[StepRequest],
    ) -> Result<StepPlan, KvError>;

    /// Accepts tokens of the last step.
    ///
    /// # Errors
    /// The cache's refusal.
    fn commit(&mut self, id: RequestId, accepted: u32) -> Result<(), KvError>;

    /// StepMeta as it is now.
    fn array(&self) -> Vec<i32>;

    /// The block table of a request.
    fn blocks(&self, id: RequestId) -> Option<Vec<BlockId>>;

    /// Final tokens of a request.
    fn tokens(&self, id: RequestId) -> Option<u32>;

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

/// The books alone: [`Ledger`] and StepMeta in host memory.
#[derive(Debug)]
pub struct Books {
    /// The ledger.
    pub ledger: Ledger,
    /// StepMeta.
    pub array: Vec<i32>,
}

impl Books {
    /// Empty books.
    ///
    /// # Errors
    /// As [`Ledger::new`].
    pub fn new(config: &CacheConfig) -> Result<Self, KvError> {
        let ledger = Ledger::new(config)?;
        Ok(Self { array: vec![0; ledger.layout().elements()], ledger })
    }
}

impl Subject for Books {
    fn admit(&mut self) -> Result<RequestId, KvError> {
        self.ledger.admit()
    }

    fn release(&mut self, id: RequestId) -> Result<(), KvError> {
        self.ledger.release(id)
    }

    fn prepare(
        &mut self,
        _: &Model,
        _: &[Part],
        step: &[StepRequest],
    ) -> Result<StepPlan, KvError> {
        self.ledger.prepare_forward(step, &mut self.array)
    }

    fn commit(&mut self, id: RequestId, accepted: u32) -> Result<(), KvError> {
        self.ledger.commit(id, accepted)
    }

    fn array(&self) -> Vec<i32> {
        self.array.clone()
    }

    fn blocks(&self, id: RequestId) -> Option<Vec<BlockId>> {
        self.ledger.block_table(id).ok().map(Iterator::collect)
    }

    fn tokens(&self, id: RequestId) -> Option<u32> {
        self.ledger.committed(id).ok()
    }

    fn counts(&self) -> (u32, u32) {
        (self.ledger.free_blocks(), self.ledger.live_requests())
    }
}
