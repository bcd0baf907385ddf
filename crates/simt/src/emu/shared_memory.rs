//! A block's shared memory: its words, which of them are written, and their recent accesses.

use super::clock::{Clocks, Event};
use super::fault::{Access, AccessKind, FaultKind, Site, ThreadIndex};
use super::operands::OfProduct;
use super::proxy::Store;
use super::race::{Concurrent, History};

/// Operands of products are read by so many bytes.
pub const GRANULE_BYTES: u32 = 16;
const GRANULE_WORDS: usize = GRANULE_BYTES as usize / 4;

/// The last write to a word, plain or atomic.
#[derive(Clone, Copy)]
struct LastWrite {
    access: Numbered,
    /// How many proxy fences its thread had called.
    fences: u32,
}

/// The accesses to a word: the last one, and those that later ones may race with.
#[derive(Clone, Default)]
struct Accesses {
    last: Option<Numbered>,
    history: History,
}

/// What products have read of four words.
#[derive(Clone, Default)]
struct Granule {
    reads: Concurrent,
    last: Option<Numbered>,
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

impl LastWrite {
    /// Whether it is no atomic: then nothing else that was done to the word races with a read.
    fn is_plain(&self) -> bool {
        matches!(self.access.kind, AccessKind::Write)
    }

    /// Whether a product may read the words of both writes or neither.
    fn is_like(&self, other: &Self) -> bool {
        let at = |write: &Self| (write.access.event.at, write.fences);
        self.is_plain() && other.is_plain() && at(self) == at(other)
    }
}

/// Shared memory of a block. Reused from block to block: clocks and the numbers of accesses tell the data of earlier
/// blocks from the present block's, so that nothing needs to be cleared.
pub struct SharedMemory {
    bytes: u32,
    /// The words, each of these apart: a product looks at the first two of many words.
    values: Vec<u32>,
    writes: Vec<Option<LastWrite>>,
    accesses: Vec<Accesses>,
    granules: Vec<Granule>,
    /// How many accesses there were, and how many before the present block.
    count: u64,
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
        Self {
            bytes: 0,
            values: Vec::new(),
            writes: Vec::new(),
            accesses: Vec::new(),
            granules: Vec::new(),
            count: 0,
            before: 0,
            clocks: Clocks::new(),
        }
    }

    /// Makes this the unwritten shared memory of a new block.
    pub fn reset(&mut self, bytes: u32) {
        self.bytes = bytes;
        let granules = bytes.div_ceil(GRANULE_BYTES) as usize;
        if self.granules.len() < granules {
            let words = GRANULE_WORDS * granules;
            self.values.resize(words, 0);
            self.writes.resize(words, None);
            self.accesses.resize(words, Accesses::default());
            self.granules.resize(granules, Granule::default());
        }
        self.before = self.count;
        self.clocks.start_block();
    }

    /// Its bytes.
    pub fn bytes(&self) -> u32 {
        self.bytes
    }

    /// What a thread starts now.
    pub fn start(&self, thread: ThreadIndex, location: Site) -> InFlight {
        InFlight { thread, location, accesses: self.count }
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
        self.touch(offset, kind, thread, location)?;
        if self.written_since(offset, self.before).is_none() {
            return Err(FaultKind::PoisonedShared { offset, thread, location });
        }
        Ok(self.value(offset))
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
        let access = self.touch(offset, kind, thread, location)?;
        let fences = self.clocks.proxy_fences(thread);
        self.writes[word(offset)] = Some(LastWrite { access, fences });
        self.values[word(offset)] = value;
        Ok(())
    }

    /// The word at byte `offset`, which is in bounds, and was checked.
    pub fn value(&self, offset: u32) -> u32 {
        self.values[word(offset)]
    }

    /// The last write to the word at byte `offset`, if it came behind so many accesses.
    fn written_since(&self, offset: u32, accesses: u64) -> Option<LastWrite> {
        self.writes[word(offset)].filter(|write| write.access.number > accesses)
    }

