//! The second warpgroup finds the rows that the third warpgroup loads: for two tiles at a time, one key a thread.
//!
//! A key is found in three steps, each of which waits for the load of the one before it: the list gives the entry, the
//! block table gives the entry's block, and from these follows the row. A thread begins each step two tiles later than
//! the step before. The third warpgroup does not do this itself, because it would wait for these loads together with
//! those of rows: they share a scoreboard.

use kv_layout::main_row::{DATA_BYTES, data_offset};
use simt::{thread, warp};

use super::keys::{KeySet, Keys, Listed, Located};
use super::memory::{Arrays, FOUND_TILES, TILE, WARPGROUP, rows_full};
use super::rows::{Row, Source};
use crate::fault;

/// Number of tiles whose keys are found together.
const TILES: u32 = WARPGROUP / TILE;
const _: () = assert!(FOUND_TILES == 2 * TILES);

/// Loads of the list in flight, for the first two pairs of tiles of this thread block: one key of each pair a thread.
pub struct FirstKeys<'a> {
    finder: Finder<'a>,
    listed: [Listed; 2],
}

impl<'a> FirstKeys<'a> {
    /// Starts the search for the keys of tiles `first..end` of a block.
    ///
    /// # Safety
    /// `keys` are a live query's; the pointers have the shapes of the kernel table; the second warpgroup calls it.
    #[inline(always)]
    pub unsafe fn start<W: KeySet>(
        source: Source<'a>,
        keys: Keys,
        (first, end): (u32, u32),
    ) -> Self {
        let finder = Finder {
            source,
            keys,
            first,
            end,
            listed: Listed::NONE,
            located: Located::NONE,
            refused: 0,
        };
        // SAFETY: by this function's own contract.
        let listed = unsafe { [finder.list::<W>(0), finder.list::<W>(1)] };
        Self { finder, listed }
    }

    /// Starts the loads of their blocks, and of the list for the next two pairs.
    ///
    /// # Safety
    /// As [`Self::start`].
    #[inline(always)]
    pub unsafe fn locate<W: KeySet>(self) -> FirstBlocks<'a> {
        let Self { finder, listed: [a, b] } = self;
        // SAFETY: by this function's own contract.
        unsafe {
            let located = [finder.locate::<W>(a), finder.locate::<W>(b)];
            let listed = [finder.list::<W>(2), finder.list::<W>(3)];
            FirstBlocks { finder, listed, located }
        }
    }
}

/// Loads of the block table in flight, for the first two pairs of tiles of this thread block, and of the list for the
/// next two.
pub struct FirstBlocks<'a> {
    finder: Finder<'a>,
    listed: [Listed; 2],
    located: [Located; 2],
}

impl<'a> FirstBlocks<'a> {
    /// Stores the row locations of the first four tiles, or of as many as there are, in shared memory.
    ///
    /// # Safety
    /// As [`FirstKeys::start`].
    #[inline(always)]
    pub unsafe fn publish<W: KeySet>(self, arrays: Arrays) -> Finder<'a> {
        let Self { mut finder, listed, located } = self;
        let tiles = finder.end - finder.first;
        // SAFETY: by this function's own contract; no thread has read the row locations that these replace.
        unsafe {
            if tiles > 0 {
                finder.store::<W>(arrays, 0, located[0]);
            }
            if tiles > TILES {
                finder.store::<W>(arrays, 1, located[1]);
            }
            finder.located = finder.locate::<W>(listed[0]);
        }
        finder.listed = listed[1];
        finder
    }
}

/// The state of the search: one pair of tiles is located, and the next pair is listed.
pub struct Finder<'a> {
    source: Source<'a>,
    keys: Keys,
    first: u32,
    end: u32,
    listed: Listed,
    located: Located,
    /// Number of the thread's keys that are listed and cannot be read.
    refused: u32,
}

