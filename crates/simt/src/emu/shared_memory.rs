//! The shared memory of a block: its words, which of them are written, and the accesses with which later ones may race.
//!
//! Most accesses are to 16 aligned bytes, a granule. As long as every access to a granule was to the whole granule, its
//! four words share one history. The first access to fewer words splits the granule: then each word has a history of
//! its own. The next plain write to the whole granule joins it again.

use super::clock::{Clocks, Event};
use super::fault::{Access, AccessKind, FaultKind, Site, ThreadIndex};
use super::in_flight::{GRANULE_BYTES, InFlight};
use super::operands::OfProduct;
use super::proxy::Store;
use super::race::History;

const GRANULE_WORDS: usize = GRANULE_BYTES as usize / 4;

/// The accesses to a word, or to a granule that is not split.
#[derive(Clone)]
struct Accesses {
    history: History,
    /// The numbers of the last write, plain or atomic, and of the last access of any kind; 0 before the first. Numbers
    /// count all accesses to this memory from 1 on, including those of earlier blocks.
    written: u64,
    accessed: u64,
    /// Number of proxy fences that the thread of the last write had called before.
    fences: u32,
    /// The kind of the last access.
    kind: AccessKind,
}

/// An access that is made now.
#[derive(Clone, Copy)]
struct New {
    number: u64,
    kind: AccessKind,
    event: Event,
    /// For a write, the number of proxy fences that its thread has called; for a read `None`.
    fences: Option<u32>,
}

/// The last write to a word.
struct LastWrite {
    access: Access,
    store: Store,
}

impl Accesses {
    /// No access yet.
    fn none() -> Self {
        let (history, kind) = (History::default(), AccessKind::Read);
        Self { history, written: 0, accessed: 0, fences: 0, kind }
    }

    /// The last write, if its number is greater than `accesses`.
    fn written_since(&self, accesses: u64) -> Option<LastWrite> {
        let (kind, event) = self.history.last_write().filter(|_| self.written > accesses)?;
        let store = Store { at: event.at, fences: self.fences };
        Some(LastWrite { access: event.access(kind), store })
    }

    /// The last access, if its number is greater than `accesses`, or one by another lane of its warp at the same time.
    fn accessed_since(&self, accesses: u64) -> Option<Access> {
        let event = self.history.last(self.kind).filter(|_| self.accessed > accesses)?;
        Some(event.access(self.kind))
    }

    /// Adds an access that does not race.
    fn add(&mut self, New { number, kind, event, fences }: New, clocks: &Clocks) {
        self.history.add((kind, fences.is_some()), event, clocks);
        (self.accessed, self.kind) = (number, kind);
        if let Some(fences) = fences {
            (self.written, self.fences) = (number, fences);
        }
    }

    fn copy_from(&mut self, other: &Self) {
        let Self { history, written, accessed, fences, kind } = self;
        history.copy_from(&other.history);
        (*written, *accessed) = (other.written, other.accessed);
        (*fences, *kind) = (other.fences, other.kind);
    }
}

/// Aligned words within a granule: the first byte, and their number.
#[derive(Clone, Copy)]
struct Span {
    offset: u32,
    words: usize,
}

impl Span {
    fn new(offset: u32, words: usize) -> Self {
        let bytes = 4 * words as u32;
        debug_assert!(offset % GRANULE_BYTES + bytes <= GRANULE_BYTES, "the address was checked");
        Self { offset, words }
    }

    /// The granule of the word at byte `offset`.
    fn granule_of(offset: u32) -> Self {
        Self { offset: offset / GRANULE_BYTES * GRANULE_BYTES, words: GRANULE_WORDS }
    }

    /// The number of its granule.
    fn granule(self) -> usize {
        (self.offset / GRANULE_BYTES) as usize
    }

    fn is_granule(self) -> bool {
        self.words == GRANULE_WORDS
    }
}

/// Shared memory of a block. Reused from block to block: clocks and access numbers distinguish the data of earlier
/// blocks from the present block's, so that nothing needs to be cleared.
pub struct SharedMemory {
    bytes: u32,
    values: Vec<u32>,
    /// The accesses to each granule that is not split.
    granules: Vec<Accesses>,
    is_split: Vec<bool>,
    /// The accesses to each word of a split granule.
    words: Vec<Accesses>,
    /// The number of accesses so far, and of those before the present block.
    count: u64,
    before: u64,
    /// The vector clocks of the block's warps.
    pub clocks: Clocks,
}

