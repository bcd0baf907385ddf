//! Prefixes between host memory and a tier below, which stores them elsewhere: what it reads, and what it fills, on any
//! thread.

use std::collections::VecDeque;
use std::sync::Arc;

use dsv4_kv_prefix::{Origin, Reference, RootKey};

use super::state::{BLOCK, HostCheckpoint, Tier, Unit};
use crate::device::{Backend, HostUnit};

/// A checkpoint in host memory, with all blocks above it. Whoever has it keeps their memory, and nobody writes it.
pub struct HostImage<B: Backend> {
    /// Whose it is: salt, adapter, and the identity of model and formats.
    pub root: RootKey,
    /// Tokens of its blocks, in order.
    pub tokens: Vec<[u32; BLOCK]>,
    /// Why the checkpoint was taken.
    pub origin: Origin,
    /// Whether the checkpoint has the windows of draft layers.
    pub has_draft: bool,
    blocks: Vec<Unit<B>>,
    checkpoint: Vec<Unit<B>>,
}

impl<B: Backend> HostImage<B> {
    /// The image of a block, `[bytes of an image]`; `None` if it has not so many.
    #[must_use]
    pub fn block(&self, block: usize) -> Option<&[u8]> {
        self.blocks.get(block).map(|unit| unit.bytes())
    }

    /// The parts of the checkpoint, in order: one behind the other they are its bytes, and some that mean nothing.
    pub fn checkpoint(&self) -> impl Iterator<Item = &[u8]> {
        self.checkpoint.iter().map(|unit| unit.bytes())
    }
}

/// Room in host memory for blocks that are not there and a checkpoint behind them, to be filled on any thread. What is above
/// them stays.
#[must_use = "it holds memory; enter it, or give it back"]
pub struct HostRoom<B: Backend> {
    tokens: Vec<[u32; BLOCK]>,
    /// In the host's tree, at the end of what is there.
    above: Reference,
    blocks: Vec<HostUnit<B>>,
    checkpoint: Vec<HostUnit<B>>,
    /// Of what fills it.
    filled: Option<(Origin, bool)>,
}

impl<B: Backend> HostRoom<B> {
    /// Blocks that are there: what fills the room begins behind them.
    #[must_use]
    pub fn above(&self) -> u32 {
        self.above.blocks()
    }

    /// Copies the images of the blocks that are not there, in order, and of the checkpoint, with its origin and whether it
    /// has the windows of draft layers. `false` if there are more or fewer, or if one is larger than its room.
    pub fn fill<'i>(
        &mut self,
        blocks: impl IntoIterator<Item = &'i [u8]>,
        checkpoint: &[u8],
        (origin, has_draft): (Origin, bool),
    ) -> bool {
        let mut images = blocks.into_iter();
        let all = self.blocks.iter_mut().all(|unit| copy(unit, images.next()));
        let unit = self.checkpoint.first().map_or(1, |unit| unit.bytes().len());
        let mut parts = checkpoint.chunks(unit);
        let all = all && images.next().is_none();
        let all = all && self.checkpoint.iter_mut().all(|unit| copy(unit, parts.next()));
        self.filled = (all && parts.next().is_none()).then_some((origin, has_draft));
        self.filled.is_some()
    }
}

/// Copies an image to the beginning of its unit.
fn copy<B: Backend>(unit: &mut HostUnit<B>, image: Option<&[u8]>) -> bool {
    let Some(image) = image else { return false };
    let Some(room) = unit.bytes_mut().get_mut(..image.len()) else { return false };
    room.copy_from_slice(image);
    true
}

impl<B: Backend> Tier<B> {
    /// From now on checkpoints are offered to a tier below.
    pub fn keep_offers(&mut self) {
        self.offers.get_or_insert_with(VecDeque::new);
    }

    /// Bytes of the image of a block.
    pub fn unit_bytes(&self) -> u64 {
        self.layout.unit_bytes
    }

    /// The oldest checkpoint that was offered and is still there.
    pub fn next_image(&mut self) -> Option<HostImage<B>> {
        let Self { tree, offers: Some(offers), .. } = self else { return None };
        let places = std::iter::from_fn(|| offers.pop_front());
        let reference = places.filter_map(|place| tree.refer_to_place(place)).next()?;
        let (Ok(path), Ok(blocks), Ok(Some(checkpoint))) =
            (tree.path(&reference), tree.blocks(&reference), tree.checkpoint(&reference))
        else {
            unreachable!("the place has a checkpoint, and the reference is this tree's")
        };
        let mut blocks: Vec<_> = blocks.map(|(_, unit)| unit.clone()).collect();
        blocks.reverse();
        let image = HostImage {
            root: path.root.clone(),
            tokens: path.tokens,
            origin: path.origin,
            has_draft: checkpoint.has_draft,
            blocks,
            checkpoint: checkpoint.units.clone(),
        };
        self.release(reference);
        Some(image)
    }

    /// Room for a prefix that is not there.
    pub fn reserve(&mut self, root: &RootKey, tokens: &[[u32; BLOCK]]) -> Option<HostRoom<B>> {
        let above = self.tree.refer_to_match(root, tokens);
        let missing = tokens.len() - above.blocks() as usize;
        let is_there = missing == 0 && matches!(self.tree.checkpoint(&above), Ok(Some(_)));
        let needed = missing + self.layout.checkpoint_units as usize;
        let units = if is_there || tokens.is_empty() { None } else { self.take_units(needed) };
        let Some(mut blocks) = units else {
            self.release(above);
            return None;
        };
        let checkpoint = blocks.split_off(missing);
        self.reserved += needed;
        Some(HostRoom { tokens: tokens.to_vec(), above, blocks, checkpoint, filled: None })
    }

    /// Enters what was brought; `false` if not all of it was.
    pub fn enter(&mut self, room: HostRoom<B>) -> bool {
        let Some((origin, has_draft)) = room.filled.filter(|_| self.is_own(&room)) else {
            self.give_back(room);
            return false;
        };
        self.reserved -= room.blocks.len() + room.checkpoint.len();
        let HostRoom { tokens, mut above, blocks, checkpoint, .. } = room;
        let units: Vec<_> = blocks.into_iter().map(Arc::new).collect();
        let new = &tokens[above.blocks() as usize..];
        let registered = self.tree.extend(&mut above, new, |index| units[index].clone(), drop);
        debug_assert!(registered.is_ok(), "the reference is this tree's");
        let units = checkpoint.into_iter().map(Arc::new).collect();
        let checkpoint = HostCheckpoint { units, has_draft, origin };
        // One that is there is as good.
        let _ = self.tree.attach(&above, tokens.len() as u32, origin, checkpoint);
        self.release(above);
        true
    }

    /// Gives room back.
    pub fn give_back(&mut self, room: HostRoom<B>) {
        if self.is_own(&room) {
            self.reserved -= room.blocks.len() + room.checkpoint.len();
            self.release(room.above);
        }
    }

    /// Whether room is this tier's.
    fn is_own(&self, room: &HostRoom<B>) -> bool {
        self.tree.checkpoint(&room.above).is_ok()
    }
}
