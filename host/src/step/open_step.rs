//! An open step: commit, or rejection when it is dropped.

use std::fmt;
use std::ops::{Deref, DerefMut};

use super::capture::CapturedStep;
use super::layers::Layers;
use crate::device::Backend;
use crate::error::KvError;
use crate::ledger::{Accepted, StepPlan, Written};
use crate::trace;

/// An open step of one layer group. Its StepMeta, blocks and work lists are queued on the device. The update, reads and
/// append of each layer remain to be queued, through [`Layers`], to which it dereferences.
///
/// [`Self::commit`] makes tokens final. Dropping the step rejects it: every request has the tokens and
/// blocks that it had before. If a kernel of a layer was queued, rows of the step's requests are written too; those of
/// other requests are untouched. A request that had at most `max_draft` + 1 tokens in the step may run them again. A
/// request with more has lost rows that it needs, and later steps refuse it with [`KvError::Overwritten`] until it is
/// restored from its checkpoint or released.
pub struct Step<'a, B: Backend> {
    // All other state is in here: `mem::swap` of two steps' `layers` must leave two valid steps.
    layers: Layers<'a, B>,
    /// Whether the step was committed: then dropping it rejects nothing.
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

    /// The sizes of the step.
    #[must_use]
    pub fn plan(&self) -> StepPlan {
        self.layers.plan
    }

    /// Queues a captured step. Each layer that it covers then has the progress that was recorded, or has failed.
    ///
    /// # Errors
    /// [`KvError::ForeignGraph`] if it was captured over another cache or layer group;
    /// [`KvError::WrongBucket`] unless the step was begun with its bucket;
    /// [`KvError::LayerRepeated`] if the step has updated one of its layers already;
    /// [`KvError::Device`].
    pub fn replay(&mut self, graph: &CapturedStep<B>) -> Result<(), KvError> {
        self.layers.replay(graph)
    }

    /// Queues a captured step again, after [`Self::replay`]. If its inputs are the same, it writes the same bytes: for
    /// benchmarks.
    ///
    /// # Errors
    /// [`KvError::ForeignGraph`]; [`KvError::LayerNotUpdated`] if the step has not finished one of
    /// its layers; [`KvError::RowsMismatch`] if one was updated with other rows; [`KvError::WindowOverwritten`] for a
    /// bucket of more than `max_draft` + 1 tokens a request, which would read rows that it has overwritten;
    /// [`KvError::Device`].
    pub fn repeat(&mut self, graph: &CapturedStep<B>) -> Result<(), KvError> {
        self.layers.repeat(graph)
    }

    /// Ends the step: the first `accepted` tokens of each request become final, and the others are discarded. Waits for
    /// nothing: the device may still run the step.
    ///
    /// On an error the step is rejected, as if it had been dropped; [`Self::try_commit`] keeps it.
    ///
    /// # Errors
    /// [`KvError::LayerUnfinished`]; as [`crate::ledger::Ledger::commit_step`].
    pub fn commit(self, accepted: &[Accepted<'_>]) -> Result<(), KvError> {
        Ok(self.try_commit(accepted)?)
    }

    /// As [`Self::commit`], but an error holds the step, which is still open: finish its layers, or commit other
    /// tokens.
    ///
    /// The error borrows the cache: a function that returns `Box<dyn Error>` or `anyhow::Error` cannot return it by
    /// `?`.
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
        let commit = || self.layers.core().lock_ledger().commit_step(self.layers.group(), accepted);
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

/// A refused commit: the step, still open, and the error. Conversion to [`KvError`] (also by `?`) drops
/// the step.
pub struct CommitRefused<'a, B: Backend>(Box<(Step<'a, B>, KvError)>);

impl<'a, B: Backend> CommitRefused<'a, B> {
    /// Why the commit was refused.
    #[must_use]
    pub fn error(&self) -> &KvError {
        &self.0.1
    }

    /// The step, to finish its layers or to commit other tokens.
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
