//! Transfers between the prefix tree and a lower tier, or the tree of another cache: what they read from the tree, and
//! the blocks and checkpoints that they write.

use dsv4_kv_prefix::{Origin, Path, Reference, RootKey, WeakCheckpoint};

use super::Ledger;
use super::prefix_tree::{PrefixCache, Prompt};
use crate::block::{BLOCK, Block};
use crate::checkpoints::{CheckpointStorage, SavedCheckpoint, SavedPlace};
use crate::error::KvError;
use crate::ids::{BlockId, CheckpointId};
use crate::tier::mistake::{Mistake, made};

/// A checkpoint, with all blocks above it, that a lower tier copies. None of it is evicted until [`Ledger::end_store`].
#[derive(Debug)]
#[must_use = "it holds blocks; give it back"]
pub(crate) struct StoreSource {
    offered: WeakCheckpoint,
    reference: Reference,
    pub root: RootKey,
    /// Tokens of `blocks`.
    pub tokens: Vec<[u32; BLOCK]>,
    pub origin: Origin,
    /// In the order of the tokens.
    pub blocks: Vec<BlockId>,
    pub checkpoint: SavedPlace,
}

/// Reserved for a prefix from a lower tier or another cache: the blocks that the tree does not have, and a checkpoint.
/// A reference keeps the blocks above them.
#[derive(Debug)]
#[must_use = "it holds blocks; enter it, or give it back"]
pub(crate) struct LoadTarget {
    /// To the end of the part that the tree has.
    reference: Reference,
    blocks: Vec<Block>,
    checkpoint: CheckpointStorage,
}

impl LoadTarget {
    /// Number of blocks above the reserved ones, which the tree already has.
    pub fn above(&self) -> u32 {
        self.reference.blocks()
    }

    /// The blocks that the transfer writes, in the order of the tokens.
    pub fn blocks(&self) -> Vec<BlockId> {
        self.blocks.iter().map(Block::id).collect()
    }

    /// The checkpoint that the transfer writes.
    pub fn checkpoint(&self) -> CheckpointId {
        self.checkpoint.id()
    }
}

impl Ledger {
    /// Starts to offer checkpoints to a lower tier.
    pub(crate) fn offer_checkpoints(&mut self) {
        let most = self.checkpoints.total() as usize;
        if let Some(prefix_cache) = self.prefix_cache.as_mut() {
            prefix_cache.offers.keep(most);
        }
    }

