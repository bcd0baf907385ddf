//! The work of a step: [`Bookkeeping`] alone here, and with kernels in [`super::full`].

use std::ops::Deref;
use std::time::{Duration, Instant};

use anyhow::Result;
use dsv4_kv::transfer::Positions;
use dsv4_kv::{
    Accepted, Admission, CacheConfig, KvError, LayerGroup, Ledger, Prompt, RequestId, StepRequest,
    Suspended, TierStats,
};

use super::moves::Moved;
use super::verification::Verification;

/// A cache through which a load is replayed.
pub trait Execute {
    /// Admits request `index` of the load, with the tokens with which it begins; without `prompt` it shares no prefix.
    /// Returns its handle in the cache, and the number of tokens that it reuses.
    fn admit(&mut self, index: usize, prompt: Option<&[u32]>) -> Result<(RequestId, u32)>;

    /// Begins a step of every layer group, runs it and commits all of its tokens. Returns the time that beginning took.
    /// `tokens` are the token ids of the step, in its order; empty unless [`Self::reads_tokens`].
    ///
    /// # Errors
    /// [`KvError::OutOfBlocks`] if there are not enough blocks. Then nothing has changed.
    fn step(&mut self, step: &[StepRequest], tokens: &[u32]) -> Result<Duration>;

    /// Ends a request.
    fn release(&mut self, id: RequestId) -> Result<()>;

    /// The cache's ledger.
    fn ledger(&self) -> impl Deref<Target = Ledger>;

    /// The counters of its host tier.
    fn tier(&self) -> TierStats {
        TierStats::default()
    }

    /// Time of its kernels so far, in milliseconds; 0 if no kernels run.
    fn kernel_ms(&self) -> f64 {
        0.0
    }

    /// Whether it needs the token ids.
    fn reads_tokens(&self) -> bool;

    /// Does the final checks. Returns the work of the kernels.
    fn finish(self) -> Result<KernelWork>;
}

/// A cache whose requests can be copied and suspended between steps.
pub trait Disturb: Execute {
    /// Admits a copy of a request.
    ///
    /// # Errors
    /// [`KvError::OutOfBlocks`] if there are not enough blocks. Then nothing has changed.
    fn fork(&mut self, id: RequestId) -> Result<RequestId>;

    /// Suspends a request.
    ///
    /// # Errors
    /// [`KvError::NoRoomToSuspend`] if no more requests can be suspended. Then nothing has changed.
    fn suspend(&mut self, id: RequestId) -> Result<Suspended>;

    /// Resumes a suspended request, whose handle was `from`. Returns its new handle.
    fn resume(&mut self, from: RequestId, suspended: Suspended) -> Result<RequestId>;
}

/// The work of the kernels in a replay.
#[derive(Debug, Default)]
pub struct KernelWork {
    /// Milliseconds between the first and the last launch of each step, summed; `None` if none ran.
    pub kernel_ms: Option<f64>,
    /// Compressed entries that were written, over all layers.
    pub entries: u64,
    /// Traffic between the device and host memory.
    pub tier: TierStats,
    /// The comparison with the reference.
    pub verification: Verification,
    /// Outcome of requests that moved to other processes; `None` without such processes.
    pub moved: Option<Moved>,
}

/// Accepts all tokens of a step. If `tokens` are the step's token ids, they are passed on.
pub fn accept_all<'t>(step: &[StepRequest], tokens: &'t [u32]) -> Vec<Accepted<'t>> {
    let mut left = tokens;
    let accept = |part: &StepRequest| {
        let told = left.split_off(..part.tokens as usize);
        Accepted { id: part.id, accepted: part.tokens, tokens: told.unwrap_or_default() }
    };
    step.iter().map(accept).collect()
}

/// Whether a step was refused because there are too few free blocks.
pub fn is_out_of_blocks(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(KvError::OutOfBlocks { .. }))
}

/// The allocator and the planner alone.
pub struct Bookkeeping {
    ledger: Ledger,
    /// The layer groups that have layers.
    groups: Vec<LayerGroup>,
    /// StepMeta of a step.
    step_meta: Vec<i32>,
}

impl Bookkeeping {
    /// An empty cache of this configuration, without memory for rows.
    pub fn new(config: &CacheConfig) -> Result<Self, KvError> {
        let ledger = Ledger::new(config)?;
        let groups = LayerGroup::ALL.into_iter();
        let groups = groups.filter(|&group| !config.group_layers(group).is_empty()).collect();
        let step_meta = vec![0; ledger.largest_layout().elements()];
        Ok(Self { ledger, groups, step_meta })
    }
}

impl Bookkeeping {
    /// Enters a request that was computed in another process.
    pub fn arrive(&mut self, at: Positions) -> Result<RequestId> {
        Ok(self.ledger.admit_imported(at)?)
    }
}

impl Execute for Bookkeeping {
    fn admit(&mut self, _index: usize, prompt: Option<&[u32]>) -> Result<(RequestId, u32)> {
        let Some(tokens) = prompt else { return Ok((self.ledger.admit()?, 0)) };
        let Admission { id, reused, .. } =
            self.ledger.admit_with(&Prompt { tokens, ..Prompt::default() })?;
        Ok((id, reused))
    }

    fn step(&mut self, step: &[StepRequest], tokens: &[u32]) -> Result<Duration> {
        let started = Instant::now();
        for &group in &self.groups {
            self.ledger.begin_step(group, step, &mut self.step_meta)?;
        }
        let begin = started.elapsed();
        let accepted = accept_all(step, tokens);
        self.groups.iter().try_for_each(|&group| self.ledger.commit_step(group, &accepted))?;
        self.ledger.save_wanted();
        Ok(begin)
    }

    fn release(&mut self, id: RequestId) -> Result<()> {
        Ok(self.ledger.release(id)?)
    }

    fn ledger(&self) -> impl Deref<Target = Ledger> {
        &self.ledger
    }

    fn reads_tokens(&self) -> bool {
        self.ledger.total_checkpoints() > 0
    }

    fn finish(self) -> Result<KernelWork> {
        Ok(KernelWork::default())
    }
}

impl Disturb for Bookkeeping {
    fn fork(&mut self, id: RequestId) -> Result<RequestId> {
        Ok(self.ledger.fork(id)?)
    }

    fn suspend(&mut self, id: RequestId) -> Result<Suspended> {
        Ok(self.ledger.suspend(id)?)
    }

    fn resume(&mut self, _from: RequestId, suspended: Suspended) -> Result<RequestId> {
        Ok(self.ledger.resume(suspended)?)
    }
}
