//! The queries of a block, in order, and what each of them shares with the one before it.

use kv_layout::attention::MAX_CONSECUTIVE;
use kv_layout::geometry::WINDOW;
use simt::{thread, warp};

use super::super::keys::{Keys, Token, Window};
use super::super::memory::{HEADS, TILE};
use super::super::work_item::Heads;
use super::memory::Arrays;
use super::row::own_key;
use crate::args::Attend;

/// The block's queries.
#[derive(Clone, Copy)]
pub struct Queries<'a> {
    pub args: &'a Attend,
    arrays: Arrays,
    /// The block's first query, and the number of its queries.
    first: u32,
    pub count: u32,
}

/// A query of the block.
#[derive(Clone, Copy)]
pub struct Query {
    pub heads: Heads,
    pub position: u32,
    /// Whether the query is valid.
    pub is_live: bool,
    /// Whether both this query and the one before it are valid, and their keys differ in one row only, this query's
    /// own.
    pub follows: bool,
    /// Whether the query counts as a fault.
    pub is_refused: bool,
    /// The location of its own row, in the format of [`Keys::row`].
    pub row: [u32; 2],
}

/// Flags of a query.
const LIVE: u32 = 1;
const FOLLOWS: u32 = 2;
const REFUSED: u32 = 4;

impl Query {
    /// Number of keys of its window.
    #[inline(always)]
    pub fn window(self) -> u32 {
        self.position.wrapping_add(1).min(WINDOW)
    }

    /// Whether the keys of its window are two tiles.
    ///
    /// # Safety
    /// All lanes of the warp call it together.
    #[inline(always)]
    pub unsafe fn has_two_tiles(self) -> bool {
        // SAFETY: by this function's own contract. By a vote, so that the compiler sees that all lanes go one way.
        unsafe { warp::all(self.window() > TILE) }
    }
}

impl<'a> Queries<'a> {
    /// Computes flags, positions and row locations of all queries of the block; they are in shared memory when this
    /// returns.
    ///
    /// # Safety
    /// Pointers and shapes as in the kernel table; all threads of the block call it.
    #[inline(always)]
    pub unsafe fn of_block(args: &'a Attend, arrays: Arrays) -> Self {
        let most = args.params.queries_per_block.clamp(1, MAX_CONSECUTIVE);
        let own = thread::thread_idx_x();
        // SAFETY: by this function's own contract; words by one thread each.
        unsafe {
            // The shuffle shows the compiler that the value is the same in all lanes.
            let first = warp::shuffle_idx_u32(thread::block_idx_x() * most, 0);
            let count = (args.params.tokens - first).min(most);
            if own < count {
                let query = first + own;
                let token = Token::load(args, query);
                let before = Token::load(args, query - own.min(1));
                let keys = Keys::of::<Window>(args, query, token);
                let before = Keys::of::<Window>(args, query - own.min(1), before);
                let are_live = keys.is_live && before.is_live;
                let follows = own > 0 && are_live && keys.follow(before);
                let flag = |is: bool, bit: u32| if is { bit } else { 0 };
                let flags = flag(keys.is_live, LIVE)
                    | flag(follows, FOLLOWS)
                    | flag(keys.is_refused, REFUSED);
                let [low, high] = keys.window_row(args, own_key(keys.position));
                arrays.known.store_u32x4(4 * own, [flags, keys.position, low, high]);
                token.store(arrays.tokens, own);
            }
            thread::sync_threads();
            Self { args, arrays, first, count }
        }
    }

    /// Query `i` of the block.
    ///
    /// # Safety
    /// There is one; all lanes of the warp call it together.
    #[inline(always)]
    pub unsafe fn get(self, i: u32) -> Query {
        // SAFETY: by this function's own contract.
        unsafe {
            let [flags, position, low, high] = self.arrays.known.load_u32x4(4 * i);
            let flags = warp::shuffle_idx_u32(flags, 0);
            Query {
                heads: self.heads(i),
                position,
                is_live: flags & LIVE != 0,
                follows: flags & FOLLOWS != 0,
                is_refused: flags & REFUSED != 0,
                row: [low, high],
            }
        }
    }

    /// The block's heads of query `i`.
    #[inline(always)]
    pub fn heads(self, i: u32) -> Heads {
        Heads {
            query: self.first + i,
            first: thread::block_idx_y() * HEADS,
            split: 0,
            num_splits: 1,
        }
    }

    /// The keys of query `i`.
    ///
    /// # Safety
    /// There is one.
    #[inline(always)]
    pub unsafe fn keys(self, i: u32) -> Keys {
        let query = self.first + i;
        // SAFETY: by this function's own contract.
        let token = unsafe { Token::stored(self.args, query, self.arrays.tokens, i) };
        Keys::of::<Window>(self.args, query, token)
    }
}
