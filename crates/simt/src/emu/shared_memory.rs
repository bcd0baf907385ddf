//! A block's shared memory: its words, which of them are written, and their recent accesses.

use super::fault::{AccessKind, FaultKind, Site, ThreadIndex};
use super::race::{Clock, Event, History};
use crate::limits::WARP_SIZE;

#[derive(Clone, Copy, Default)]
struct Cell {
    value: u32,
    /// The block, by [`SharedMemory::first_clock`], that last wrote it.
    written: u64,
    history: History,
}

/// Shared memory of a block. Reused from block to block: the clock tells the data of earlier blocks from
/// the present block's, so that nothing needs to be cleared.
pub struct SharedMemory {
    bytes: u32,
    cells: Vec<Cell>,
    /// Block barriers since this was made; a new block counts as one.
    clock: u64,
    /// The clock at which the present block began.
    first_clock: u64,
    /// Warp barriers of each warp of the present block.
    warp_clocks: [u32; WARP_SIZE as usize],
}

impl SharedMemory {
    /// Shared memory of no bytes.
    pub fn new() -> Self {
        Self { bytes: 0, cells: Vec::new(), clock: 0, first_clock: 0, warp_clocks: [0; _] }
    }

    /// Makes this the unwritten shared memory of a new block.
    pub fn reset(&mut self, bytes: u32) {
        self.bytes = bytes;
        let words = bytes.div_ceil(4) as usize;
        if self.cells.len() < words {
            self.cells.resize(words, Cell::default());
        }
        self.clock += 1;
        self.first_clock = self.clock;
        self.warp_clocks.fill(0);
    }

    /// Its bytes.
    pub fn bytes(&self) -> u32 {
        self.bytes
    }

    /// Records a block barrier.
    pub fn synchronize_block(&mut self) {
        self.clock += 1;
    }

    /// Records a barrier of the lanes of `warp`.
    pub fn synchronize_warp(&mut self, warp: u32) {
        self.warp_clocks[warp as usize] += 1;
    }

    /// Reads the word at byte `offset`, which is in bounds.
    pub fn read(
        &mut self,
        offset: u32,
        kind: AccessKind,
        thread: ThreadIndex,
        location: Site,
    ) -> Result<u32, FaultKind> {
        let first_clock = self.first_clock;
        let cell = self.touch(offset, kind, thread, location)?;
        if cell.written < first_clock {
            return Err(FaultKind::PoisonedShared { offset, thread, location });
        }
        Ok(cell.value)
    }

    /// Writes the word at byte `offset`, which is in bounds.
    pub fn write(
        &mut self,
        offset: u32,
        value: u32,
        kind: AccessKind,
        thread: ThreadIndex,
        location: Site,
    ) -> Result<(), FaultKind> {
        let first_clock = self.first_clock;
        let cell = self.touch(offset, kind, thread, location)?;
        cell.value = value;
        cell.written = first_clock;
        Ok(())
    }

    fn touch(
        &mut self,
        offset: u32,
        kind: AccessKind,
        thread: ThreadIndex,
        location: Site,
    ) -> Result<&mut Cell, FaultKind> {
        // A thread of another block of the cluster has no warp here.
        let warp = self.warp_clocks.get((thread.0 / WARP_SIZE) as usize).copied().unwrap_or(0);
        let event = Event { thread, location, clock: Clock { block: self.clock, warp } };
        let cell = &mut self.cells[(offset / 4) as usize];
        match cell.history.add(kind, event) {
            Ok(()) => Ok(cell),
            Err((first, second)) => Err(FaultKind::SharedRace { offset, first, second }),
        }
    }
}
