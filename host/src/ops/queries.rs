//! Queries: which of a step's tokens are asked for.

use super::check_most;
use crate::device::{Backend, DeviceError, View};

/// Queries of gathers, scores, lists or attention: tokens `first..first + count` of a step, by their places in it.
/// `step` is `first + count` at least.
pub struct StepQueries<'a, B: Backend> {
    /// `[step]` i32 position of each token.
    pub position: &'a View<B, i32>,
    /// `[step]` i32 slot of each token's request; -1 = padding.
    pub slot: &'a View<B, i32>,
    /// `[step]` i32 tokens of the same request that precede it in the step.
    pub index: &'a View<B, i32>,
    /// Place in the step of the first query.
    pub first: u32,
    /// How many queries there are.
    pub count: u32,
}

impl<B: Backend> StepQueries<'_, B> {
    /// Refuses queries whose places in the step 32 bits do not count.
    pub(super) fn check(&self) -> Result<(), DeviceError> {
        let end = u64::from(self.first) + u64::from(self.count);
        check_most("first + count of queries", end, u32::MAX)
    }
}
