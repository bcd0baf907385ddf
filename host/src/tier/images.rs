//! Prefixes that move between host memory and a lower tier: images that it reads, and reservations that it fills, on
//! any thread.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use dsv4_kv_prefix::{Origin, RootKey};

use super::loans::Loan;
use super::state::{HostCheckpoint, Tier, Unit};
use crate::block::BLOCK;
use crate::device::{Backend, HostUnit};

/// What is known of a checkpoint besides its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckpointInfo {
    /// Why the checkpoint was taken.
    pub origin: Origin,
    /// Whether it has the windows of draft layers.
    pub has_draft: bool,
}

/// A checkpoint in host memory, with all blocks above it. Until the image is dropped, they are neither evicted nor
/// written.
pub struct HostImage<B: Backend> {
    /// Root of the prefix: salt, adapter, and the identity of model and formats.
    pub root: RootKey,
    /// Tokens of its blocks, in order.
    pub tokens: Vec<[u32; BLOCK]>,
    /// Origin of the checkpoint, and whether it has draft windows.
    pub info: CheckpointInfo,
    blocks: Vec<Unit<B>>,
    checkpoint: Vec<Unit<B>>,
    /// Bytes of the checkpoint.
    checkpoint_bytes: usize,
    /// Last field, so that the units are dropped before the loan ends.
    _loan: Loan,
}

impl<B: Backend> fmt::Debug for HostImage<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostImage")
            .field("blocks", &self.tokens.len())
            .field("info", &self.info)
            .finish_non_exhaustive()
    }
}

impl<B: Backend> HostImage<B> {
    /// The image of block number `block`, `[bytes of an image]`; `None` if the prefix has fewer blocks.
    #[must_use]
    pub fn block(&self, block: usize) -> Option<&[u8]> {
        self.blocks.get(block).map(|unit| unit.bytes())
    }

    /// The parts of the checkpoint, in order; concatenated, they are its bytes.
    pub fn checkpoint(&self) -> impl Iterator<Item = &[u8]> {
        let mut left = self.checkpoint_bytes;
        self.checkpoint.iter().map(move |unit| {
            let part = &unit.bytes()[..left.min(unit.bytes().len())];
            left -= part.len();
            part
        })
    }
}

/// Host memory reserved for the missing blocks of a prefix and the checkpoint at its end, to be filled on any thread.
/// The blocks above them are not evicted meanwhile. If it is dropped, its memory is free at once; the blocks above can
/// be evicted from the next call on that takes host memory or advances the tier
/// ([`KvCacheManager::advance_tier`](crate::KvCacheManager::advance_tier)).
pub struct HostReservation<B: Backend> {
    tokens: Vec<[u32; BLOCK]>,
    /// Number of leading blocks that host memory already has.
    above: u32,
    blocks: Vec<HostUnit<B>>,
    checkpoint: Vec<HostUnit<B>>,
    /// Bytes of the checkpoint.
    checkpoint_bytes: usize,
    /// Origin of the checkpoint, and whether it has draft windows; `None` until it is filled.
    filled: Option<CheckpointInfo>,
    /// Last field, so that the units are dropped before the loan ends.
    loan: Loan,
}

impl<B: Backend> fmt::Debug for HostReservation<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostReservation")
            .field("above", &self.above)
            .field("blocks", &self.tokens.len())
            .finish_non_exhaustive()
    }
}

impl<B: Backend> HostReservation<B> {
    /// Number of leading blocks that host memory already has; the reservation begins after them.
    #[must_use]
    pub fn above(&self) -> u32 {
        self.above
    }

    /// Copies the images of the missing blocks, in order, and of the checkpoint to the reserved memory. `false` if
    /// there are too many or too few images, or if a size differs from
    /// [`KvCacheManager::host_image_bytes`](crate::KvCacheManager::host_image_bytes).
    pub fn fill<'i>(
        &mut self,
        blocks: impl IntoIterator<Item = &'i [u8]>,
        checkpoint: &[u8],
        info: CheckpointInfo,
    ) -> bool {
        // Else, if `blocks` panics, the reservation would still count as filled by an earlier call.
        self.filled = None;
        let mut images = blocks.into_iter();
        let has_all = self.blocks.iter_mut().all(|unit| copy(unit, images.next()));
        let is_exact = images.next().is_none() && checkpoint.len() == self.checkpoint_bytes;
        self.filled = (has_all && is_exact).then_some(info);
        if self.filled.is_none() {
            return false;
        }
        let mut left = checkpoint;
        for unit in &mut self.checkpoint {
            let bytes = unit.bytes_mut();
            let (part, behind) = left.split_at(left.len().min(bytes.len()));
            bytes[..part.len()].copy_from_slice(part);
            left = behind;
        }
        true
    }
}

