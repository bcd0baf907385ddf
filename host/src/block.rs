//! The blocks of a request, and the block pool: one free list for all layers (decision D1).

use kv_layout::geometry::{BLOCK_TOKENS, CSA_RATIO};
use serde::Serialize;

use crate::ids::BlockId;

/// Tokens of a block, as prefix trees count them.
pub(crate) const BLOCK: usize = BLOCK_TOKENS as usize;

/// Blocks that hold the entries of a request of `tokens` tokens: one for each 128 tokens of which an
/// entry exists (decision D1).
#[must_use]
pub const fn blocks_of(tokens: u32) -> u32 {
    (tokens / CSA_RATIO).div_ceil(BLOCK_TOKENS / CSA_RATIO)
}

/// A block taken from a [`BlockPool`]. It cannot be copied: who holds it owns its storage in every
/// layer, and giving it back is giving it up, so a double free does not compile.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[must_use = "a block that is dropped is lost to its pool; give it back"]
pub struct Block(BlockId);

impl Block {
    /// Number of the block.
    pub const fn id(&self) -> BlockId {
        self.0
    }
}

/// The number of a block that several requests can use and no step writes any more. Its owner, the prefix tree or
/// [`BlockShares`], keeps it from being freed.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct SharedBlock(BlockId);

/// A block of a request.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) enum RequestBlock {
    /// The request alone writes and reads it.
    Own(Block),
    /// Written earlier, now only read.
    Shared(SharedBlock),
}

impl RequestBlock {
    /// A shared block, whose owner keeps `block`.
    pub const fn shared(block: &Block) -> Self {
        Self::Shared(SharedBlock(block.0))
    }

    /// Number of the block.
    pub const fn id(&self) -> BlockId {
        match self {
            Self::Own(Block(id)) | Self::Shared(SharedBlock(id)) => *id,
        }
    }

    /// Whether the request alone has it.
    pub const fn is_own(&self) -> bool {
        matches!(self, Self::Own(_))
    }

    /// The block, if the request alone has it.
    pub fn into_own(self) -> Option<Block> {
        match self {
            Self::Own(block) => Some(block),
            Self::Shared(_) => None,
        }
    }

    /// Makes the block a shared one. Returns the owned block to the caller, which keeps it; `None`
    /// if it was shared already.
    pub fn share(&mut self) -> Option<Block> {
        let shared = Self::Shared(SharedBlock(self.id()));
        std::mem::replace(self, shared).into_own()
    }
}

/// Blocks that forks share, with the number of requests that use each. A shared block that is not in this list belongs
/// to the prefix tree.
#[derive(Debug, Default, Serialize)]
pub(crate) struct BlockShares {
    /// By block number; as long as the highest number that was ever shared.
    kept: Vec<Option<(Block, u32)>>,
}

impl BlockShares {
    /// Shares a block with one more request, which gets the result. If the block belongs to the prefix tree, the new
    /// request needs its own reference there.
    pub fn share(&mut self, held: &mut RequestBlock) -> RequestBlock {
        let id = held.id();
        let at = id.0 as usize;
        if let Some(block) = held.share() {
            if self.kept.len() <= at {
                self.kept.resize_with(at + 1, || None);
            }
            self.kept[at] = Some((block, 1));
        }
        if let Some((_, requests)) = self.kept.get_mut(at).and_then(Option::as_mut) {
            *requests += 1;
        }
        RequestBlock::Shared(SharedBlock(id))
    }

    /// Releases a request's block. Returns the block if no other request uses it and it does not
    /// belong to the prefix tree.
    pub fn give_up(&mut self, held: RequestBlock) -> Option<Block> {
        let at = held.id().0 as usize;
        match held {
            RequestBlock::Own(block) => Some(block),
            RequestBlock::Shared(_) => {
                let kept = self.kept.get_mut(at)?;
                let (_, requests) = kept.as_mut()?;
                *requests -= 1;
                if *requests > 0 { None } else { kept.take().map(|(block, _)| block) }
            }
        }
    }
}

/// The free blocks. Taking and giving back are O(1) and allocate nothing.
#[derive(Debug, Serialize)]
pub struct BlockPool {
    /// Last in, first out: the block taken next is the one most recently used.
    free: Vec<Block>,
    total: u32,
}

impl BlockPool {
    /// A pool of `total` free blocks; the lowest is taken first.
    #[must_use]
    pub fn new(total: u32) -> Self {
        Self { free: (0..total).rev().map(|id| Block(BlockId(id))).collect(), total }
    }

    /// A free block, or `None` when all are taken.
    pub fn take(&mut self) -> Option<Block> {
        self.free.pop()
    }

    /// The free blocks in the order in which [`Self::take`] gives them out.
    pub(crate) fn next_free(&self) -> impl Iterator<Item = BlockId> {
        self.free.iter().rev().map(Block::id)
    }

    /// Returns a block to the pool. The pool cannot recognise a block of another pool, so blocks of two pools must
    /// not be mixed. A ledger has one pool, and nothing else reaches its blocks.
    pub fn give_back(&mut self, block: Block) {
        debug_assert!(self.free.len() < self.total as usize, "a block of another pool");
        self.free.push(block);
    }

    /// Blocks that are free.
    #[must_use]
    pub fn free(&self) -> u32 {
        self.free.len() as u32
    }

    /// Number of blocks in the pool, free or not.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.total
    }
}
