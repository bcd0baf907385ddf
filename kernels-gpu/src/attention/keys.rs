//! The keys of a query and where their rows lie: window rows in the ring or among the step's own rows, then entries.

use core::marker::PhantomData;

use kv_layout::attention::{AttendedKeys, KeyCluster, SHORT_SPREAD_TILES, SPREAD_TILES};
use kv_layout::geometry::WINDOW;
use simt::shared::Shared;
use simt::{thread, warp};

use super::memory::TILE;
use super::rows::{ENTRIES, NONE, OWN, RING, Source};
use crate::args::Attend;
use crate::fault_injection;

/// A kind of key set that queries attend to.
pub trait KeySet {
    /// Whether there are entries.
    const HAS_ENTRIES: bool;
    /// Whether a list names the entries that count.
    const IS_LISTED: bool;
    /// The kind of key set.
    const KEYS: AttendedKeys;
    /// Whether a large number of keys is divided into several splits (split-KV).
    const HAS_SPLITS: bool = matches!(Self::KEYS, AttendedKeys::All);
    /// Most tiles of a cluster in the spread form, where a query is spread over eight blocks.
    const SPREAD_TILES: u32 = SPREAD_TILES;
    /// Blocks of a cluster. They share the keys of a split, unless the launch has one block for each split.
    const CLUSTER_BLOCKS: u32 = Self::KEYS.blocks();
}

/// The window alone.
pub struct Window;
/// The window, and the entries of a list.
pub struct List;
/// The window, and all entries that a query sees.
pub struct All;
/// The key set `W` for short key lists: one split of at most [`SHORT_SPREAD_TILES`] tiles.
pub struct Short<W>(PhantomData<W>);

impl<W: KeySet> KeySet for Short<W> {
    const HAS_ENTRIES: bool = W::HAS_ENTRIES;
    const IS_LISTED: bool = W::IS_LISTED;
    const KEYS: AttendedKeys = W::KEYS;
    const HAS_SPLITS: bool = false;
    const SPREAD_TILES: u32 = if W::HAS_ENTRIES { SHORT_SPREAD_TILES } else { WINDOW / TILE };
}

impl KeySet for Window {
    const HAS_ENTRIES: bool = false;
    const IS_LISTED: bool = false;
    const KEYS: AttendedKeys = AttendedKeys::Window;
}

impl KeySet for List {
    const HAS_ENTRIES: bool = true;
    const IS_LISTED: bool = true;
    const KEYS: AttendedKeys = AttendedKeys::List;
}

impl KeySet for All {
    const HAS_ENTRIES: bool = true;
    const IS_LISTED: bool = false;
    const KEYS: AttendedKeys = AttendedKeys::All;
}

/// A key, and the entry that the list names for it. The load of the entry may be in flight.
#[derive(Clone, Copy)]
pub struct Listed {
    key: u32,
    entry: i32,
}

/// A `Listed` key, and the cache block of its entry. The load of the block may be in flight.
#[derive(Clone, Copy)]
pub struct Located {
    listed: Listed,
    block: u32,
    /// Whether the key is an entry that counts and that has an element in the block table.
    is_known: bool,
}

impl Listed {
    /// No key.
    pub const NONE: Self = Self { key: u32::MAX, entry: -1 };

    /// The same value; its load begins here, as in [`Located::opt_barrier`].
    #[inline(always)]
    pub fn opt_barrier(self) -> Self {
        Self { entry: thread::opt_barrier_u32(self.entry.cast_unsigned()).cast_signed(), ..self }
    }

    /// The same value, once it has been loaded. This is a shuffle, because `ptxas` would move a copy between registers
    /// to where the next load begins, and would wait there; it does not move a shuffle.
    ///
    /// # Safety
    /// All lanes of the warp call it together.
    #[inline(always)]
    pub unsafe fn loaded(self) -> Self {
        let entry = self.entry.cast_unsigned();
        // SAFETY: by this function's own contract.
        let entry = unsafe { warp::shuffle_idx_u32(entry, thread::lane_id()) };
        Self { entry: entry.cast_signed(), ..self }
    }
}

impl Located {
    /// No key.
    pub const NONE: Self = Self { listed: Listed::NONE, block: u32::MAX, is_known: false };

    /// The same value; its load begins here. Without this optimisation barrier the compiler would move the load to the
    /// first use of the block, after other waits.
    #[inline(always)]
    pub fn opt_barrier(self) -> Self {
        Self { block: thread::opt_barrier_u32(self.block), ..self }
    }
}

