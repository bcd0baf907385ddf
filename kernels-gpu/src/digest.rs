//! Digests of sections of a payload: XXH3 with 128 bits, as the host computes it.
//!
//! A block of threads has one section. In XXH3's blocks of 1,024 bytes all products are independent, while the
//! scrambles after the blocks are a chain. So most warps sum the products of a tile of blocks, with a thread for each
//! word of a stripe. Meanwhile the last warp runs the chain over the sums of the previous tile, with a lane for each
//! accumulator.

use crate::args::DigestSections;
use crate::params::DigestParams;
use kv_layout::xxh3::{LANES, LAST_STRIPE, SCRAMBLE, SECRET, SHORT, START, STRIPES};
use simt::mem::Global;
use simt::shared::Shared;
use simt::{thread, warp};

use crate::fault;
use crate::unroll::{array_from_fn, unroll};

/// Threads that sum products.
const SUMMING: u32 = 256;
/// Threads of a block: those that sum products, and the warp with the chain.
pub const THREADS: u32 = SUMMING + 32;
/// Blocks of XXH3 in a tile.
const TILE: u32 = SUMMING / LANES;
/// Words of 8 bytes in a block of XXH3.
const BLOCK_WORDS: u32 = STRIPES * LANES;
/// 32-bit words of the sums of a tile.
const SUMS: u32 = TILE * LANES * 2;
/// Bytes of shared memory: the sums of two tiles, and the section's start and length.
pub const SHARED_BYTES: u32 = EXTENT + 8;
/// Byte of shared memory at which the section's start and length are.
const EXTENT: u32 = 2 * SUMS * 4;

/// One accumulator's part of a section.
#[derive(Clone, Copy)]
struct Lane {
    payload: Global<u32>,
    secret: Global<u32>,
    /// The section's first word of 8 bytes, and the number of its words.
    start: u64,
    words: u32,
    lane: u32,
}

#[inline(always)]
fn join([low, high]: [u32; 2]) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

#[inline(always)]
fn split(word: u64) -> [u32; 2] {
    [word as u32, (word >> 32) as u32]
}

/// The product of the halves of a stripe's word, combined with its secret.
#[inline(always)]
fn product(word: u64, secret: u64) -> u64 {
    let [low, high] = split(word ^ secret);
    u64::from(low) * u64::from(high)
}

impl Lane {
    /// Word `at` of the section.
    ///
    /// # Safety
    /// The section has it.
    #[inline(always)]
    unsafe fn word(self, at: u32) -> u64 {
        // SAFETY: by this function's own contract.
        join(unsafe { self.payload.load_u32x2(2 * (self.start + u64::from(at))) })
    }

    /// Word `at` of the secret.
    ///
    /// # Safety
    /// The secret has it.
    #[inline(always)]
    unsafe fn secret(self, at: u32) -> u64 {
        // SAFETY: by this function's own contract.
        join(unsafe { self.secret.load_u32x2(2 * u64::from(at)) })
    }

    /// The value that the stripe from word `first` on adds to the accumulator, with secret word `secret`.
    ///
    /// # Safety
    /// The section has the stripe.
    #[inline(always)]
    unsafe fn stripe(self, first: u32, secret: u64) -> u64 {
        // SAFETY: by this function's own contract.
        let (own, next) =
            unsafe { (self.word(first + self.lane), self.word(first + (self.lane ^ 1))) };
        product(own, secret).wrapping_add(next)
    }

    /// Number of blocks of the section after which the accumulators are scrambled: all but the last, which may be
    /// shorter.
    #[inline(always)]
    fn blocks(self) -> u32 {
        (self.words - 1) / BLOCK_WORDS
    }
}

/// Computes the accumulators of each section after its last stripe; of a short section, copies the bytes.
///
/// # Safety
/// Pointers and shapes as in the kernel table; all threads of a launch of grid `(sections, 1)` with 288 threads a block
/// call it.
#[inline(always)]
pub unsafe fn sections(args: DigestSections) {
    let (section, thread) = (thread::block_idx_x(), thread::thread_idx_x());
    let DigestParams { words: all, .. } = args.params;
    // SAFETY: the grid has a block for each section; a section that the payload does not have is refused. Each thread
    // passes the same barriers, since one thread has read how many tiles there are, whatever others write meanwhile.
    unsafe {
        let extent = Shared::<u32, 2>::at(EXTENT);
        if thread == 0 {
            extent.store_u32x2(0, args.sections.load_u32x2(2 * u64::from(section)));
        }
        thread::sync_threads();
        let [start, words] = extent.load_u32x2(0);
        if words > all || start > all - words {
            fault::count(args.faults, thread, 1);
            return;
        }
        let lane = Lane {
            payload: args.payload.cast::<u32>(),
            secret: args.secret,
            start: u64::from(start),
            words,
            lane: thread % LANES,
        };
        let record = u64::from(section) * u64::from(DigestParams::RECORD);
        if u64::from(words) * 8 <= SHORT {
            if thread < words {
                args.records.store_u32x2(record + 2 * u64::from(thread), split(lane.word(thread)));
            }
            return;
        }
        let sums = [Shared::at(0), Shared::at(SUMS * 4)];
        let accumulator = accumulate(lane, sums);
        if (SUMMING..SUMMING + LANES).contains(&thread) {
            let at = record + 2 * u64::from(lane.lane);
            args.records.store_u32x2(at, split(accumulator));
        }
    }
}

