//! Runs one request from its prompt to its end.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

use dsv4_kv_device::Backend;
use ndarray::ArrayView2;

use crate::engine::{Chunk, Engine};
use crate::error::ModelError;
use crate::sequence::{Continuation, Finish, Generated, Sequence, Work};

/// The result of a request.
#[derive(Clone, Debug)]
pub struct Summary {
    /// The generated tokens.
    pub tokens: Vec<u32>,
    /// Why it ended; `None` if the observer ended it.
    pub finish: Option<Finish>,
    /// Time from the call to the first token; 0 without a token.
    pub time_to_first_token: Duration,
    /// Time from the first token to the end; 0 without a token.
    pub decode_time: Duration,
    /// Number of steps.
    pub steps: u32,
    /// Drafts that were verified.
    pub drafts: u32,
    /// Drafts that were accepted, also one that has ended the request.
    pub accepted: u32,
}

/// Observes a request's tokens as they are generated.
pub trait Observer {
    /// Called with the logits of a step, `[tokens asked for, vocabulary]`; the first `accepted` tokens of `work` are
    /// final.
    fn logits(&mut self, _work: &Work, _logits: ArrayView2<'_, f32>, _accepted: u32) {}

    /// Asked before each step. Returning `false` ends the request.
    fn goes_on(&mut self) -> bool {
        true
    }

    /// Called with each generated token. Returning `false` ends the request: later tokens of the same step are dropped.
    fn token(&mut self, token: &Generated) -> bool;
}

impl<B: Backend> Engine<B> {
    /// Continues a prompt, in chunks of up to `chunk` tokens, and releases the request. Of the drafts of a step it
    /// verifies those that can be rejected ([`EngineLimits::max_draft`](crate::EngineLimits::max_draft)), and for which
    /// the step and the context have room.
    ///
    /// # Errors
    /// [`ModelError::EmptyPrompt`]; as [`Engine::forward`].
    pub fn generate(
        &mut self,
        prompt: &[u32],
        continuation: Continuation,
        chunk: usize,
        observer: &mut impl Observer,
    ) -> Result<Summary, ModelError> {
        let drafts = continuation.drafts.min(self.cache().config().max_draft as usize);
        let sequence = Sequence::new(prompt.to_vec(), Continuation { drafts, ..continuation });
        let mut sequence = sequence.ok_or(ModelError::EmptyPrompt)?;
        let id = self.admit()?;
        let run = || self.run_to_end(id, &mut sequence, chunk, observer);
        let ended = catch_unwind(AssertUnwindSafe(run));
        // Also after a panic of the observer: the caller has no id to release.
        let released = self.release(id);
        let summary = ended.unwrap_or_else(|panic| resume_unwind(panic))?;
        released?;
        Ok(summary)
    }

    fn run_to_end(
        &mut self,
        id: dsv4_kv::RequestId,
        sequence: &mut Sequence,
        chunk: usize,
        observer: &mut impl Observer,
    ) -> Result<Summary, ModelError> {
        let begin = Instant::now();
        let mut first = None;
        let (mut steps, mut drafts, mut accepted) = (0, 0, 0);
        let (mut tokens, mut stopped) = (Vec::new(), false);
        while sequence.finish().is_none() && !stopped && observer.goes_on() {
            let work = sequence.next(self.budget(sequence, chunk));
            let forward =
                self.forward(&[Chunk { id, tokens: &work.tokens, logits: work.logits }])?;
            let (count, generated) = sequence.advance(&work, forward.logits(0));
            observer.logits(&work, forward.logits(0), count);
            forward.commit_some(&[count])?;
            steps += 1;
            drafts += work.drafts as u32;
            accepted += work.accepted_drafts(&generated) as u32;
            for token in &generated {
                first.get_or_insert_with(Instant::now);
                tokens.push(token.picked.token);
                stopped = !observer.token(token);
                if stopped {
                    break;
                }
            }
        }
        let is_whole = tokens.len() == sequence.generated().len();
        Ok(Summary {
            tokens,
            finish: sequence.finish().filter(|_| is_whole),
            time_to_first_token: first.map_or(Duration::ZERO, |first| first - begin),
            decode_time: first.map_or(Duration::ZERO, |first| first.elapsed()),
            steps,
            drafts,
            accepted,
        })
    }

    /// Most tokens of the next step: a chunk of the prompt; or the last token, and drafts for which there is room.
    fn budget(&self, sequence: &Sequence, chunk: usize) -> usize {
        if sequence.tokens().len() - sequence.cached() > 1 {
            return chunk.max(1);
        }
        let config = self.cache().config();
        let room = (config.max_context as usize).saturating_sub(sequence.cached());
        room.min(config.max_step_tokens as usize).max(1)
    }
}
