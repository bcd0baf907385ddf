//! A block's shared memory: its words, which of them are written, and their recent accesses.

use super::fault::{AccessKind, FaultKind, Site, ThreadIndex};
use super::race::{Clocks, History};

#[derive(Clone, Default)]
struct Cell {
    value: u32,
    /// The block, by [`SharedMemory::block`], that last wrote it.
    written: u64,
    history: History,
}

/// Shared memory of a block. Reused from block to block: clocks and the block's number tell the data of earlier
/// blocks from the present block's, so that nothing needs to be cleared.
pub struct SharedMemory {
    bytes: u32,
    cells: Vec<Cell>,
    /// Blocks so far, the present one included.
    block: u64,
    /// What its warps know of each other.
    pub clocks: Clocks,
}

impl SharedMemory {
    /// Shared memory of no bytes.
    pub fn new() -> Self {
        Self { bytes: 0, cells: Vec::new(), block: 0, clocks: Clocks::new() }
    }

    /// Makes this the unwritten shared memory of a new block.
    pub fn reset(&mut self, bytes: u32) {
        self.bytes = bytes;
        let words = bytes.div_ceil(4) as usize;
        if self.cells.len() < words {
            self.cells.resize(words, Cell::default());
        }
        self.block += 1;
        self.clocks.start_block();
    }

    /// Its bytes.
    pub fn bytes(&self) -> u32 {
        self.bytes
    }

    /// Reads the word at byte `offset`, which is in bounds.
    pub fn read(
        &mut self,
        offset: u32,
        kind: AccessKind,
        thread: ThreadIndex,
        location: Site,
    ) -> Result<u32, FaultKind> {
        let block = self.block;
        let cell = self.touch(offset, kind, thread, location)?;
        if cell.written < block {
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
        let block = self.block;
        let cell = self.touch(offset, kind, thread, location)?;
        cell.value = value;
        cell.written = block;
        Ok(())
    }

    fn touch(
        &mut self,
        offset: u32,
        kind: AccessKind,
        thread: ThreadIndex,
        location: Site,
    ) -> Result<&mut Cell, FaultKind> {
        let event = self.clocks.event(thread, location);
        let cell = &mut self.cells[(offset / 4) as usize];
        match cell.history.add(kind, event, &self.clocks) {
            Ok(()) => Ok(cell),
            Err((first, second)) => Err(FaultKind::SharedRace { offset, first, second }),
        }
    }
}
