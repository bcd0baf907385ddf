//! Changes of requests between steps: requests are aborted, preempted, copied or suspended.

use anyhow::{Context, Result};
use dsv4_kv::{KvError, RequestId, Suspended};

use super::drive::Drive;
use super::execute::{Disturb, is_out_of_blocks};

const RUNS: &str = "a request that the scheduler runs was admitted";

/// A suspended request.
#[derive(Debug)]
pub struct Aside {
    index: usize,
    /// Its handle before the suspension.
    id: RequestId,
    suspended: Suspended,
}

/// Each method changes a running request. For a request that does not run it does nothing.
impl<E: Disturb> Drive<'_, E> {
    /// Number of preemptions so far.
    pub fn preempted(&self) -> u64 {
        self.scheduler.preempted()
    }

    /// Ends a request early. Returns whether it was running.
    pub fn abort(&mut self, index: usize) -> Result<bool> {
        let aborted = self.scheduler.abort(index);
        if aborted {
            self.release(index)?;
        }
        Ok(aborted)
    }

    /// Preempts a request: it loses its tokens, and is computed again. Returns whether it was running.
    pub fn preempt(&mut self, index: usize) -> Result<bool> {
        let preempted = self.scheduler.preempt(index);
        if preempted {
            self.release(index)?;
        }
        Ok(preempted)
    }

    /// Starts a copy of a request, which continues with other tokens, if there is room. Returns whether there was.
    pub fn fork(&mut self, of: usize) -> Result<bool> {
        let index = self.ids.len();
        let Some(common) = self.scheduler.fork(of, index) else { return Ok(false) };
        let id = self.ids[of].context(RUNS)?;
        match self.cache.fork(id) {
            Ok(copy) => {
                self.ids.push(Some(copy));
                self.known.push(self.known[of].clone());
                self.forks.push((of, common));
                Ok(true)
            }
            Err(error) if is_out_of_blocks(&error) => {
                self.scheduler.abort(index);
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Suspends a request; `None` if no more requests can be suspended.
    pub fn suspend(&mut self, index: usize) -> Result<Option<Aside>> {
        let Some(id) = self.ids[index] else { return Ok(None) };
        let is_full = |error: &anyhow::Error| {
            matches!(error.downcast_ref(), Some(KvError::NoRoomToSuspend { .. }))
        };
        match self.cache.suspend(id) {
            Ok(suspended) => {
                self.scheduler.suspend(index);
                self.ids[index] = None;
                Ok(Some(Aside { index, id, suspended }))
            }
            Err(error) if is_full(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Resumes a suspended request. If no slot is free, returns it unchanged.
    pub fn resume(&mut self, aside: Aside) -> Result<Option<Aside>> {
        if !self.scheduler.resume(aside.index) {
            return Ok(Some(aside));
        }
        let Aside { index, id, suspended } = aside;
        self.ids[index] = Some(self.cache.resume(id, suspended)?);
        Ok(None)
    }
}