    /// The root key of a prompt, and its tokens up to the longest context; `None` if nothing is shared in this cache.
    pub(crate) fn shared_prompt<'p>(&self, prompt: &Prompt<'p>) -> Option<(RootKey, &'p [u32])> {
        let PrefixCache { model, .. } = &**self.prefix_cache.as_ref()?;
        let most = prompt.tokens.len().min(self.limits.context as usize);
        Some((RootKey::new(prompt.salt, prompt.adapter, model), &prompt.tokens[..most]))
    }

    /// Tokens of a prompt down to its deepest checkpoint in the prefix tree.
    pub(crate) fn reusable(&self, root: &RootKey, tokens: &[u32]) -> u32 {
        self.prefix_cache
            .as_ref()
            .map_or(0, |prefix_cache| prefix_cache.tree.lookup(root, tokens).reusable)
    }

    /// The first offered checkpoint that is still in the tree.
    pub(crate) fn next_store(&mut self) -> Option<StoreSource> {
        self.attach_saved();
        let PrefixCache { tree, offers, .. } = &mut **self.prefix_cache.as_mut()?;
        let (offered, reference) = std::iter::from_fn(|| offers.next())
            .find_map(|offered| Some((offered, tree.lock_checkpoint(offered)?)))?;
        let found = tree.checkpoint(&reference).ok().flatten().map(SavedCheckpoint::place);
        let (Some(checkpoint), Ok(path), Ok(tokens), Ok(blocks)) =
            (found, tree.path(&reference), tree.tokens(&reference), tree.blocks(&reference))
        else {
            unreachable!("a checkpoint was locked, and the reference is this tree's")
        };
        let Path { root, origin } = path;
        let root = root.clone();
        let mut tokens: Vec<_> = tokens.copied().collect();
        tokens.reverse();
        let mut blocks: Vec<_> = blocks.map(|(_, block)| block.id()).collect();
        blocks.reverse();
        Some(StoreSource { offered, reference, root, tokens, origin, blocks, checkpoint })
    }

    /// Releases a source; if `repeated`, offers it again, before all others.
    pub(crate) fn end_store(&mut self, source: StoreSource, repeated: bool) {
        let StoreSource { offered, reference, .. } = source;
        if let Some((prefix_cache, _, mut pools)) = self.prefix_cache_parts() {
            let released = prefix_cache.tree.release(reference, |freed| pools.take_back(freed));
            debug_assert!(released.is_ok(), "the reference is this tree's");
            if repeated {
                prefix_cache.offers.add_first(offered);
            }
        }
    }

    /// Reserves blocks and a checkpoint for a prefix of whole blocks; `None` if the tree has all of it. Evicts
    /// unreferenced blocks and checkpoints if needed, provided that these are enough.
    ///
    /// # Errors
    /// [`KvError::OutOfBlocks`], [`KvError::OutOfCheckpoints`]; nothing is taken then.
    pub(crate) fn begin_load(
        &mut self,
        root: &RootKey,
        tokens: &[[u32; BLOCK]],
    ) -> Result<Option<LoadTarget>, KvError> {
        self.attach_saved();
        let Some(prefix_cache) = self.prefix_cache.as_mut() else { return Ok(None) };
        let reference = prefix_cache.tree.lock_blocks(root, tokens);
        let needed = tokens.len() as u32 - reference.blocks();
        let is_here =
            needed == 0 && matches!(prefix_cache.tree.checkpoint(&reference), Ok(Some(_)));
        match if is_here { Err(None) } else { self.reserve_prefix(needed).map_err(Some) } {
            Ok((blocks, checkpoint)) => Ok(Some(LoadTarget { reference, blocks, checkpoint })),
            Err(refused) => {
                if refused.is_none() || !made(Mistake::RefusalKeeps) {
                    self.release_reference(reference);
                }
                refused.map_or(Ok(None), Err)
            }
        }
    }

    /// Takes `needed` blocks and a checkpoint, or nothing.
    fn reserve_prefix(&mut self, needed: u32) -> Result<(Vec<Block>, CheckpointStorage), KvError> {
        let free = self.obtainable_checkpoints();
        if free == 0 {
            return Err(KvError::OutOfCheckpoints { needed: 1, free });
        }
        self.require_blocks(needed)?;
        self.make_room_for_saves(1);
        let blocks = std::iter::from_fn(|| self.blocks.take()).take(needed as usize).collect();
        let Some(checkpoint) = self.checkpoints.take() else {
            unreachable!("one was free, or evictable, and is free now")
        };
        Ok((blocks, checkpoint))
    }

    /// Moves a loaded prefix to the tree. `tokens` are those of the whole prefix; the checkpoint is at its end. Blocks
    /// and checkpoints that the tree got from elsewhere meanwhile stay as they are. Returns the number of blocks that
    /// the tree took, and the checkpoint's name in the tree if it took that.
    pub(crate) fn enter_loaded(
        &mut self,
        target: LoadTarget,
        tokens: &[[u32; BLOCK]],
        origin: Origin,
        has_draft: bool,
    ) -> (u32, Option<WeakCheckpoint>) {
        let LoadTarget { mut reference, blocks, checkpoint } = target;
        let mut blocks: Vec<_> = blocks.into_iter().map(Some).collect();
        let Some((prefix_cache, _, mut pools)) = self.prefix_cache_parts() else {
            return (0, None);
        };
        let new = &tokens[reference.blocks() as usize..];
        let take = |index: usize| match blocks[index].take() {
            Some(block) => block,
            None => unreachable!("there is a block for each, and it is asked for once"),
        };
        let freed = |freed| pools.take_back(freed);
        let taken = prefix_cache.tree.extend(&mut reference, new, take, freed);
        debug_assert!(taken.is_ok(), "the reference is this tree's");
        let boundary = (tokens.len() * BLOCK) as u32;
        let saved = checkpoint.saved(None, boundary, has_draft);
        let too_high = u32::from(made(Mistake::CheckpointTooHigh) && tokens.len() > 1);
        let above = tokens.len() as u32 - too_high;
        let attached = prefix_cache.tree.attach(&reference, above, origin, saved);
        let entered = match attached {
            Ok(entered) => Some(entered),
            Err(not_taken) => {
                pools.checkpoints.give_back(not_taken.0);
                None
            }
        };
        blocks.into_iter().flatten().for_each(|block| pools.free_block(block));
        self.release_reference(reference);
        (taken.unwrap_or(0) as u32, entered)
    }

    /// Moves a prefix from another cache to the tree. Returns the number of blocks that the tree took, and whether it
    /// took the checkpoint, which is then offered to the lower tier. The origin of the checkpoint is unknown: it counts
    /// as one of a prompt.
    pub(crate) fn enter_moved(
        &mut self,
        target: LoadTarget,
        tokens: &[[u32; BLOCK]],
        has_draft: bool,
    ) -> (u32, bool) {
        let (blocks, entered) = self.enter_loaded(target, tokens, Origin::Prompt, has_draft);
        if let (Some(checkpoint), Some(prefix_cache)) = (entered, self.prefix_cache.as_mut()) {
            prefix_cache.offers.add(checkpoint);
        }
        (blocks, entered.is_some())
    }

    /// The blocks of a prompt down to its deepest checkpoint, in order, and that checkpoint; `None` without one. They
    /// stay valid until the ledger changes.
    pub(crate) fn prefix_of(&mut self, prompt: &Prompt<'_>) -> Option<(Vec<BlockId>, SavedPlace)> {
        self.attach_saved();
        let (root, tokens) = self.shared_prompt(prompt)?;
        let tree = &mut self.prefix_cache.as_mut()?.tree;
        let reference = tree.lock_deepest_checkpoint(&root, tokens.as_chunks().0)?;
        let place = tree.checkpoint(&reference).ok().flatten().map(SavedCheckpoint::place);
        let blocks = tree.blocks(&reference).into_iter().flatten();
        let mut blocks: Vec<_> = blocks.map(|(_, block)| block.id()).collect();
        blocks.reverse();
        self.release_reference(reference);
        place.map(|place| (blocks, place))
    }

    /// Returns the blocks and the checkpoint of a load to their pools. No copy to it may still be under way.
    pub(crate) fn drop_load(&mut self, target: LoadTarget) {
        let LoadTarget { reference, blocks, checkpoint } = target;
        if let Some((_, _, mut pools)) = self.prefix_cache_parts() {
            pools.checkpoints.give_back(checkpoint);
            // In reverse, so that the pool hands them out again in the same order.
            blocks.into_iter().rev().for_each(|block| pools.free_block(block));
        }
        self.release_reference(reference);
    }

    /// A deliberate mistake for tests: releases a source early, so that it can be evicted.
    pub(crate) fn release_early(&mut self, source: &mut StoreSource) {
        let Some(prefix_cache) = self.prefix_cache.as_mut() else { return };
        let nothing = prefix_cache.tree.lock_blocks(&source.root, &[]);
        let held = std::mem::replace(&mut source.reference, nothing);
        self.release_reference(held);
    }

    fn release_reference(&mut self, reference: Reference) {
        let Some((prefix_cache, _, mut pools)) = self.prefix_cache_parts() else { return };
        let released = prefix_cache.tree.release(reference, |freed| pools.take_back(freed));
        debug_assert!(released.is_ok(), "the reference is this tree's");
    }
}