impl SharedMemory {
    /// Shared memory of no bytes.
    pub fn new() -> Self {
        Self {
            bytes: 0,
            values: Vec::new(),
            granules: Vec::new(),
            is_split: Vec::new(),
            words: Vec::new(),
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
            self.granules.resize(granules, Accesses::none());
            self.is_split.resize(granules, false);
            self.words.resize(words, Accesses::none());
        }
        self.before = self.count;
        self.clocks.start_block();
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> u32 {
        self.bytes
    }

    /// A copy or a product that a thread starts now.
    pub fn start(&self, thread: ThreadIndex, location: Site) -> InFlight {
        InFlight { thread, location, accesses: self.count }
    }

    /// Reads words from byte `offset` on, which are in bounds, aligned and in one granule.
    ///
    /// # Errors
    /// A word was not written, or the read races.
    pub fn read(
        &mut self,
        (offset, to): (u32, &mut [u32]),
        kind: AccessKind,
        thread: ThreadIndex,
        location: Site,
    ) -> Result<(), FaultKind> {
        let span = Span::new(offset, to.len());
        self.check_all(span, kind, (thread, location))?;
        self.add(span, kind, self.clocks.event(thread, location), None);
        for (offset, accesses) in self.accesses(span) {
            if accesses.written <= self.before {
                return Err(FaultKind::PoisonedShared { offset, thread, location });
            }
        }
        self.copy_to(offset, to);
        Ok(())
    }

    /// Writes words from byte `offset` on, which are in bounds, aligned and in one granule.
    ///
    /// # Errors
    /// The write races.
    pub fn write(
        &mut self,
        (offset, from): (u32, &[u32]),
        kind: AccessKind,
        thread: ThreadIndex,
        location: Site,
    ) -> Result<(), FaultKind> {
        let span = Span::new(offset, from.len());
        self.check_all(span, kind, (thread, location))?;
        let fences = self.clocks.proxy_fences(thread);
        self.add(span, kind, self.clocks.event(thread, location), Some(fences));
        let first = (offset / 4) as usize;
        self.values[first..first + from.len()].copy_from_slice(from);
        Ok(())
    }

    /// The words from byte `offset` on, which are in bounds and were checked.
    pub fn copy_to(&self, offset: u32, to: &mut [u32]) {
        let first = (offset / 4) as usize;
        to.copy_from_slice(&self.values[first..first + to.len()]);
    }

    /// Checks that a product, which a thread has started at `location`, may read the granule of the word at byte
    /// `offset`.
    ///
    /// # Errors
    /// As [`read`](Self::read), or no proxy fence has made a word visible to the product.
    pub fn start_operands(
        &self,
        offset: u32,
        thread: ThreadIndex,
        location: Site,
    ) -> Result<(), FaultKind> {
        for (offset, accesses) in self.accesses(Span::granule_of(offset)) {
            let Some(LastWrite { access: write, store }) = accesses.written_since(self.before)
            else {
                return Err(FaultKind::PoisonedShared { offset, thread, location });
            };
            // All lanes of a warp take part in a product, so a lane's own write must be ordered before the other lanes.
            let other = ThreadIndex(thread.0 ^ 1);
            let reader = if write.thread == thread { other } else { thread };
            self.check(offset, accesses, AccessKind::Read, (reader, location))?;
            if !self.clocks.is_visible(store, thread) {
                return Err(FaultKind::UnfencedOperand { offset, write, thread, location });
            }
        }
        Ok(())
    }

    /// Records that a product has read its operands until now, when `waited`, the last thread of the warp, has waited
    /// for it.
    ///
    /// # Errors
    /// An operand was written since the product started.
    pub fn end_operands(
        &mut self,
        operands: &OfProduct,
        waited: ThreadIndex,
    ) -> Result<(), FaultKind> {
        let InFlight { thread, location, accesses: before } = operands.product;
        let event = self.clocks.event(waited, location);
        for granule in operands.granules() {
            let span = Span::granule_of(granule);
            for (offset, accesses) in self.accesses(span) {
                if let Some(LastWrite { access: write, .. }) = accesses.written_since(before) {
                    return Err(FaultKind::OperandOverwritten { offset, write, thread, location });
                }
            }
            self.add(span, AccessKind::Read, event, None);
        }
        Ok(())
    }

    /// Checks that a copy may start now, into words from byte `offset` on, which are in bounds, aligned and in one
    /// granule.
    ///
    /// # Errors
    /// It races with an earlier access.
    pub fn start_copy(&self, offset: u32, words: usize, copy: InFlight) -> Result<(), FaultKind> {
        self.check_all(Span::new(offset, words), AccessKind::Write, (copy.thread, copy.location))
    }

    /// Writes words from byte `offset` on for a copy, which has taken place between its start and now.
    ///
    /// # Errors
    /// A word was accessed since the copy started, or the write races.
    pub fn end_copy(&mut self, offset: u32, from: &[u32], copy: InFlight) -> Result<(), FaultKind> {
        self.check_copy(offset, from.len(), copy)?;
        self.write((offset, from), AccessKind::Write, copy.thread, copy.location)
    }

    /// Checks that no thread has accessed `words` words from byte `offset` on since a copy into them was started.
    pub fn check_copy(&self, offset: u32, words: usize, copy: InFlight) -> Result<(), FaultKind> {
        let InFlight { thread, location, accesses: before } = copy;
        for (offset, accesses) in self.accesses(Span::new(offset, words)) {
            if let Some(access) = accesses.accessed_since(before) {
                return Err(FaultKind::CopyInFlight { offset, access, thread, location });
            }
        }
        Ok(())
    }

    /// The accesses to the words of a span, each with the byte offset of its first word.
    fn accesses(&self, span: Span) -> impl Iterator<Item = (u32, &Accesses)> {
        let Span { offset, words } = span;
        let (all, count) = if self.is_split[span.granule()] {
            (&self.words[(offset / 4) as usize..], words)
        } else {
            (&self.granules[span.granule()..], 1)
        };
        (offset..).step_by(4).zip(&all[..count])
    }

    /// Checks that an access to a span does not race.
    fn check_all(
        &self,
        span: Span,
        kind: AccessKind,
        by: (ThreadIndex, Site),
    ) -> Result<(), FaultKind> {
        self.accesses(span)
            .try_for_each(|(offset, accesses)| self.check(offset, accesses, kind, by))
    }

    fn check(
        &self,
        offset: u32,
        accesses: &Accesses,
        kind: AccessKind,
        (thread, location): (ThreadIndex, Site),
    ) -> Result<(), FaultKind> {
        let racing = accesses.history.racing(kind, thread, &self.clocks);
        racing.map_or(Ok(()), |(first, of)| {
            let (first, second) = (of.access(first), Access { thread, kind, location });
            Err(FaultKind::SharedRace { offset, first, second })
        })
    }

    /// Adds an access to a span, which does not race. For a write, `fences` is the number of proxy fences that its
    /// thread has called.
    fn add(&mut self, span: Span, kind: AccessKind, event: Event, fences: Option<u32>) {
        self.count += 1;
        let new = New { number: self.count, kind, event, fences };
        let (granule, first) = (span.granule(), (span.offset / 4) as usize);
        // A plain write replaces the whole history.
        let joins = matches!(kind, AccessKind::Write) || !self.is_split[granule];
        if span.is_granule() && joins {
            self.is_split[granule] = false;
            self.granules[granule].add(new, &self.clocks);
            return;
        }
        if !self.is_split[granule] {
            self.split(granule);
        }
        for accesses in &mut self.words[first..first + span.words] {
            accesses.add(new, &self.clocks);
        }
    }

    /// Gives each word of a granule a history of its own.
    fn split(&mut self, granule: usize) {
        let first = GRANULE_WORDS * granule;
        for word in &mut self.words[first..first + GRANULE_WORDS] {
            word.copy_from(&self.granules[granule]);
        }
        self.is_split[granule] = true;
    }
}
