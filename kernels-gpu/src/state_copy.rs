//! Copies slots or blocks, of all layers in one launch: to a checkpoint or another image, back, or to another slot or
//! block. The host tier, transfers and forks use it for blocks.
//!
//! A **unit** is a slot or a block: its rows in many pools. An **image** has such rows one after the other: some rows
//! of a slot, in order of position (a checkpoint), or all rows of a unit.
//!
//! All pools of a kind of unit are in one allocation, and a table says which part of it each thread block copies. A
//! **piece** is up to 512 words of one pool. A word has 16 bytes, or 4 where the size of rows is not a multiple of 16.
//! A piece is described by 8 numbers:
//!
//! | | |
//! |---|---|
//! | base | where the pool begins, in granules of 256 bytes |
//! | start | words of a unit before the ring |
//! | unit words | words of a unit in the pool |
//! | row | words of a row, not 0 |
//! | ring | rows of the ring, not 0: a position has row `position mod ring` |
//! | rows | rows of the pool that an image holds: those of the last positions before its end |
//! | image | words of an image before these rows, which lie there in order of position |
//! | first | the piece's first word among those of the rows; with [`CopyStateParams::NARROW`] words have 4 bytes |
//!
//! A whole unit is copied as one row of a ring of one row.

use crate::args::CopyState;
use crate::params::CopyStateParams;
use simt::mem::{Global, GlobalMut};
use simt::thread;

use crate::fault;
use crate::unroll::{array_from_fn, unroll};

/// Threads of a thread block.
const THREADS: u32 = 128;
/// Number of words that a thread copies; all are loaded before the first is stored.
const WORDS: usize = (CopyStateParams::BLOCK_WORDS / THREADS) as usize;

/// The part of a pool that a thread block copies.
#[derive(Clone, Copy)]
struct Piece {
    base: u32,
    start: u32,
    unit_words: u32,
    row: u32,
    ring: u32,
    rows: u32,
    image: u32,
    first: u32,
}

/// Source and destination of one copy.
#[derive(Clone, Copy)]
struct Job {
    unit: u32,
    /// An image, or another unit.
    other: u32,
    /// The position after the last row of the image.
    end: u32,
    /// The position after the last row that is copied.
    copied: u32,
}

impl Piece {
    /// Loads piece `index`.
    ///
    /// # Safety
    /// The table has the piece.
    #[inline(always)]
    unsafe fn load(pieces: Global<u32>, index: u32) -> Self {
        let at = u64::from(index) * u64::from(CopyStateParams::PIECE);
        // SAFETY: by this function's own contract.
        let ([base, start, unit_words, row], [ring, rows, image, first]) =
            unsafe { (pieces.load_u32x4(at), pieces.load_u32x4(at + 4)) };
        Self { base, start, unit_words, row, ring, rows, image, first }
    }
}

impl Job {
    /// Loads job `index`.
    ///
    /// # Safety
    /// There is such a job.
    #[inline(always)]
    unsafe fn load(jobs: Global<i32>, index: u32) -> Self {
        let at = u64::from(index) * u64::from(CopyStateParams::JOB);
        // SAFETY: by this function's own contract.
        let [unit, other, end, copied] = unsafe { jobs.load_u32x4(at) };
        Self { unit, other, end, copied }
    }
}

/// A width of word that the copy moves.
trait Word {
    type Value: Copy + Default;
    /// 32-bit elements of a word.
    const ELEMENTS: u32;

    /// # Safety
    /// `memory` has the word's elements, from `at` on, a multiple of their number.
    unsafe fn load(memory: GlobalMut<u32>, at: u64) -> Self::Value;
    /// # Safety
    /// As [`Self::load`].
    unsafe fn store(memory: GlobalMut<u32>, at: u64, value: Self::Value);
}

/// 16 bytes.
struct Wide;
/// 4 bytes.
struct Narrow;

impl Word for Wide {
    type Value = [u32; 4];
    const ELEMENTS: u32 = 4;

    #[inline(always)]
    unsafe fn load(memory: GlobalMut<u32>, at: u64) -> [u32; 4] {
        // SAFETY: by this function's own contract.
        unsafe { memory.load_u32x4(at) }
    }

    #[inline(always)]
    unsafe fn store(memory: GlobalMut<u32>, at: u64, value: [u32; 4]) {
        // SAFETY: by this function's own contract.
        unsafe { memory.store_u32x4(at, value) }
    }
}

impl Word for Narrow {
    type Value = u32;
    const ELEMENTS: u32 = 1;

    #[inline(always)]
    unsafe fn load(memory: GlobalMut<u32>, at: u64) -> u32 {
        // SAFETY: by this function's own contract.
        unsafe { memory.load(at) }
    }

    #[inline(always)]
    unsafe fn store(memory: GlobalMut<u32>, at: u64, value: u32) {
        // SAFETY: by this function's own contract.
        unsafe { memory.store(at, value) }
    }
}

/// Copies a piece of a job, by the modes of [`CopyStateParams`].
///
/// # Safety
/// Pointers and shapes as in the kernel table; no job writes what another reads or writes; all threads of a launch
/// of grid `(pieces, jobs)` with 128 threads a block call it.
#[inline(always)]
pub unsafe fn copy(args: CopyState) {
    let (x, y) = (thread::block_idx_x(), thread::block_idx_y());
    // SAFETY: the grid has a block for each piece of each job.
    unsafe {
        let (piece, job) = (Piece::load(args.pieces, x), Job::load(args.jobs, y));
        let CopyStateParams { mode, units, images, .. } = args.params;
        let others = if mode == CopyStateParams::COPY { units } else { images };
        if job.unit >= units || job.other >= others || piece.row == 0 || piece.ring == 0 {
            fault::count(args.faults, thread::thread_idx_x(), 1);
            return;
        }
        if piece.first & CopyStateParams::NARROW == 0 {
            copy_words::<Wide>(args, piece, job);
        } else {
            copy_words::<Narrow>(args, piece, job);
        }
    }
}