impl Finder<'_> {
    /// Starts the load of the list for the thread's key of pair `pair` of tiles.
    ///
    /// # Safety
    /// As [`FirstKeys::start`].
    #[inline(always)]
    unsafe fn list<W: KeySet>(&self, pair: u32) -> Listed {
        let key = thread::thread_idx_x() - WARPGROUP;
        // The optimisation barrier has it computed here: otherwise what depends on the thread alone would stay in
        // registers.
        let tile = thread::opt_barrier_u32(self.first + TILES * pair + key / TILE);
        // SAFETY: by this function's own contract.
        unsafe { self.keys.list::<W>(self.source, (tile, key % TILE), self.end) }
    }

    /// Starts the load of the block of a key's entry.
    ///
    /// # Safety
    /// As [`FirstKeys::start`].
    #[inline(always)]
    unsafe fn locate<W: KeySet>(&self, listed: Listed) -> Located {
        // SAFETY: by this function's own contract.
        unsafe { self.keys.locate::<W>(self.source, listed) }
    }

    /// Publishes later row locations; called for each tile, once its weights are stored. By then the third warpgroup
    /// has read the row locations of this tile and of earlier ones: it reads them before it arrives at `keys_full`. For
    /// every second tile, this publishes the row locations of the tiles three and four after it, in the place of those
    /// of this tile and the one before.
    ///
    /// # Safety
    /// As [`FirstKeys::start`]; once a tile, in turn.
    #[inline(always)]
    pub unsafe fn advance<W: KeySet>(&mut self, arrays: Arrays, tile: u32) {
        let next = tile + FOUND_TILES - 1;
        if tile % TILES + 1 < TILES || next >= self.end - self.first {
            return;
        }
        let pair = next / TILES;
        // SAFETY: by this function's own contract.
        unsafe {
            self.store::<W>(arrays, pair, self.located);
            if W::HAS_SPLITS {
                self.prefetch::<W>(self.located);
            }
            self.located = self.locate::<W>(self.listed.loaded());
            self.listed = self.list::<W>(pair + 2);
        }
    }

    /// Prefetches the data of a key's row into L2, more than one tile before the third warpgroup loads it. Only for
    /// keys without a list: most of those rows are not in L2, and a block has many tiles. With a list it was slower,
    /// and so was a prefetch of scales.
    ///
    /// # Safety
    /// As [`FirstKeys::start`].
    #[inline(always)]
    unsafe fn prefetch<W: KeySet>(&self, located: Located) {
        let row = self.source.row(self.keys.row::<W>(self.source, located));
        // SAFETY: a row of the planes, whose number of bytes is a multiple of 16.
        unsafe { row.planes.data.prefetch_l2(data_offset(row.row), DATA_BYTES as u32) }
    }

    /// Stores the row location of the thread's key of a pair of tiles.
    ///
    /// # Safety
    /// As [`FirstKeys::start`]; no thread still reads the row locations that these replace.
    #[inline(always)]
    unsafe fn store<W: KeySet>(&mut self, arrays: Arrays, pair: u32, located: Located) {
        let key = thread::thread_idx_x() - WARPGROUP;
        let words = self.keys.row::<W>(self.source, located);
        // SAFETY: words by one thread each, with a barrier before others read them.
        unsafe {
            arrays.found.store_u32x2(2 * (WARPGROUP * (pair % 2) + key), words);
            rows_full(pair).arrive();
        }
        self.refused += u32::from(self.keys.is_unreadable::<W>(self.source, located));
    }

    /// Counts the entries that were refused.
    ///
    /// # Safety
    /// As [`FirstKeys::start`].
    #[inline(always)]
    pub unsafe fn count(&self) {
        // SAFETY: by this function's own contract.
        unsafe {
            let refused = warp::reduce_add_u32(self.refused);
            fault::count(self.source.0.faults, thread::lane_id(), refused);
        }
    }
}

/// Waits until the row locations of tile `tile` are in shared memory. The third warpgroup calls it before the first of
/// two tiles.
///
/// # Safety
/// All threads of the warpgroup call it together, for each pair of tiles that there is.
#[inline(always)]
pub unsafe fn wait_for(tile: u32) {
    // SAFETY: by this function's own contract.
    unsafe { rows_full(tile / TILES).sync() }
}

/// Row `row` of tile `tile`.
///
/// # Safety
/// [`wait_for`] was called for the tile.
#[inline(always)]
pub unsafe fn row_of(source: Source<'_>, arrays: Arrays, (tile, row): (u32, u32)) -> Row {
    let at = tile % FOUND_TILES * TILE + row;
    // SAFETY: by this function's own contract.
    source.row(unsafe { arrays.found.load_u32x2(2 * at) })
}

/// Whether tile `tile` is the first of a pair that is found together.
#[inline(always)]
pub const fn is_first_of_pair(tile: u32) -> bool {
    tile.is_multiple_of(TILES)
}
