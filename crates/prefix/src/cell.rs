//! The blocks of a tree, one cell each, in memory that is reserved once.

use std::ops::{Index, IndexMut};

use slotmap::{SecondaryMap, SlotMap};

use crate::mistake::{Mistake, made};
use crate::serial::Serial;

slotmap::new_key_type! {
    /// A block of the tree: the index of its cell, and the generation of that index.
    pub(crate) struct CellKey;
}

/// A block. The cells of a path are linked upwards, those of a segment also downwards.
#[derive(Debug)]
pub(crate) struct Cell<B> {
    pub block: B,
    pub serial: Serial,
    /// The block before it; `None` for the first block below a root.
    pub above: Option<CellKey>,
    /// The block after it in its segment.
    pub below: Option<CellKey>,
    /// Hash of the root's key and of all tokens down to its end.
    pub prefix_hash: u64,
}

/// All blocks. Tokens are stored apart from cells, so that a match can find the next tokens while it compares.
#[derive(Debug)]
pub(crate) struct Cells<B, const T: usize> {
    cells: SlotMap<CellKey, Cell<B>>,
    tokens: SecondaryMap<CellKey, [u32; T]>,
}

impl<B, const T: usize> Cells<B, T> {
    /// No blocks; memory for `reserved` blocks, if it can be reserved.
    pub fn new(reserved: usize) -> Self {
        let (mut cells, mut tokens) = (SlotMap::with_key(), SecondaryMap::new());
        // If the reservation fails, they grow on demand.
        let _ = cells.try_reserve(reserved).is_ok() && tokens.try_set_capacity(reserved).is_ok();
        Self { cells, tokens }
    }

    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.cells.len()
    }

    /// Adds a block with these tokens.
    pub fn insert(&mut self, tokens: &[u32; T], cell: Cell<B>) -> CellKey {
        let key = self.cells.insert(cell);
        self.tokens.insert(key, *tokens);
        key
    }

    /// Removes a block.
    pub fn remove(&mut self, key: CellKey) -> Option<Cell<B>> {
        self.cells.remove(key)
    }

    /// The block, if it is there.
    pub fn get(&self, key: CellKey) -> Option<&Cell<B>> {
        self.cells.get(key)
    }

    /// Its tokens.
    pub fn tokens(&self, key: CellKey) -> &[u32; T] {
        &self.tokens[key]
    }

    /// Blocks from one up to its root.
    pub fn upward(&self, from: Option<CellKey>) -> impl Iterator<Item = CellKey> {
        std::iter::successors(from, |&key| self[key].above)
    }

    /// Blocks from one down to the end of its segment.
    pub fn downward(&self, from: Option<CellKey>) -> impl Iterator<Item = CellKey> {
        std::iter::successors(from, |&key| self[key].below)
    }

    /// Compares `blocks` with the blocks from `next` on, to the end of their segment. Returns the number of leading
    /// blocks with equal tokens, and the last of these.
    pub fn common(&self, mut next: Option<CellKey>, blocks: &[[u32; T]]) -> (u32, Option<CellKey>) {
        let (mut equal, mut last) = (0, None);
        for block in blocks {
            let Some(key) = next.filter(|&key| same(&self.tokens[key], block)) else { break };
            (equal, last, next) = (equal + 1, next, self[key].below);
        }
        (equal, last)
    }
}

impl<B, const T: usize> Index<CellKey> for Cells<B, T> {
    type Output = Cell<B>;

    fn index(&self, key: CellKey) -> &Cell<B> {
        &self.cells[key]
    }
}

impl<B, const T: usize> IndexMut<CellKey> for Cells<B, T> {
    fn index_mut(&mut self, key: CellKey) -> &mut Cell<B> {
        &mut self.cells[key]
    }
}

/// Whether two blocks have the same tokens.
#[inline]
pub(crate) fn same<const T: usize>(a: &[u32; T], b: &[u32; T]) -> bool {
    if made(Mistake::HalfCompared) { a[..T / 2] == b[..T / 2] } else { a == b }
}
