//! What happens to requests between steps besides their steps: they are given up, copied, put aside.

use anyhow::{Context, Result};
use dsv4_kv::{KvError, RequestId, Suspended};

use super::drive::Drive;
use super::execute::{Disturb, is_out_of_blocks};

const RUNS: &str = "a request that the scheduler runs was admitted";

/// A request without a slot.
#[derive(Debug)]
pub struct Aside {
    index: usize,
    /// What it was called.
    id: RequestId,
    suspended: Suspended,
}

/// Each takes the place of a request that runs; where that does not run, nothing happens.
impl<E: Disturb> Drive<'_, E> {
    /// How often a request was preempted.
    pub fn preempted(&self) -> u64 {
        self.scheduler.preempted()
    }

    /// A request ends early.
    pub fn abort(&mut self, index: usize) -> Result<bool> {
        let aborted = self.scheduler.abort(index);
        if aborted {
            self.release(index)?;
        }
        Ok(aborted)
    }

    /// A request loses what it has, and is computed again.
    pub fn preempt(&mut self, index: usize) -> Result<bool> {
        let preempted = self.scheduler.preempt(index);
        if preempted {
            self.release(index)?;
        }
        Ok(preempted)
    }

    /// A copy of a request runs beside it, with other tokens from there on, if there is room; whether there was.
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

    /// A request gives its slot up; `None` if as many have as can.
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

    /// A suspended request goes on, if a slot is free; else it is given back.
    pub fn resume(&mut self, aside: Aside) -> Result<Option<Aside>> {
        if !self.scheduler.resume(aside.index) {
            return Ok(Some(aside));
        }
        let Aside { index, id, suspended } = aside;
        self.ids[index] = Some(self.cache.resume(id, suspended)?);
        Ok(None)
    }
}
