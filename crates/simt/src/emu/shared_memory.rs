//! A block's shared memory: its words, which of them are written, and their recent accesses.

use super::clock::{Clocks, Event};
use super::fault::{Access, AccessKind, FaultKind, Site, ThreadIndex};
use super::proxy::Store;
use super::race::History;

#[derive(Clone, Default)]
struct Cell {
    value: u32,
    /// How many proxy fences the thread that last wrote it had called.
    fences: u32,
    /// Its last write, plain or atomic, and its last access of any kind.
    write: Option<Numbered>,
    access: Option<Numbered>,
    history: History,
}

/// An access, by its number among those to its block's memory and to those of the blocks before.
#[derive(Clone, Copy)]
struct Numbered {
    number: u64,
    kind: AccessKind,
    event: Event,
}

impl Numbered {
    /// What a fault says of it.
    fn access(self) -> Access {
        self.event.access(self.kind)
    }
}

impl Cell {
    /// The last write, if it came behind so many accesses.
    fn written_since(&self, accesses: u64) -> Option<Numbered> {
        self.write.filter(|write| write.number > accesses)
    }
}

/// Shared memory of a block. Reused from block to block: clocks and the numbers of accesses tell the data of earlier
/// blocks from the present block's, so that nothing needs to be cleared.
pub struct SharedMemory {
    bytes: u32,
    cells: Vec<Cell>,
    /// How many accesses there were, and how many before the present block.
    accesses: u64,
    before: u64,
    /// What its warps know of each other.
    pub clocks: Clocks,
}

/// What is in flight: a copy, which may write a word at any time until it is waited for, or a product, which reads it until then.
#[derive(Clone, Copy, Debug)]
pub struct InFlight {
    /// Who started it.
    pub thread: ThreadIndex,
    /// Where.
    pub location: Site,
    /// How many accesses there had been.
    pub accesses: u64,
}

impl SharedMemory {
    /// Shared memory of no bytes.
    pub fn new() -> Self {
        Self { bytes: 0, cells: Vec::new(), accesses: 0, before: 0, clocks: Clocks::new() }
    }

    /// Makes this the unwritten shared memory of a new block.
    pub fn reset(&mut self, bytes: u32) {
        self.bytes = bytes;
        let words = bytes.div_ceil(4) as usize;
        if self.cells.len() < words {
            self.cells.resize(words, Cell::default());
        }
        self.before = self.accesses;
        self.clocks.start_block();
    }

    /// Its bytes.
    pub fn bytes(&self) -> u32 {
        self.bytes
    }

    /// What a thread starts now.
    pub fn start(&self, thread: ThreadIndex, location: Site) -> InFlight {
        InFlight { thread, location, accesses: self.accesses }
    }

    /// Reads the word at byte `offset`, which is in bounds.
    ///
    /// # Errors
    /// It is not written, or the read races.
    pub fn read(
        &mut self,
        offset: u32,
        kind: AccessKind,
        thread: ThreadIndex,
        location: Site,
    ) -> Result<u32, FaultKind> {
        let before = self.before;
        let cell = self.touch(offset, kind, thread, location)?;
        if cell.written_since(before).is_none() {
            return Err(FaultKind::PoisonedShared { offset, thread, location });
        }
        Ok(cell.value)
    }

    /// Writes the word at byte `offset`, which is in bounds.
    ///
    /// # Errors
    /// The write races.
    pub fn write(
        &mut self,
        offset: u32,
        value: u32,
        kind: AccessKind,
        thread: ThreadIndex,
        location: Site,
    ) -> Result<(), FaultKind> {
        let fences = self.clocks.proxy_fences(thread);
        let cell = self.touch(offset, kind, thread, location)?;
        cell.value = value;
        cell.write = cell.access;
        cell.fences = fences;
        Ok(())
    }

    /// The word at byte `offset`, an operand of a product that is started now.
    ///
    /// # Errors
    /// As [`read`](Self::read), or no proxy fence has made the word visible.
    pub fn start_operand(&self, offset: u32, product: InFlight) -> Result<u32, FaultKind> {
        let InFlight { thread, location, .. } = product;
        self.check(offset, AccessKind::Read, thread, location)?;
        let cell = &self.cells[(offset / 4) as usize];
        let Some(write) = cell.written_since(self.before) else {
            return Err(FaultKind::PoisonedShared { offset, thread, location });
        };
        if self.clocks.is_visible(Store { at: write.event.at, fences: cell.fences }, thread) {
            return Ok(cell.value);
        }
        Err(FaultKind::UnfencedOperand { offset, write: write.access(), thread, location })
    }

    /// A product has read its operand at byte `offset` until now.
    ///
    /// # Errors
    /// The word was written meanwhile, or the read races.
    pub fn end_operand(&mut self, offset: u32, product: InFlight) -> Result<(), FaultKind> {
        let InFlight { thread, location, accesses } = product;
        let cell = &self.cells[(offset / 4) as usize];
        if let Some(write) = cell.written_since(accesses) {
            let write = write.access();
            return Err(FaultKind::OperandOverwritten { offset, write, thread, location });
        }
        self.touch(offset, AccessKind::Read, thread, location).map(drop)
    }

    /// A copy into the word at byte `offset`, which is in bounds, is started now.
    ///
    /// # Errors
    /// It races with an earlier access.
    pub fn start_copy(&self, offset: u32, copy: InFlight) -> Result<(), FaultKind> {
        self.check(offset, AccessKind::Write, copy.thread, copy.location)
    }

    /// A copy has written the word at byte `offset` between its start and now.
    ///
    /// # Errors
    /// Somebody has accessed the word meanwhile.
    pub fn end_copy(&mut self, offset: u32, value: u32, copy: InFlight) -> Result<(), FaultKind> {
        self.check_copy(offset, copy)?;
        self.write(offset, value, AccessKind::Write, copy.thread, copy.location)
    }

    /// Checks that nobody has accessed the word at byte `offset` since a copy into it was started.
    pub fn check_copy(&self, offset: u32, copy: InFlight) -> Result<(), FaultKind> {
        let InFlight { thread, location, accesses } = copy;
        let cell = &self.cells[(offset / 4) as usize];
        let Some(access) = cell.access.filter(|access| access.number > accesses) else {
            return Ok(());
        };
        Err(FaultKind::CopyInFlight { offset, access: access.access(), thread, location })
    }

    /// Checks that an access to the word at byte `offset` does not race.
    fn check(
        &self,
        offset: u32,
        kind: AccessKind,
        thread: ThreadIndex,
        location: Site,
    ) -> Result<(), FaultKind> {
        let cell = &self.cells[(offset / 4) as usize];
        let racing = cell.history.racing(kind, thread, &self.clocks);
        racing.map_or(Ok(()), |(first, of)| {
            let (first, second) = (of.access(first), Access { thread, kind, location });
            Err(FaultKind::SharedRace { offset, first, second })
        })
    }

    fn touch(
        &mut self,
        offset: u32,
        kind: AccessKind,
        thread: ThreadIndex,
        location: Site,
    ) -> Result<&mut Cell, FaultKind> {
        self.check(offset, kind, thread, location)?;
        let event = self.clocks.event(thread, location);
        self.accesses += 1;
        let cell = &mut self.cells[(offset / 4) as usize];
        cell.history.add(kind, event, &self.clocks);
        cell.access = Some(Numbered { number: self.accesses, kind, event });
        Ok(cell)
    }
}