/// Copies an image to a unit; `false` if there is none, or if its size differs from the unit's.
fn copy<B: Backend>(unit: &mut HostUnit<B>, image: Option<&[u8]>) -> bool {
    let bytes = unit.bytes_mut();
    let Some(image) = image.filter(|image| image.len() == bytes.len()) else { return false };
    bytes.copy_from_slice(image);
    true
}

impl<B: Backend> Tier<B> {
    /// Starts to offer checkpoints to a lower tier.
    pub fn keep_offers(&mut self) {
        self.offers.get_or_insert_with(VecDeque::new);
    }

    /// Bytes of the image of a block, and of a checkpoint.
    pub fn image_bytes(&self) -> (u64, u64) {
        (self.layout.unit_bytes, self.layout.checkpoint_bytes)
    }

    /// The image of the oldest offered checkpoint that is still in the tree. None while something is lent and more than
    /// half of host memory can neither be taken nor evicted: otherwise a lower tier that is slow would keep all of it.
    pub fn next_image(&mut self) -> Option<HostImage<B>> {
        self.end_loans();
        if !self.loans.is_empty() && 2 * self.obtainable_units() < self.pool.units() as usize {
            return None;
        }
        let Self { tree, offers: Some(offers), layout, .. } = self else { return None };
        let mut offered = std::iter::from_fn(|| offers.pop_front());
        let reference = offered.find_map(|checkpoint| tree.lock_checkpoint(checkpoint))?;
        let (Ok(path), Ok(tokens), Ok(blocks), Ok(Some(checkpoint))) = (
            tree.path(&reference),
            tree.tokens(&reference),
            tree.blocks(&reference),
            tree.checkpoint(&reference),
        ) else {
            unreachable!("a checkpoint was locked, and the reference is this tree's")
        };
        let mut tokens: Vec<_> = tokens.copied().collect();
        tokens.reverse();
        let mut blocks: Vec<_> = blocks.map(|(_, unit)| unit.clone()).collect();
        blocks.reverse();
        Some(HostImage {
            root: path.root.clone(),
            tokens,
            info: CheckpointInfo { origin: path.origin, has_draft: checkpoint.has_draft },
            checkpoint: checkpoint.units.clone(),
            blocks,
            checkpoint_bytes: layout.checkpoint_bytes as usize,
            _loan: self.loans.lend(reference, 0),
        })
    }

    /// Reserves memory for the missing part of a prefix; `None` if nothing is missing, or if there is not enough.
    pub fn reserve(
        &mut self,
        root: &RootKey,
        tokens: &[[u32; BLOCK]],
    ) -> Option<HostReservation<B>> {
        let reference = self.tree.lock_blocks(root, tokens);
        let above = reference.blocks();
        let missing = tokens.len() - above as usize;
        let is_there = missing == 0 && matches!(self.tree.checkpoint(&reference), Ok(Some(_)));
        let needed = missing + self.layout.checkpoint_units as usize;
        let units = if is_there || tokens.is_empty() { None } else { self.take_units(needed) };
        let Some(mut blocks) = units else {
            self.release(reference);
            return None;
        };
        Some(HostReservation {
            tokens: tokens.to_vec(),
            above,
            checkpoint: blocks.split_off(missing),
            blocks,
            checkpoint_bytes: self.layout.checkpoint_bytes as usize,
            filled: None,
            loan: self.loans.lend(reference, needed),
        })
    }

    /// Enters a prefix that a lower tier brought; `false` if the reservation was not filled, or if the tree has the
    /// whole prefix by now.
    ///
    /// # Errors
    /// The reservation, if it belongs to another tier.
    pub fn enter(&mut self, reservation: HostReservation<B>) -> Result<bool, HostReservation<B>> {
        let Some(mut above) = self.loans.take(&reservation.loan) else { return Err(reservation) };
        let HostReservation { tokens, blocks, checkpoint, filled, .. } = reservation;
        let mut entered = false;
        if let Some(CheckpointInfo { origin, has_draft }) = filled {
            let units = checkpoint.into_iter().map(Arc::new).collect();
            let checkpoint = HostCheckpoint { units, has_draft, origin };
            let (taken, attached) = self.take_prefix(&mut above, &tokens, blocks, checkpoint);
            entered = taken > 0 || attached.is_some();
        }
        self.release(above);
        Ok(entered)
    }

    /// Ends an unused reservation.
    ///
    /// # Errors
    /// The reservation, if it belongs to another tier.
    pub fn give_back(&mut self, reservation: HostReservation<B>) -> Result<(), HostReservation<B>> {
        let Some(above) = self.loans.take(&reservation.loan) else { return Err(reservation) };
        self.release(above);
        Ok(())
    }
}
