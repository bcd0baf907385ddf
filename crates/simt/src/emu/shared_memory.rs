//! A block's shared memory: its words, which of them are written, and their recent accesses.

use super::clock::Clocks;
use super::fault::{Access, AccessKind, FaultKind, Site, ThreadIndex};
use super::proxy::Store;
use super::race::{History, Recorded};
use super::sites::Sites;

#[derive(Clone, Default)]
struct Cell {
    value: u32,
    /// How many proxy fences the thread that last wrote it had called.
    fences: u32,
    /// The numbers of its last write and of its last access, of any kind; 0 if there was none.
    written: u64,
    accessed: u64,
    /// Which those two were.
    last_write: Option<(AccessKind, Recorded)>,
    last: Option<(AccessKind, Recorded)>,
    history: History,
}

/// Shared memory of a block. Reused from block to block: clocks and the numbers of accesses tell the data of earlier
/// blocks from the present block's, so that nothing needs to be cleared.
pub struct SharedMemory {
    bytes: u32,
    cells: Vec<Cell>,
    /// Accesses so far, and those of earlier blocks.
    accesses: u64,
    before: u64,
    /// What its warps know of each other.
    pub clocks: Clocks,
    sites: Sites,
}

/// From these on a new block starts with nothing: what is remembered of an access has 32 bits for its time and 16 for its place.
const LATE: u64 = 1 << 31;
const MANY: usize = 1 << 15;

/// What is in flight: a copy, which may write a word at any time until it is waited for, or a product, which reads it until then.
#[derive(Clone, Copy, Debug)]
pub struct InFlight {
    /// Who started it, and where.
    pub thread: ThreadIndex,
    /// The place.
    pub location: Site,
    /// Accesses so far, when it was started.
    pub accesses: u64,
}

impl SharedMemory {
    /// Shared memory of no bytes.
    pub fn new() -> Self {
        Self {
            bytes: 0,
            cells: Vec::new(),
            accesses: 0,
            before: 0,
            clocks: Clocks::new(),
            sites: Sites::new(),
        }
    }

    /// Makes this the unwritten shared memory of a new block.
    pub fn reset(&mut self, bytes: u32) {
        if self.clocks.latest() >= LATE || self.sites.len() >= MANY {
            *self = Self::new();
        }
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
        if cell.written <= before {
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
        cell.written = cell.accessed;
        cell.last_write = cell.last;
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
        if cell.written <= self.before {
            return Err(FaultKind::PoisonedShared { offset, thread, location });
        }
        let (kind, write) = cell.last_write.expect("it is written");
        if self.clocks.is_visible(Store { at: write.at(), fences: cell.fences }, thread) {
            return Ok(cell.value);
        }
        let write = self.sites.access(kind, write);
        Err(FaultKind::UnfencedOperand { offset, write, thread, location })
    }

    /// A product has read its operand at byte `offset` until now.
    ///
    /// # Errors
    /// The word was written meanwhile, or the read races.
    pub fn end_operand(&mut self, offset: u32, product: InFlight) -> Result<(), FaultKind> {
        let InFlight { thread, location, accesses } = product;
        let cell = &self.cells[(offset / 4) as usize];
        if cell.written > accesses {
            let (kind, write) = cell.last_write.expect("it is written");
            let write = self.sites.access(kind, write);
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
        if cell.accessed <= accesses {
            return Ok(());
        }
        let (kind, access) = cell.last.expect("it is accessed");
        let access = self.sites.access(kind, access);
        Err(FaultKind::CopyInFlight { offset, access, thread, location })
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
            let (first, second) = (self.sites.access(first, of), Access { thread, kind, location });
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
        let new = Recorded::new(self.clocks.moment(thread), self.sites.number(location));
        self.accesses += 1;
        let cell = &mut self.cells[(offset / 4) as usize];
        cell.history.add(kind, new, &self.clocks);
        cell.accessed = self.accesses;
        cell.last = Some((kind, new));
        Ok(cell)
    }
}

impl Sites {
    /// What a fault says of an access.
    fn access(&self, kind: AccessKind, of: Recorded) -> Access {
        Access { thread: of.at().thread, kind, location: self.at(of.site) }
    }
}
