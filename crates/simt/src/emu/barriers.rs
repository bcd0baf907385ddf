//! The named barriers of a block.

use super::clock::Clocks;
use super::time::{Known, NOTHING, Released};
use crate::limits::WARP_SIZE;

/// Number of barriers of a block; number 0 is that of `sync_threads`.
const BARRIERS: usize = 16;

/// The state of a named barrier between two completions.
#[derive(Clone, Copy)]
struct NamedBarrier {
    /// Number of threads that complete it, as given by its first arrival.
    threads: u32,
    /// The warps that have arrived, and those that wait, one bit each.
    arrived: u32,
    waiting: u32,
    /// The knowledge that the arrivals have released.
    released: Released,
    /// For each warp, the time of its arrival, and of its arrival for the last completion; 0 if it did not arrive.
    times: Known,
    before: Known,
}

impl NamedBarrier {
    const IDLE: Self = Self {
        threads: 0,
        arrived: 0,
        waiting: 0,
        released: Released::NOTHING,
        times: NOTHING,
        before: NOTHING,
    };
}

/// The named barriers of a block.
pub struct NamedBarriers([NamedBarrier; BARRIERS]);

impl NamedBarriers {
    /// No warp has arrived.
    pub const fn new() -> Self {
        Self([NamedBarrier::IDLE; BARRIERS])
    }

    /// A warp arrives at barrier `number` of `threads` threads; `waits` if it waits. Returns the warps that this
    /// releases from the barrier, one bit each: if it is complete, all that waited, else none.
    ///
    /// # Errors
    /// A message that says which rule the call breaks.
    pub fn arrive(
        &mut self,
        (number, threads): (u32, u32),
        warp: u32,
        waits: bool,
        clocks: &mut Clocks,
    ) -> Result<u32, String> {
        let barrier = match number {
            0 => None,
            _ => self.0.get_mut(number as usize),
        };
        let barrier = barrier.ok_or_else(|| format!("there is no named barrier {number}"))?;
        if threads == 0 || !threads.is_multiple_of(WARP_SIZE) {
            return Err(format!("a barrier of {threads} threads: they are no whole warps"));
        }
        if barrier.arrived != 0 && barrier.threads != threads {
            let other = barrier.threads;
            return Err(format!("barrier {number} has {other} threads for others, {threads} here"));
        }
        if barrier.arrived >> warp & 1 != 0 {
            return Err(format!(
                "warp {warp} arrives at barrier {number} again before it is complete"
            ));
        }
        if !clocks.knows(warp, &barrier.before) {
            return Err(format!(
                "warp {warp} arrives at barrier {number} again, and nothing says that it is complete"
            ));
        }
        barrier.threads = threads;
        barrier.arrived |= 1 << warp;
        barrier.waiting |= u32::from(waits) << warp;
        clocks.release(warp, &mut barrier.released);
        barrier.times[warp as usize] = clocks.now(warp);
        if barrier.arrived.count_ones() < threads / WARP_SIZE {
            return Ok(0);
        }
        let done = *barrier;
        *barrier = NamedBarrier { before: done.times, ..NamedBarrier::IDLE };
        for warp in (0..u32::BITS).filter(|warp| done.waiting >> warp & 1 != 0) {
            clocks.acquire(warp, &done.released);
        }
        Ok(done.waiting)
    }

    /// A barrier that is not complete, at which warps have arrived: its number, and the warps, one bit each.
    pub fn unfinished(&self) -> Option<(usize, u32)> {
        let barriers = self.0.iter().map(|barrier| barrier.arrived).enumerate();
        barriers.into_iter().find(|&(_, arrived)| arrived != 0)
    }
}
