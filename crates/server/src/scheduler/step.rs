//! Runs the steps of a scheduler: makes room for them, and contains their failures.

use std::cmp::Reverse;
use std::slice::from_ref;

use dsv4_kv::KvError;
use dsv4_kv_device::Backend;
use dsv4_kv_model::{Chunk, ModelError};

use super::{Running, Scheduler};
use crate::accepted::Event;
use crate::admission::{blocks_of_drafts, may_share};
use crate::error::{Failure, ServerError};
use crate::plan::{Part, StepLimits, plan};

/// Steps in a row that may fail before the scheduler ends.
const FAILED_STEPS: u32 = 3;

impl<B: Backend> Scheduler<B> {
    /// Runs a step of all running requests, or of those that are left when others were preempted.
    pub(super) fn run_step(&mut self) -> Result<(), ServerError> {
        let mut drafts = true;
        while !self.running.is_empty() {
            let mut parts = self.plan(drafts);
            if drafts && self.drafts_take_last_blocks(&parts).map_err(ModelError::from)? {
                parts = self.plan(false);
            }
            match self.run_parts(&parts) {
                Ok(()) => {
                    self.count_success();
                    break;
                }
                // Drafts may take blocks that their request does not need yet.
                Err(ModelError::Cache(KvError::OutOfBlocks { .. })) if has_drafts(&parts) => {
                    drafts = false;
                }
                Err(ModelError::Cache(KvError::OutOfBlocks { .. })) if self.settle_tier()? => {}
                Err(ModelError::Cache(KvError::OutOfBlocks { .. })) if self.running.len() > 1 => {
                    self.preempt_newest()?;
                }
                Err(ModelError::Cache(KvError::OutOfBlocks { .. }))
                    if may_share(&self.running[0].request) =>
                {
                    self.readmit_alone()?;
                }
                // The NaN may be that of a draft that would be rejected.
                Err(error) if error.is_numerical() && has_drafts(&parts) => drafts = false,
                Err(error) if error.is_numerical() && parts.len() > 1 => {
                    self.run_each(&parts)?;
                    break;
                }
                Err(error) => {
                    self.fail(&parts, error)?;
                    break;
                }
            }
        }
        Ok(())
    }

    /// Runs each part of a step with NaNs alone, and ends the requests of those that have NaNs again. The results of
    /// the others have the same bits as in one step.
    fn run_each(&mut self, parts: &[Part]) -> Result<(), ServerError> {
        let mut failed = Vec::new();
        for part in parts {
            match self.run_parts(from_ref(part)) {
                Ok(()) => self.count_success(),
                Err(error) if error.is_numerical() => failed.push((part, error)),
                // It is in the next step again, which makes room.
                Err(ModelError::Cache(KvError::OutOfBlocks { .. })) => {}
                Err(error) => {
                    // What has not run yet is in the next step again.
                    failed.push((part, error));
                    break;
                }
            }
        }
        // From the back, so that the indices before it stay valid.
        failed.sort_unstable_by_key(|(part, _)| Reverse(part.index));
        failed.into_iter().try_for_each(|(part, error)| self.fail(from_ref(part), error))
    }

    /// Whether drafts take blocks that other requests may soon need: a request keeps the blocks of drafts that were
    /// rejected. A block must be left for each running request.
    fn drafts_take_last_blocks(&self, parts: &[Part]) -> Result<bool, KvError> {
        let free = self.unpromised_blocks()?;
        let ledger = self.engine.cache().ledger();
        let of_drafts = |Part { index, work }: &Part| {
            blocks_of_drafts(&ledger, &self.running[*index].request.sequence, work)
        };
        let taken: u32 = parts.iter().map(of_drafts).sum();
        Ok(taken > 0 && free < self.running.len() as u32 + taken)
    }

    /// The next step of the running requests, with or without drafts.
    fn plan(&self, drafts: bool) -> Vec<Part> {
        let tokens = self.engine.cache().config().max_step_tokens as usize;
        let sequences: Vec<_> =
            self.running.iter().map(|running| &running.request.sequence).collect();
        plan(&sequences, StepLimits { tokens, chunk: self.limits.chunk, drafts })
    }

    /// Runs a step, and sends its tokens to the clients.
    fn run_parts(&mut self, parts: &[Part]) -> Result<(), ModelError> {
        let Self { engine, running, metrics, .. } = self;
        let mut chunks = Vec::new();
        for Part { index, work } in parts {
            let id = running[*index].id;
            chunks.push(Chunk { id, tokens: &work.tokens, logits: work.logits });
        }
        let forward = engine.forward(&chunks)?;
        let advance = |(at, part): (usize, &Part)| {
            let sequence = &mut running[part.index].request.sequence;
            let logits = forward.logits(at);
            let scored = sequence.score(&part.work, logits);
            let (accepted, generated) = sequence.advance(&part.work, logits);
            (accepted, (scored, generated))
        };
        let (accepted, tokens): (Vec<_>, Vec<_>) = parts.iter().enumerate().map(advance).unzip();
        forward.commit_some(&accepted)?;
        for (part, (scored, generated)) in parts.iter().zip(tokens) {
            let request = &mut running[part.index].request;
            request.tell_prompt(scored);
            request.tell(generated, metrics);
        }
        Ok(())
    }

    /// Ends the requests of a step that has failed.
    fn fail(&mut self, parts: &[Part], error: ModelError) -> Result<(), ServerError> {
        let failure = Failure::Step(error.to_string());
        // From the back, so that the indices before it stay valid.
        let mut failed: Vec<_> = parts.iter().map(|part| part.index).collect();
        failed.sort_unstable();
        for index in failed.into_iter().rev() {
            let Running { id, request } = self.running.remove(index);
            let _ = request.events.send(Event::Failed(failure.clone()));
            self.engine.release(id)?;
        }
        self.count_failure(error)
    }

    /// Counts a step that has run.
    fn count_success(&mut self) {
        self.failed_steps = 0;
        self.metrics.steps.increment(1);
        // An error of the device also shows up in the next step; transfers that could not begin now begin later.
        let _ = self.engine.advance_tier();
    }

    /// Counts a failed step. One with NaNs does not count towards [`ServerError::StepsFail`]: the device works, and a
    /// client that repeats its request must not end the server.
    pub(super) fn count_failure(&mut self, error: ModelError) -> Result<(), ServerError> {
        self.metrics.failed_steps.increment(1);
        if error.is_numerical() {
            return Ok(());
        }
        self.failed_steps += 1;
        if self.failed_steps < FAILED_STEPS {
            return Ok(());
        }
        Err(ServerError::StepsFail { steps: self.failed_steps, error })
    }
}

/// Whether any of these parts has drafts.
fn has_drafts(parts: &[Part]) -> bool {
    parts.iter().any(|part| part.work.drafts > 0)
}