    /// A product that a thread has started there reads the granule of the word at byte `offset` from now on.
    ///
    /// # Errors
    /// As [`read`](Self::read), or no proxy fence has made a word visible.
    pub fn start_operands(
        &self,
        offset: u32,
        thread: ThreadIndex,
        location: Site,
    ) -> Result<(), FaultKind> {
        let granule = offset / GRANULE_BYTES * GRANULE_BYTES;
        let mut checked: Option<LastWrite> = None;
        for offset in (granule..granule + GRANULE_BYTES).step_by(4) {
            let Some(write) = self.written_since(offset, self.before) else {
                return Err(FaultKind::PoisonedShared { offset, thread, location });
            };
            if checked.is_none_or(|checked| !write.is_like(&checked)) {
                self.check_operand(offset, write, (thread, location))?;
            }
            checked = Some(write);
        }
        Ok(())
    }

    /// Checks that a product which a thread starts now may read the word at byte `offset`, which was last written so.
    fn check_operand(
        &self,
        offset: u32,
        LastWrite { access: write, fences }: LastWrite,
        (thread, location): (ThreadIndex, Site),
    ) -> Result<(), FaultKind> {
        let at = write.event.at;
        // A warp multiplies together: what one of its lanes wrote is to be ordered before what the others do.
        let other = ThreadIndex(thread.0 ^ 1);
        let reader = if at.thread == thread { other } else { thread };
        self.check(offset, AccessKind::Read, reader, location)?;
        if self.clocks.is_visible(Store { at, fences }, thread) {
            return Ok(());
        }
        Err(FaultKind::UnfencedOperand { offset, write: write.access(), thread, location })
    }

    /// A product has read its operands until now, when the last thread of the warp has waited for it.
    ///
    /// # Errors
    /// One was written meanwhile.
    pub fn end_operands(
        &mut self,
        operands: &OfProduct,
        waited: ThreadIndex,
    ) -> Result<(), FaultKind> {
        let InFlight { thread, location, accesses } = operands.product;
        let event = self.clocks.event(waited, location);
        for granule in operands.granules() {
            for offset in (granule..granule + GRANULE_BYTES).step_by(4) {
                if let Some(write) = self.written_since(offset, accesses) {
                    let write = write.access.access();
                    return Err(FaultKind::OperandOverwritten { offset, write, thread, location });
                }
            }
            self.count += 1;
            let granule = &mut self.granules[(granule / GRANULE_BYTES) as usize];
            granule.reads.add(event, &self.clocks);
            granule.last = Some(Numbered { number: self.count, kind: AccessKind::Read, event });
        }
        Ok(())
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
        let granule = &self.granules[(offset / GRANULE_BYTES) as usize];
        let mut last = self.accesses[word(offset)].last.into_iter().chain(granule.last);
        let Some(access) = last.find(|access| access.number > accesses) else { return Ok(()) };
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
        let is_read = matches!(kind, AccessKind::Read | AccessKind::ReadConstant);
        if is_read
            && let Some(write) = self.writes[word(offset)].filter(LastWrite::is_plain)
            && self.clocks.orders(write.access.event.at, thread)
        {
            return Ok(());
        }
        let history = &self.accesses[word(offset)].history;
        let racing = history.racing(kind, thread, &self.clocks).or_else(|| {
            let reads = &self.granules[(offset / GRANULE_BYTES) as usize].reads;
            let read = (!is_read).then(|| reads.racing(thread, &self.clocks));
            Some((AccessKind::Read, read.flatten()?))
        });
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
    ) -> Result<Numbered, FaultKind> {
        self.check(offset, kind, thread, location)?;
        let event = self.clocks.event(thread, location);
        self.count += 1;
        let access = Numbered { number: self.count, kind, event };
        let accesses = &mut self.accesses[word(offset)];
        accesses.history.add(kind, event, &self.clocks);
        accesses.last = Some(access);
        Ok(access)
    }
}

/// The number of the word at byte `offset`.
fn word(offset: u32) -> usize {
    (offset / 4) as usize
}
