//! What a step is made to do: [`Bookkeeping`] here, the kernels as well in [`super::full`].

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

/// A cache that a load is replayed through.
pub trait Execute {
    /// Admits the request at `index` of the load with the tokens that it begins with, or one that shares nothing; its
    /// name in the cache, and how many tokens it has already.
    fn admit(&mut self, index: usize, prompt: Option<&[u32]>) -> Result<(RequestId, u32)>;

    /// Begins a step of every layer group, runs it and commits all of its tokens; how long it took to
    /// begin it. `tokens`: those of the step, in its order; none if [`Self::reads_tokens`] says so.
    ///
    /// # Errors
    /// [`KvError::OutOfBlocks`] if there is no room for it. Nothing has happened then.
    fn step(&mut self, step: &[StepRequest], tokens: &[u32]) -> Result<Duration>;

    /// Ends a request.
    fn release(&mut self, id: RequestId) -> Result<()>;

    /// Who holds what.
    fn ledger(&self) -> impl Deref<Target = Ledger>;

    /// What its host tier has moved.
    fn tier(&self) -> TierStats {
        TierStats::default()
    }

    /// Milliseconds that its kernels have taken so far; 0 if none run.
    fn kernel_ms(&self) -> f64 {
        0.0
    }

    /// Whether it matters what the tokens are.
    fn reads_tokens(&self) -> bool;

    /// Checks what can only be checked in the end; what the kernels did.
    fn finish(self) -> Result<KernelWork>;
}

/// A cache whose requests can be copied and put aside between steps.
pub trait Disturb: Execute {
    /// Admits a copy of a request.
    ///
    /// # Errors
    /// [`KvError::OutOfBlocks`] if there is no room for it. Nothing has happened then.
    fn fork(&mut self, id: RequestId) -> Result<RequestId>;

    /// Takes a request out of its slot.
    ///
    /// # Errors
    /// [`KvError::NoRoomToSuspend`] if as many are suspended as can be. Nothing has happened then.
    fn suspend(&mut self, id: RequestId) -> Result<Suspended>;

    /// Lets a suspended request go on, which was called `from`; its new name.
    fn resume(&mut self, from: RequestId, suspended: Suspended) -> Result<RequestId>;
}

/// What the kernels of a replay did.
#[derive(Debug, Default)]
pub struct KernelWork {
    /// Milliseconds between the first and the last launch of each step, summed; `None` if none ran.
    pub kernel_ms: Option<f64>,
    /// Compressed entries that were written, over all layers.
    pub entries: u64,
    /// What moved between the device and host memory.
    pub tier: TierStats,
    /// The comparison with the reference.
    pub verification: Verification,
    /// What became of requests that moved to other processes; `None` if there are none.
    pub moved: Option<Moved>,
}

/// All tokens of a step, accepted; what they are is told if `tokens` are theirs.
pub fn accept_all<'t>(step: &[StepRequest], tokens: &'t [u32]) -> Vec<Accepted<'t>> {
    let mut left = tokens;
    let accept = |part: &StepRequest| {
        let told = left.split_off(..part.tokens as usize);
        Accepted { id: part.id, accepted: part.tokens, tokens: told.unwrap_or_default() }
    };
    step.iter().map(accept).collect()
}

/// Whether a step was refused because too few blocks are free.
pub fn is_out_of_blocks(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(KvError::OutOfBlocks { .. }))
}

/// The allocator and the planner alone.
pub struct Bookkeeping {
    ledger: Ledger,
    /// Those that have layers.
    groups: Vec<LayerGroup>,
    /// StepMeta of a step.
    step_meta: Vec<i32>,
}

impl Bookkeeping {
    /// An empty cache of the given shape, with no memory behind it.
    pub fn new(config: &CacheConfig) -> Result<Self, KvError> {
        let ledger = Ledger::new(config)?;
        let groups = LayerGroup::ALL.into_iter();
        let groups = groups.filter(|&group| !config.group_layers(group).is_empty()).collect();
        let step_meta = vec![0; ledger.largest_layout().elements()];
        Ok(Self { ledger, groups, step_meta })
    }
}

impl Bookkeeping {
    /// A request goes on here that was computed elsewhere.
    pub fn arrive(&mut self, at: Positions) -> Result<RequestId> {
        Ok(self.ledger.arrive(at)?)
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