/// The keys of a query: the window rows, where the row of position `p` is key `p % 128`, then the entries, in the order
/// of the query's list. So consecutive queries have the same window keys but for one row.
#[derive(Clone, Copy)]
pub struct Keys {
    /// Whether the query is valid: it is not padding, its slot exists, its position is not negative, and it fits in the
    /// step's own rows.
    pub is_live: bool,
    /// Whether the query counts as a fault: it is neither valid nor padding, or it sees more entries than the launch
    /// may attend to.
    pub is_refused: bool,
    /// The query's position in its request.
    pub position: u32,
    /// Number of window rows, at most 128.
    window: u32,
    /// Number of tokens of the request in this step up to and including the query, if the step's rows are not in the
    /// ring; else 0. The row of the token `age` positions before the query is among the step's rows if `age < own`,
    /// else in the ring.
    own: u32,
    /// First row of the slot's ring.
    ring_start: u64,
    /// The query's own row within the ring: `position % ring_rows`.
    newest: u32,
    /// Rows of the ring.
    ring_rows: u32,
    /// The step's row of the query.
    token: u32,
    /// Number of entries that the query attends to, and number of entries that it sees.
    entries: u32,
    visible: u32,
    /// Elements at which the query's list and its request's row of the block table start.
    list: u64,
    table: u64,
    /// The first tile and the number of tiles: of all keys, or of one split.
    pub first_tile: u32,
    pub tiles: u32,
}

/// Slot, position and index of a query in the step. Their loads may be in flight.
#[derive(Clone, Copy)]
pub struct Token {
    /// The step's row of the query.
    token: u32,
    slot: i32,
    position: u32,
    index: u32,
}

impl Token {
    /// Starts the loads of query `query`.
    ///
    /// # Safety
    /// It is one of the launch's; pointers and shapes as in the kernel table.
    #[inline(always)]
    pub unsafe fn load(args: &Attend, query: u32) -> Self {
        let token = args.params.first + query;
        // SAFETY: by this function's own contract.
        unsafe {
            Self {
                token,
                slot: args.token_slot.load(u64::from(token)),
                position: args.token_position.load(u64::from(token)).cast_unsigned(),
                index: args.token_index.load(u64::from(token)).cast_unsigned(),
            }
        }
    }
}

impl Token {
    /// Stores the token in shared memory, at index `i`.
    ///
    /// # Safety
    /// Nobody reads that before a barrier.
    #[inline(always)]
    pub unsafe fn store<const N: usize>(self, memory: Shared<u32, N>, i: u32) {
        let words = [self.slot.cast_unsigned(), self.position, self.index, 0];
        // SAFETY: by this function's own contract.
        unsafe { memory.store_u32x4(4 * i, words) }
    }

    /// Loads the token of query `query` that [`Self::store`] stored at index `i`.
    ///
    /// # Safety
    /// It was put there, and a barrier has passed.
    #[inline(always)]
    pub unsafe fn stored<const N: usize>(
        args: &Attend,
        query: u32,
        memory: Shared<u32, N>,
        i: u32,
    ) -> Self {
        // SAFETY: by this function's own contract.
        let [slot, position, index, _] = unsafe { memory.load_u32x4(4 * i) };
        Self { token: args.params.first + query, slot: slot.cast_signed(), position, index }
    }
}

impl Keys {
    /// The keys of query `query`, whose place in the step is `token`.
    #[inline(always)]
    pub fn of<W: KeySet>(args: &Attend, query: u32, token: Token) -> Self {
        let (params, Token { token, slot, position, index }) = (args.params, token);
        // The step's own rows, which are not in the ring: the query's own and those before it.
        let own = if params.own_rows > 0 { index.wrapping_add(1) } else { 0 };
        let has_own = params.own_rows == 0 || index <= token && token < params.own_rows;
        let has_slot = slot >= 0 && (slot as u32) < params.slots;
        // So a live query has at least one key: its own.
        let is_live = has_slot && has_own && position.cast_signed() >= 0;
        let next = position.wrapping_add(1);
        let window = next.min(WINDOW);
        let seen = if W::HAS_ENTRIES { next >> params.ratio_log2 } else { 0 };
        let visible = fault_injection::visible(seen);
        let slot_row = |rows: u32| if is_live { slot as u64 * u64::from(rows) } else { 0 };
        let entries = if W::HAS_ENTRIES { visible.min(params.entry_rows) } else { 0 };
        let sees_too_many = W::HAS_ENTRIES && !W::IS_LISTED && visible > params.entry_rows;
        Self {
            is_live,
            is_refused: slot >= 0 && (!is_live || sees_too_many),
            position,
            window,
            own,
            ring_start: slot_row(params.ring),
            newest: position % fault_injection::ring_rows(params.ring),
            ring_rows: params.ring,
            token,
            entries,
            visible,
            list: u64::from(query) * u64::from(params.entry_rows),
            table: slot_row(params.max_blocks),
            first_tile: 0,
            tiles: (window + entries).div_ceil(TILE),
        }
    }

    /// Whether the window is that of `before`, the previous query of the launch, except for one row, the query's own:
    /// this is the next query of the same request. Both queries must be valid: otherwise `ring_start` identifies no
    /// request.
    #[inline(always)]
    pub const fn follow(self, before: Self) -> bool {
        self.ring_start == before.ring_start
            && self.position == before.position.wrapping_add(1)
            && (self.own == before.own + 1 || self.own == 0 && before.own == 0)
    }

