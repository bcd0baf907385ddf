//! The state of a request, which lies in its slot's rows of many pools: copied to a checkpoint, back, or to another
//! slot, of all layers and requests in one launch.
//!
//! All pools of slots lie in one allocation, and a table says what of it each block copies. A **piece** is up to 512
//! words of one pool, of 16 bytes each, or of 4 where rows are no multiple of 16. Its 8 numbers:
//!
//! | | |
//! |---|---|
//! | base | where the pool begins, in units of 256 bytes |
//! | start | words of a slot before the ring |
//! | unit | words of a slot |
//! | row | words of a row, not 0 |
//! | ring | rows of the ring, not 0: a position has row `position mod ring` |
//! | rows | rows of the pool that a checkpoint holds: those of the last positions before its end |
//! | image | words of a checkpoint before these rows, which lie there in order of position |
//! | first | the piece's first word among those of the rows; with [`CopyStateParams::NARROW`] words have 4 bytes |
//!
//! A whole slot is copied as one row of a ring of one row.

use crate::args::CopyState;
use crate::params::CopyStateParams;
use simt::mem::{Global, GlobalMut};
use simt::thread;

use crate::fault;
use crate::unroll::{array_from_fn, unroll};

/// Threads of a block.
const THREADS: u32 = 128;
/// Words that a thread copies, all of them on their way before the first is stored.
const WORDS: usize = (CopyStateParams::BLOCK_WORDS / THREADS) as usize;

/// What a block copies of a pool.
#[derive(Clone, Copy)]
struct Piece {
    base: u32,
    start: u32,
    unit: u32,
    row: u32,
    ring: u32,
    rows: u32,
    image: u32,
    first: u32,
}

/// Between what it is copied.
#[derive(Clone, Copy)]
struct Job {
    slot: u32,
    other: u32,
    /// The position behind the last row of a checkpoint.
    end: u32,
    /// The position behind the last row that is copied.
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
        let ([base, start, unit, row], [ring, rows, image, first]) =
            unsafe { (pieces.load_u32x4(at), pieces.load_u32x4(at + 4)) };
        Self { base, start, unit, row, ring, rows, image, first }
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
        let [slot, other, end, copied] = unsafe { jobs.load_u32x4(at) };
        Self { slot, other, end, copied }
    }
}

/// A word as the copy moves it.
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
        let CopyStateParams { mode, slots, checkpoints, .. } = args.params;
        let others = if mode == CopyStateParams::SLOT { slots } else { checkpoints };
        if job.slot >= slots || job.other >= others || piece.row == 0 || piece.ring == 0 {
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

/// A word's places, as 32-bit elements.
#[derive(Clone, Copy, Default)]
struct Place {
    from: u64,
    to: u64,
    is_copied: bool,
}

/// Copies the words of a piece.
///
/// # Safety
/// As [`copy`].
#[inline(always)]
unsafe fn copy_words<W: Word>(args: CopyState, piece: Piece, job: Job) {
    let (slots, checkpoints) = (args.slots.cast::<u32>(), args.checkpoints.cast::<u32>());
    let (from, to) = match args.params.mode {
        CopyStateParams::SAVE => (slots, checkpoints),
        CopyStateParams::RESTORE => (checkpoints, slots),
        _ => (slots, slots),
    };
    let places: [Place; WORDS] = array_from_fn(|i| {
        let word = (piece.first & !CopyStateParams::NARROW) + i as u32 * THREADS;
        places::<W>(args.params, piece, job, word + thread::thread_idx_x())
    });
    // SAFETY: the places lie in the memory; the first words do, where a piece has none.
    unsafe {
        let values: [W::Value; WORDS] = array_from_fn(|i| W::load(from, places[i].from));
        unroll::<WORDS>(|i| {
            if places[i].is_copied {
                W::store(to, places[i].to, values[i]);
            }
        });
    }
}

/// Where word `word` of the rows is, and goes. What is not copied is read from the first word, so that no load stands
/// in a branch.
#[inline(always)]
fn places<W: Word>(params: CopyStateParams, piece: Piece, job: Job, word: u32) -> Place {
    let Piece { base, start, unit, row, ring, rows, image, .. } = piece;
    let per_unit = 256 / (4 * W::ELEMENTS);
    let product = |a: u32, b: u32| u64::from(a) * u64::from(b);
    let (number, within) = (word / row, word % row);
    let position = job.end.wrapping_sub(rows).wrapping_add(number);
    let in_ring = product(base, per_unit)
        .wrapping_add(u64::from(start))
        .wrapping_add(product(position % ring, row))
        .wrapping_add(u64::from(within));
    let in_slot = |slot: u32| in_ring.wrapping_add(product(slot, unit));
    let in_image = product(job.other, params.checkpoint_units)
        .wrapping_mul(u64::from(per_unit))
        .wrapping_add(u64::from(image))
        .wrapping_add(u64::from(word));
    let slot_words = product(params.slot_units, per_unit);
    let image_words = product(params.checkpoints, params.checkpoint_units);
    let image_words = image_words.wrapping_mul(u64::from(per_unit));
    let ((from, from_end), (to, to_end)) = match params.mode {
        CopyStateParams::SAVE => ((in_slot(job.slot), slot_words), (in_image, image_words)),
        CopyStateParams::RESTORE => ((in_image, image_words), (in_slot(job.slot), slot_words)),
        _ => ((in_slot(job.slot), slot_words), (in_slot(job.other), slot_words)),
    };
    let is_copied = number < rows && position < job.copied && from < from_end && to < to_end;
    let elements = u64::from(W::ELEMENTS);
    let from = if is_copied { from * elements } else { 0 };
    Place { from, to: to.wrapping_mul(elements), is_copied }
}