/// Copies the words of a piece.
///
/// # Safety
/// As [`copy`].
#[inline(always)]
unsafe fn copy_words<W: Word>(args: CopyState, piece: Piece, job: Job) {
    let (units, images) = (args.units.cast::<u32>(), args.images.cast::<u32>());
    let (from, to) = match args.params.mode {
        CopyStateParams::PACK => (units, images),
        CopyStateParams::UNPACK => (images, units),
        _ => (units, units),
    };
    let between = Between::new::<W>(args.params, piece, job);
    let mut walk = Walk::new(piece, job);
    let copies: [WordCopy; WORDS] = array_from_fn(|_| {
        let copy = between.copy_of(walk);
        walk.advance();
        copy
    });
    let elements = u64::from(W::ELEMENTS);
    // SAFETY: the words lie in the memory; its first word does, where a piece has none.
    unsafe {
        let values: [W::Value; WORDS] = array_from_fn(|i| W::load(from, copies[i].from * elements));
        unroll::<WORDS>(|i| {
            if copies[i].is_copied {
                W::store(to, copies[i].to * elements, values[i]);
            }
        });
    }
}

/// The words of a piece that a thread copies, in order. The first position needs a division; after that the thread
/// advances by the number of threads of a block.
#[derive(Clone, Copy)]
struct Walk {
    /// Index of the word among the words of the rows.
    word: u32,
    /// Number of the row among those that the image has.
    number: u32,
    within: u32,
    ring_row: u32,
    piece: Piece,
    /// A step as whole rows, and the words that remain.
    step: (u32, u32),
}

impl Walk {
    #[inline(always)]
    fn new(piece: Piece, job: Job) -> Self {
        let word = (piece.first & !CopyStateParams::NARROW) + thread::thread_idx_x();
        let number = word / piece.row;
        let first = job.end.wrapping_sub(piece.rows);
        Self {
            word,
            number,
            within: word % piece.row,
            ring_row: first.wrapping_add(number) % piece.ring,
            piece,
            step: (THREADS / piece.row, THREADS % piece.row),
        }
    }

    /// Advances to the thread's next word. Wraps around the ring at most once: a step of more rows than the ring ends
    /// after the last row.
    #[inline(always)]
    fn advance(&mut self) {
        let Piece { row, ring, .. } = self.piece;
        let (rows, words) = self.step;
        let within = self.within + words;
        let carry = u32::from(within >= row);
        self.word += THREADS;
        self.within = if carry == 1 { within - row } else { within };
        self.number = self.number.wrapping_add(rows + carry);
        let ring_row = self.ring_row.wrapping_add(rows + carry);
        self.ring_row = if ring_row >= ring { ring_row - ring } else { ring_row };
    }
}

/// The source and the destination of the rows of a piece, and the ends of their memory, in words.
#[derive(Clone, Copy)]
struct Between {
    mode: u32,
    unit: u64,
    other: u64,
    image: u64,
    units_end: u64,
    images_end: u64,
    /// The number of the first row that is not copied.
    copied: u32,
    piece: Piece,
}

/// The source and the destination of a word.
#[derive(Clone, Copy, Default)]
struct WordCopy {
    from: u64,
    to: u64,
    is_copied: bool,
}

impl Between {
    #[inline(always)]
    fn new<W: Word>(params: CopyStateParams, piece: Piece, job: Job) -> Self {
        let CopyStateParams { mode, memory_granules, images, image_granules, .. } = params;
        let Piece { base, start, unit_words, rows, image, .. } = piece;
        let per_granule = u64::from(256 / (4 * W::ELEMENTS));
        let product = |a: u32, b: u32| u64::from(a) * u64::from(b);
        let of_images = |number: u32| product(number, image_granules).wrapping_mul(per_granule);
        let pool = (u64::from(base) * per_granule).wrapping_add(u64::from(start));
        let first = job.end.wrapping_sub(rows);
        Self {
            mode,
            unit: pool.wrapping_add(product(job.unit, unit_words)),
            other: pool.wrapping_add(product(job.other, unit_words)),
            image: of_images(job.other).wrapping_add(u64::from(image)),
            units_end: u64::from(memory_granules) * per_granule,
            images_end: of_images(images),
            copied: rows.min(job.copied.saturating_sub(first)),
            piece,
        }
    }

    /// The source and the destination of a word. For a word that is not copied, the source is the first word of the
    /// source rows, which no job writes: so no load is in a branch.
    #[inline(always)]
    fn copy_of(self, walk: Walk) -> WordCopy {
        let Walk { word, number, within, ring_row, .. } = walk;
        let row = u64::from(ring_row) * u64::from(self.piece.row) + u64::from(within);
        let in_unit = (self.unit.wrapping_add(row), self.units_end);
        let in_image = (self.image.wrapping_add(u64::from(word)), self.images_end);
        let ((from, from_end), (to, to_end)) = match self.mode {
            CopyStateParams::PACK => (in_unit, in_image),
            CopyStateParams::UNPACK => (in_image, in_unit),
            _ => (in_unit, (self.other.wrapping_add(row), self.units_end)),
        };
        let source = if self.mode == CopyStateParams::UNPACK { self.image } else { self.unit };
        let first = if source < from_end { source } else { 0 };
        let is_copied = number < self.copied && from < from_end && to < to_end;
        WordCopy {
            from: if is_copied { from } else { first },
            to: if is_copied { to } else { 0 },
            is_copied,
        }
    }
}
