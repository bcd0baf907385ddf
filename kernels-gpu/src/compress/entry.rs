//! Gathers a main entry from the four warps that have its channels, and quantises it in one warp.

use kv_layout::geometry::HEAD_DIM;
use simt::mem::GlobalMut;
use simt::shared::Shared;
use simt::{thread, warp};

use super::{Finish, Quad, sum_of_squares};
use crate::fault;
use crate::row::{Bf16Lane, ROW_WORDS, RowFormat};

/// Number of warps that hold one main vector, four channels a lane.
pub const MAIN_WARPS: usize = HEAD_DIM as usize / 128;

/// A block's shared memory for an entry.
#[derive(Clone, Copy)]
pub struct EntryMemory {
    /// Sum of squares of each warp.
    squares: Shared<f32, MAIN_WARPS>,
    /// The entry, two channels to a word.
    words: Shared<u32, ROW_WORDS>,
}

impl EntryMemory {
    /// Bytes of shared memory.
    pub const BYTES: u32 = Shared::<f32, MAIN_WARPS>::BYTES + Shared::<u32, ROW_WORDS>::BYTES;

    /// The memory at the start of the block's shared memory.
    ///
    /// # Safety
    /// The block has [`Self::BYTES`] of it and uses them for nothing else.
    #[inline(always)]
    #[must_use]
    pub unsafe fn new() -> Self {
        // SAFETY: by this function's own contract.
        unsafe {
            Self { squares: Shared::at(0), words: Shared::at(Shared::<f32, MAIN_WARPS>::BYTES) }
        }
    }

    /// The sum of squares of a vector, in a fixed order of additions. Each thread has four channels of the vector.
    ///
    /// # Safety
    /// All threads of the block, four warps, call it together, once.
    #[inline(always)]
    #[must_use]
    pub unsafe fn sum_of_squares(self, pooled: Quad) -> f32 {
        let Self { squares, .. } = self;
        // SAFETY: by this function's own contract; one lane writes a word, before the barrier.
        unsafe {
            let of_warp = warp::reduce_add_f32(sum_of_squares(pooled));
            if thread::lane_id() == 0 {
                squares.store(thread::warp_id(), of_warp);
            }
            thread::sync_threads();
            ((squares.load(0) + squares.load(1)) + squares.load(2)) + squares.load(3)
        }
    }

    /// Norms and rotates a pooled vector, of which each thread has four channels, and quantises it into row `row` of
    /// the planes. Without a row it writes nothing and counts a fault.
    ///
    /// # Safety
    /// All threads of the block, four warps, call it together, once; the planes have the row; `faults` holds
    /// one word.
    #[inline(always)]
    pub unsafe fn store<F: RowFormat>(
        self,
        pooled: Quad,
        (finish, rotation): (Finish, [(f32, f32); 2]),
        [data, scale]: [GlobalMut<u8>; 2],
        row: Option<u64>,
        faults: GlobalMut<u32>,
    ) {
        let (Self { words, .. }, lane) = (self, thread::lane_id());
        let word = 2 * thread::thread_idx_x();
        // SAFETY: by this function's own contract; each word is written by one thread before a barrier.
        unsafe {
            let squares = self.sum_of_squares(pooled);
            let [low, high] = finish.apply::<HEAD_DIM>(pooled, squares, rotation);
            words.store(word, low);
            words.store(word + 1, high);
            thread::sync_threads();
            if thread::warp_id() == 0 {
                let entry = Bf16Lane::from_shared(words, lane);
                entry.store_quantised::<F>(data, scale, row, lane);
                fault::count(faults, lane, u32::from(row.is_none()));
            }
        }
    }
}
