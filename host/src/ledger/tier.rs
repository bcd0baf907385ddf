//! What a transfer to a lower tier, or to the tree of another cache, reads from the prefix tree; and what a transfer from
//! there writes.

use dsv4_kv_prefix::{Origin, Path, Place, Reference, RootKey};

use super::Ledger;
use super::prefix_tree::{Prompt, Sharing};
use crate::block::{BLOCK, Block};
use crate::checkpoints::{SavedCheckpoint, SavedPlace, StateCheckpoint};
use crate::error::KvError;
use crate::ids::{BlockId, CheckpointId};
use crate::tier::mistake::{Mistake, made};

/// A checkpoint, with all blocks above it, that a lower tier copies. None of it is evicted before it is given back.
#[derive(Debug)]
#[must_use = "it holds blocks; give it back"]
pub(crate) struct StoreSource {
    place: Place,
    reference: Reference,
    pub root: RootKey,
    /// Of its blocks.
    pub tokens: Vec<[u32; BLOCK]>,
    pub origin: Origin,
    /// In order.
    pub blocks: Vec<BlockId>,
    pub checkpoint: SavedPlace,
}

/// Room for a prefix that comes from a lower tier: the blocks that are not here, and a checkpoint. The blocks above them
/// stay.
#[derive(Debug)]
#[must_use = "it holds blocks; enter it, or give it back"]
pub(crate) struct LoadTarget {
    /// At the end of what is here.
    reference: Reference,
    blocks: Vec<Block>,
    checkpoint: StateCheckpoint,
}

impl LoadTarget {
    /// Blocks above those that come.
    pub fn above(&self) -> u32 {
        self.reference.blocks()
    }

    /// The blocks that are written, in order.
    pub fn blocks(&self) -> Vec<BlockId> {
        self.blocks.iter().map(Block::id).collect()
    }

    /// The checkpoint that is written.
    pub fn checkpoint(&self) -> CheckpointId {
        self.checkpoint.id()
    }
}

impl Ledger {
    /// From now on checkpoints are offered to a lower tier.
    pub(crate) fn offer_checkpoints(&mut self) {
        let most = self.checkpoints.total() as usize;
        if let Some(sharing) = self.sharing.as_mut() {
            sharing.offers.keep(most);
        }
    }