    /// Number of splits of the keys.
    #[inline(always)]
    pub const fn num_splits<W: KeySet>(self, args: &Attend) -> u32 {
        let cluster = KeyCluster::of_blocks(args.params.blocks_per_split);
        W::KEYS.num_splits(self.window + self.entries, cluster, args.params.heads)
    }

    /// The keys of split `split` of `num_splits`.
    #[inline(always)]
    pub fn of_split(self, split: u32, num_splits: u32) -> Self {
        let [first_tile, end] = [split, split + 1]
            .map(|split| (u64::from(self.tiles) * u64::from(split) / u64::from(num_splits)) as u32);
        Self { first_tile, tiles: end - first_tile, ..self }
    }

    /// The keys of piece `piece` of `pieces`, as [`Self::of_split`], in less code. The product of the tiles and
    /// `pieces` must fit in a u32.
    #[inline(always)]
    pub const fn of_piece(self, piece: u32, pieces: u32) -> Self {
        let [first, end] = [self.tiles * piece / pieces, self.tiles * (piece + 1) / pieces];
        Self { first_tile: self.first_tile + first, tiles: end - first, ..self }
    }

    /// Key `row` of tile `tile`; no key if `tile` is `end` or more.
    ///
    /// # Safety
    /// The pointers have the shapes of the kernel table.
    #[inline(always)]
    pub unsafe fn list<W: KeySet>(
        self,
        source: Source<'_>,
        (tile, row): (u32, u32),
        end: u32,
    ) -> Listed {
        let key = if tile < end { TILE * tile + row } else { u32::MAX };
        let at = key.wrapping_sub(self.window);
        if !W::IS_LISTED {
            return Listed { key, entry: at as i32 };
        }
        // No branch: a key that is not an entry loads the start of the list, so that nothing waits for a load yet.
        let at = if at < self.entries { at } else { 0 };
        // SAFETY: an element of the query's list, which is not empty.
        Listed { key, entry: unsafe { source.0.selected.load(self.list + u64::from(at)) } }
    }

    /// Whether a key is an entry that counts. Whether its block exists is checked later.
    #[inline(always)]
    fn is_seen(self, listed: Listed) -> bool {
        listed.key.wrapping_sub(self.window) < self.entries
            && listed.entry >= 0
            && listed.entry.cast_unsigned() < self.visible
    }

    /// The block of a key's entry.
    ///
    /// # Safety
    /// As [`Self::list`].
    #[inline(always)]
    pub unsafe fn locate<W: KeySet>(self, source: Source<'_>, listed: Listed) -> Located {
        if !W::HAS_ENTRIES {
            return Located { listed, block: u32::MAX, is_known: false };
        }
        let params = source.0.params;
        let logical = listed.entry.cast_unsigned() >> params.entries_log2;
        let is_known = self.is_seen(listed) && logical < params.max_blocks;
        let at = self.table + u64::from(if is_known { logical } else { 0 });
        // SAFETY: an element of the request's row of the table, which is not empty.
        let block = unsafe { source.0.table.load(at) }.cast_unsigned();
        Located { listed, block, is_known }
    }

    /// The location of the row of window key `key`, in the format of [`Self::row`].
    #[inline(always)]
    pub fn window_row(self, args: &Attend, key: u32) -> [u32; 2] {
        let listed = Listed { key, entry: -1 };
        let located = Located { listed, block: u32::MAX, is_known: false };
        self.row::<Window>(Source(args), located)
    }

    /// The location of the row of a key: the number of the row, and in the two highest bits the planes in which it
    /// lies. `Source::row` and [`Source::places`] decode it.
    #[inline(always)]
    pub fn row<W: KeySet>(self, source: Source<'_>, located: Located) -> [u32; 2] {
        let args = source.0;
        let Located { listed: Listed { key, entry }, block, is_known } = located;
        let words = |row: u64, plane: u32| [row as u32, (row >> 32) as u32 | plane << 30];
        if key < self.window {
            let age = self.position.wrapping_sub(key) % WINDOW;
            if age < self.own {
                return words(u64::from(self.token - age), OWN);
            }
            let wrapped = if age <= self.newest { 0 } else { self.ring_rows };
            return words(self.ring_start + u64::from(self.newest + wrapped - age), RING);
        }
        // A block of -1 is larger than any number of blocks.
        if !W::HAS_ENTRIES || !is_known || block >= args.params.num_blocks {
            return words(self.ring_start, NONE);
        }
        let within = entry.cast_unsigned() & ((1 << args.params.entries_log2) - 1);
        words((u64::from(block) << args.params.entries_log2) + u64::from(within), ENTRIES)
    }

    /// Whether a key is listed and cannot be read.
    #[inline(always)]
    pub fn is_unreadable<W: KeySet>(self, source: Source<'_>, located: Located) -> bool {
        let Located { listed, block, is_known } = located;
        let is_entry = listed.key.wrapping_sub(self.window) < self.entries;
        let is_there = is_known && block < source.0.params.num_blocks;
        W::HAS_ENTRIES && is_entry && listed.entry != -1 && !is_there
    }
}