/// Returns the accumulator of a lane of the last warp after the last stripe; in other threads the result is not used.
///
/// # Safety
/// The section is one of the payload, of more than [`SHORT`] bytes; all threads of the block call it.
#[inline(always)]
unsafe fn accumulate(lane: Lane, sums: [Shared<u32, { SUMS as usize }>; 2]) -> u64 {
    let thread = thread::thread_idx_x();
    let tiles = lane.blocks().div_ceil(TILE);
    let mut accumulator = START[0];
    unroll::<{ LANES as usize }>(|i| {
        if lane.lane == i as u32 {
            accumulator = START[i];
        }
    });
    // SAFETY: a tile's sums are written before a barrier and read behind it, and written again behind the next one.
    unsafe {
        // The secret words of the stripes of a block, for this lane.
        let secrets: [u64; STRIPES as usize] =
            array_from_fn(|stripe| lane.secret(stripe as u32 + lane.lane));
        let mut tile = 0;
        while tile <= tiles {
            let even = tile % 2 == 0;
            if thread >= SUMMING {
                if tile > 0 {
                    let sums = if even { sums[1] } else { sums[0] };
                    accumulator = scramble(lane, tile - 1, accumulator, sums);
                }
            } else if tile < tiles {
                sum(lane, tile, &secrets, if even { sums[0] } else { sums[1] });
            }
            thread::sync_threads();
            tile += 1;
        }
        if thread >= SUMMING {
            accumulator = accumulator.wrapping_add(rest(lane));
        }
    }
    accumulator
}

/// Returns the accumulator after the blocks of a tile.
///
/// # Safety
/// The tile's sums are there.
#[inline(always)]
unsafe fn scramble(
    lane: Lane,
    tile: u32,
    mut accumulator: u64,
    sums: Shared<u32, { SUMS as usize }>,
) -> u64 {
    // SAFETY: by this function's own contract.
    unsafe {
        let secret = lane.secret(STRIPES + lane.lane);
        let blocks = (lane.blocks() - tile * TILE).min(TILE);
        let mut block = 0;
        while block < blocks {
            let sum = join(sums.load_u32x2(2 * (block * LANES + lane.lane)));
            let sum = accumulator.wrapping_add(sum);
            accumulator = (sum ^ sum >> 47 ^ secret).wrapping_mul(SCRAMBLE);
            block += 1;
        }
    }
    accumulator
}

/// Writes the sums that each block of a tile adds to each accumulator.
///
/// # Safety
/// Called by whole warps, of threads that sum; no thread reads the sums.
#[inline(always)]
unsafe fn sum(
    lane: Lane,
    tile: u32,
    secrets: &[u64; STRIPES as usize],
    sums: Shared<u32, { SUMS as usize }>,
) {
    let of_tile = thread::thread_idx_x() / LANES;
    let block = tile * TILE + of_tile;
    // SAFETY: a block before the last is whole; the lanes of a stripe are of one warp.
    unsafe {
        let (mut products, mut words) = (0u64, 0u64);
        if block < lane.blocks() {
            let first = block * BLOCK_WORDS + lane.lane;
            let stripes: [u64; STRIPES as usize] =
                array_from_fn(|stripe| lane.word(first + stripe as u32 * LANES));
            unroll::<{ STRIPES as usize }>(|stripe| {
                products = products.wrapping_add(product(stripes[stripe], secrets[stripe]));
                words = words.wrapping_add(stripes[stripe]);
            });
        }
        // Each word is added to its neighbour's accumulator.
        let next = join(split(words).map(|half| warp::shuffle_xor_u32(half, 1)));
        let sum = products.wrapping_add(next);
        sums.store_u32x2(2 * (of_tile * LANES + lane.lane), split(sum));
    }
}

/// The sum that the last block and the last stripe add to the accumulator.
///
/// # Safety
/// The section is one of the payload, of more than [`SHORT`] bytes.
#[inline(always)]
unsafe fn rest(lane: Lane) -> u64 {
    let first = lane.blocks() * BLOCK_WORDS;
    let stripes = (lane.words - 1 - first) / LANES;
    let (mut sum, mut stripe) = (0u64, 0);
    // SAFETY: a stripe before the last word is whole; so is the last one, of more than 240 bytes.
    unsafe {
        while stripe < stripes {
            let secret = lane.secret(stripe + lane.lane);
            sum = sum.wrapping_add(lane.stripe(first + stripe * LANES, secret));
            stripe += 1;
        }
        let word = LAST_STRIPE / 8 + lane.lane;
        let shift = 8 * (LAST_STRIPE % 8);
        let secret = lane.secret(word) >> shift | lane.secret(word + 1) << (64 - shift);
        sum.wrapping_add(lane.stripe(lane.words - LANES, secret))
    }
}

/// The secret in the layout that the kernel reads: `[48]` u32.
#[must_use]
pub fn secret_words() -> [u32; 2 * SECRET.len()] {
    core::array::from_fn(|i| split(SECRET[i / 2])[i % 2])
}