    /// With whom a prompt may share, and those of its tokens that a request can have; `None` if nothing is shared in this
    /// cache.
    pub(crate) fn shared_prompt<'p>(&self, prompt: &Prompt<'p>) -> Option<(RootKey, &'p [u32])> {
        let Sharing { model, .. } = &**self.sharing.as_ref()?;
        let most = prompt.tokens.len().min(self.limits.context as usize);
        Some((RootKey::new(prompt.salt, prompt.adapter, model), &prompt.tokens[..most]))
    }

    /// Tokens of a prompt down to the deepest checkpoint that is here.
    pub(crate) fn reusable(&self, root: &RootKey, tokens: &[u32]) -> u32 {
        self.sharing.as_ref().map_or(0, |sharing| sharing.tree.lookup(root, tokens).reusable)
    }

    /// The oldest checkpoint that was offered and is still there.
    pub(crate) fn next_store(&mut self) -> Option<StoreSource> {
        self.attach_saved();
        let Sharing { tree, offers, .. } = &mut **self.sharing.as_mut()?;
        let (place, reference) = std::iter::from_fn(|| offers.next())
            .find_map(|place| Some((place, tree.refer_to_place(place)?)))?;
        let found = tree.checkpoint(&reference).ok().flatten().map(SavedCheckpoint::place);
        let (Some(checkpoint), Ok(path), Ok(tokens), Ok(blocks)) =
            (found, tree.path(&reference), tree.tokens(&reference), tree.blocks(&reference))
        else {
            unreachable!("the place has a checkpoint, and the reference is this tree's")
        };
        let Path { root, origin } = path;
        let root = root.clone();
        let mut tokens: Vec<_> = tokens.copied().collect();
        tokens.reverse();
        let mut blocks: Vec<_> = blocks.map(|(_, block)| block.id()).collect();
        blocks.reverse();
        Some(StoreSource { place, reference, root, tokens, origin, blocks, checkpoint })
    }

    /// Gives a source back; it is offered again, as the first, if it is to be `repeated`.
    pub(crate) fn end_store(&mut self, source: StoreSource, repeated: bool) {
        let StoreSource { place, reference, .. } = source;
        if let Some((sharing, _, mut pools)) = self.sharing_parts() {
            let released = sharing.tree.release(reference, |freed| pools.take_back(freed));
            debug_assert!(released.is_ok(), "the reference is this tree's");
            if repeated {
                sharing.offers.add_first(place);
            }
        }
    }

    /// Room for a prefix of whole blocks with a checkpoint at its end; `None` if that is here. What nobody refers to is
    /// evicted for it, if that is enough.
    ///
    /// # Errors
    /// [`KvError::OutOfBlocks`], [`KvError::OutOfCheckpoints`]; nothing is taken then.
    pub(crate) fn begin_load(
        &mut self,
        root: &RootKey,
        tokens: &[[u32; BLOCK]],
    ) -> Result<Option<LoadTarget>, KvError> {
        self.attach_saved();
        let Some(sharing) = self.sharing.as_mut() else { return Ok(None) };
        let reference = sharing.tree.refer_to_match(root, tokens);
        let needed = tokens.len() as u32 - reference.blocks();
        let is_here = needed == 0 && matches!(sharing.tree.checkpoint(&reference), Ok(Some(_)));
        match if is_here { Err(None) } else { self.take_room(needed).map_err(Some) } {
            Ok((blocks, checkpoint)) => Ok(Some(LoadTarget { reference, blocks, checkpoint })),
            Err(refused) => {
                if refused.is_none() || !made(Mistake::RefusalKeeps) {
                    self.release_place(reference);
                }
                refused.map_or(Ok(None), Err)
            }
        }
    }

    /// Takes blocks and a checkpoint, or nothing.
    fn take_room(&mut self, needed: u32) -> Result<(Vec<Block>, StateCheckpoint), KvError> {
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

    /// What has arrived becomes the tree's: blocks of `tokens`, the whole prefix, and the checkpoint at its end. What the
    /// tree got from elsewhere meanwhile stays as it is: how many blocks it took, and the checkpoint's place if it took that.
    pub(crate) fn enter_loaded(
        &mut self,
        target: LoadTarget,
        tokens: &[[u32; BLOCK]],
        origin: Origin,
        has_draft: bool,
    ) -> (u32, Option<Place>) {
        let LoadTarget { mut reference, blocks, checkpoint } = target;
        let mut blocks: Vec<_> = blocks.into_iter().map(Some).collect();
        let Some((sharing, _, mut pools)) = self.sharing_parts() else { return (0, None) };
        let new = &tokens[reference.blocks() as usize..];
        let take = |index: usize| match blocks[index].take() {
            Some(block) => block,
            None => unreachable!("there is a block for each, and it is asked for once"),
        };
        let freed = |freed| pools.take_back(freed);
        let taken = sharing.tree.extend(&mut reference, new, take, freed);
        debug_assert!(taken.is_ok(), "the reference is this tree's");
        let boundary = (tokens.len() * BLOCK) as u32;
        let saved = checkpoint.saved(None, boundary, has_draft);
        let too_high = u32::from(made(Mistake::CheckpointTooHigh) && tokens.len() > 1);
        let above = tokens.len() as u32 - too_high;
        let attached = sharing.tree.attach(&reference, above, origin, saved);
        let place = match attached {
            Ok(place) => Some(place),
            Err(not_taken) => {
                pools.checkpoints.give_back(not_taken.0);
                None
            }
        };
        blocks.into_iter().flatten().for_each(|block| pools.free_block(block));
        self.release_place(reference);
        (taken.unwrap_or(0) as u32, place)
    }

    /// A prefix that came from another cache becomes the tree's: how many blocks it took, and whether it took the checkpoint, which
    /// is offered to the lower tier then. Nothing is known of why that was taken: it counts as a prompt's.
    pub(crate) fn enter_moved(
        &mut self,
        target: LoadTarget,
        tokens: &[[u32; BLOCK]],
        has_draft: bool,
    ) -> (u32, bool) {
        let (blocks, place) = self.enter_loaded(target, tokens, Origin::Prompt, has_draft);
        if let (Some(place), Some(sharing)) = (place, self.sharing.as_mut()) {
            sharing.offers.add(place);
        }
        (blocks, place.is_some())
    }

    /// The blocks of a prompt down to the deepest checkpoint, in order, and that; `None` without one. They stay until the
    /// ledger changes.
    pub(crate) fn prefix_of(&mut self, prompt: &Prompt<'_>) -> Option<(Vec<BlockId>, SavedPlace)> {
        self.attach_saved();
        let (root, tokens) = self.shared_prompt(prompt)?;
        let tree = &mut self.sharing.as_mut()?.tree;
        let reference = tree.refer_to_checkpoint(&root, tokens.as_chunks().0)?;
        let place = tree.checkpoint(&reference).ok().flatten().map(SavedCheckpoint::place);
        let blocks = tree.blocks(&reference).into_iter().flatten();
        let mut blocks: Vec<_> = blocks.map(|(_, block)| block.id()).collect();
        blocks.reverse();
        self.release_place(reference);
        place.map(|place| (blocks, place))
    }

    /// Gives the room of a load back. Nothing may be on its way there any more.
    pub(crate) fn drop_load(&mut self, target: LoadTarget) {
        let LoadTarget { reference, blocks, checkpoint } = target;
        if let Some((_, _, mut pools)) = self.sharing_parts() {
            pools.checkpoints.give_back(checkpoint);
            // In reverse, so that the one taken last is the one taken next.
            blocks.into_iter().rev().for_each(|block| pools.free_block(block));
        }
        self.release_place(reference);
    }

    /// A mistake: a source is evicted like the rest.
    pub(crate) fn let_go(&mut self, source: &mut StoreSource) {
        let Some(sharing) = self.sharing.as_mut() else { return };
        let nothing = sharing.tree.refer_to_match(&source.root, &[]);
        let held = std::mem::replace(&mut source.reference, nothing);
        self.release_place(held);
    }

    fn release_place(&mut self, reference: Reference) {
        let Some((sharing, _, mut pools)) = self.sharing_parts() else { return };
        let released = sharing.tree.release(reference, |freed| pools.take_back(freed));
        debug_assert!(released.is_ok(), "the reference is this tree's");
    }
}
