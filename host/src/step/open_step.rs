//! An open step: commit, or rejection when it is dropped.

use std::fmt;
use std::ops::{Deref, DerefMut};

use super::capture::CapturedStep;
use super::layers::Layers;
use crate::device::Backend;
use crate::error::KvError;
use crate::ledger::{Accepted, StepPlan, Written};
use crate::trace;

/// An open step of one layer group. Its StepMeta, blocks and work lists are queued on the device; what
/// is left is each layer's update, reads and append, through [`Layers`], to which it dereferences.
///
/// [`Self::commit`] makes tokens final. Dropping the step rejects it: every request has the tokens and
/// blocks that it had before. Until the first kernel of a layer was queued that is all. After it, the
/// rows of other requests are untouched, and a request that had at most `max_draft` + 1 tokens in the
/// step may run them again; one with more has lost rows that it needs, and is refused by later steps
/// with [`KvError::Overwritten`] until it is restored from its checkpoint or released.
pub struct Step<'a, B: Backend> {
    // The only state besides `committed`: `mem::swap` of two steps' `layers` must leave two valid steps.
    layers: Layers<'a, B>,
    /// Whether it was committed, and so is not to be rejected.
    committed: bool,
}

impl<B: Backend> fmt::Debug for Step<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Step").field("layers", &self.layers).finish_non_exhaustive()
    }
}

impl<'a, B: Backend> Step<'a, B> {
    pub(super) fn new(layers: Layers<'a, B>) -> Self {
        Self { layers, committed: false }
    }

    /// The step in numbers.
    #[must_use]
    pub fn plan(&self) -> StepPlan {
        self.layers.plan
    }

    /// Queues a captured step: the layers that it covers are as far as it was recorded, or have failed.
    ///
    /// # Errors
    /// [`KvError::ForeignGraph`] if it was captured over another cache or layer group;
    /// [`KvError::WrongBucket`] unless the step was begun with its bucket;
    /// [`KvError::LayerRepeated`] if the step has updated one of its layers already;
    /// [`KvError::Device`].
    pub fn replay(&mut self, graph: &CapturedStep<B>) -> Result<(), KvError> {
        self.layers.replay(graph)
    }

    /// Queues a captured step that [`Self::replay`] has queued before. It writes the same bytes again
    /// if its inputs are the same: for benchmarks.
    ///
    /// # Errors
    /// [`KvError::ForeignGraph`]; [`KvError::LayerNotUpdated`] if the step has not finished one of
    /// its layers; [`KvError::RowsMismatch`] if one was updated with other rows; [`KvError::WindowOverwritten`] for a
    /// bucket of more than `max_draft` + 1 tokens a request, which would read rows that it has overwritten;
    /// [`KvError::Device`].
    pub fn repeat(&mut self, graph: &CapturedStep<B>) -> Result<(), KvError> {
        self.layers.repeat(graph)
    }

    /// Ends the step: of each request the first `accepted` tokens become final; the others are discarded. Waits for nothing:
    /// the device may still run the step.
    ///
    /// On an error the step is rejected, as if it had been dropped; [`Self::try_commit`] keeps it.
    ///
    /// # Errors
    /// [`KvError::LayerUnfinished`]; as [`crate::ledger::Ledger::commit_step`].
    pub fn commit(self, accepted: &[Accepted<'_>]) -> Result<(), KvError> {
        Ok(self.try_commit(accepted)?)
    }

    /// As [`Self::commit`], but an error holds the step, which is still open: finish it, or commit it otherwise.
    ///
    /// The error borrows the cache: a function that returns `Box<dyn Error>` or `anyhow::Error` cannot return it by `?`.
    ///
    /// # Errors
    /// [`CommitRefused`]: as [`Self::commit`].
    pub fn try_commit(mut self, accepted: &[Accepted<'_>]) -> Result<(), CommitRefused<'a, B>> {
        match self.accept(accepted) {
            Ok(()) => {
                self.committed = true;
                Ok(())
            }
            Err(error) => Err(CommitRefused(Box::new((self, error)))),
        }
    }

    fn accept(&self, accepted: &[Accepted<'_>]) -> Result<(), KvError> {
        let _commit = trace::commit(&self.layers.span, accepted).entered();
        let checked = self.layers.check_finished();
        let commit = || self.layers.core().ledger().commit_step(self.layers.group(), accepted);
        checked.and_then(|()| commit()).inspect_err(trace::refused)
    }
}

impl<'a, B: Backend> Deref for Step<'a, B> {
    type Target = Layers<'a, B>;

    fn deref(&self) -> &Self::Target {
        &self.layers
    }
}

impl<B: Backend> DerefMut for Step<'_, B> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.layers
    }
}

impl<B: Backend> Drop for Step<'_, B> {
    fn drop(&mut self) {
        if !self.committed {
            let written = if self.layers.touched() { Written::Rows } else { Written::Nothing };
            self.layers.reject(written);
            trace::rejected(&self.layers.span);
        }
    }
}

/// A commit that was refused: the step, still open, and why. Converted to [`KvError`] (by `?`) it
/// drops the step.
pub struct CommitRefused<'a, B: Backend>(Box<(Step<'a, B>, KvError)>);

impl<'a, B: Backend> CommitRefused<'a, B> {
    /// Why the commit was refused.
    #[must_use]
    pub fn error(&self) -> &KvError {
        &self.0.1
    }

    /// The step, to finish it or to commit it otherwise.
    #[must_use]
    pub fn into_step(self) -> Step<'a, B> {
        self.0.0
    }
}

impl<B: Backend> From<CommitRefused<'_, B>> for KvError {
    fn from(refused: CommitRefused<'_, B>) -> Self {
        refused.0.1
    }
}

impl<B: Backend> fmt::Debug for CommitRefused<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CommitRefused").field(self.error()).finish()
    }
}

impl<B: Backend> fmt::Display for CommitRefused<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error().fmt(f)
    }
}

impl<B: Backend> std::error::Error for CommitRefused<'_, B> {}
