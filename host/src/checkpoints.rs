//! Checkpoints: what a request needs besides its blocks to continue at the end of a block as if it had computed all
//! tokens itself.
//!
//! At position P, a multiple of 128, a checkpoint has the window rows of the 128 tokens before P of every layer. Of
//! a CSA layer it also has the previous halves of the last four tokens, which the next compression window pools. An HCA
//! layer needs nothing: a compression window of 128 tokens ends there.
//!
//! **Draft layers** have windows too, and a checkpoint keeps theirs. But a draft layer computes its row of token P - 1
//! with token P, which is not part of the prefix. A request that continues from the checkpoint with another token has
//! the row of the saved request there. A checkpoint that was written inside a chunk has no draft windows, because the
//! draft layers run later: they are zero in a request that continues from it. Its drafts may be worse until these rows
//! have left the window. The trunk verifies drafts, so its tokens are the same.

use kv_layout::geometry::BLOCK_TOKENS;
use serde::Serialize;

use crate::error::KvError;
use crate::ids::{CacheId, CheckpointId, RequestId};

/// The storage of a checkpoint, taken from a `CheckpointPool`, in which nothing is saved yet. It cannot be copied: who
/// holds it owns it, and giving it back is giving it up.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
#[must_use = "storage that is dropped is lost to its pool; give it back"]
pub(crate) struct CheckpointStorage {
    id: CheckpointId,
    #[serde(skip)]
    cache: CacheId,
}

impl CheckpointStorage {
    /// Number of the storage.
    pub const fn id(&self) -> CheckpointId {
        self.id
    }

    /// Marks the storage as one that holds a saved state, or is about to: that of `request`, or `None` for a prompt
    /// from another tier or cache.
    pub(crate) const fn saved(
        self,
        request: Option<RequestId>,
        boundary: u32,
        has_draft: bool,
    ) -> SavedCheckpoint {
        SavedCheckpoint { storage: self, request, boundary, has_draft }
    }
}

/// A checkpoint that holds the saved state of a request. Only a save creates one, so that no request continues from
/// storage that was never written.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[must_use = "a checkpoint that is dropped is lost to its pool; give it back"]
pub struct SavedCheckpoint {
    storage: CheckpointStorage,
    #[serde(skip)]
    request: Option<RequestId>,
    boundary: u32,
    has_draft: bool,
}

impl SavedCheckpoint {
    /// Number of its storage.
    #[must_use]
    pub const fn id(&self) -> CheckpointId {
        self.storage.id
    }

    /// The request that was saved, by the id under which it was admitted: no other request can be restored from it.
    /// `None` for a prompt from another tier or cache.
    pub(crate) const fn request(&self) -> Option<RequestId> {
        self.request
    }

    /// The position at which a request continues: the tokens before it are those of the saved request.
    #[must_use]
    pub const fn boundary(&self) -> u32 {
        self.boundary
    }

    /// Whether it has the windows of the draft layers. If not, they are zero in a request that continues from it. True does
    /// not mean that they are complete: a checkpoint of such a request has these zeros too, until it has run 128 draft
    /// tokens.
    #[must_use]
    pub const fn has_draft(&self) -> bool {
        self.has_draft
    }

    /// The cache whose storage it has.
    pub(crate) const fn cache(&self) -> CacheId {
        self.storage.cache
    }

    /// Everything that restoring a request from it needs.
    pub(crate) const fn place(&self) -> SavedPlace {
        let Self { storage, boundary, has_draft, .. } = self;
        SavedPlace { checkpoint: storage.id, boundary: *boundary, has_draft: *has_draft }
    }
}

/// The error for a checkpoint of another cache. It holds the checkpoint, which still belongs to that cache. It does not
/// convert to [`KvError`], so that `?` cannot drop the checkpoint: its cache would lose the storage. Where `?` boxes
/// the error, the checkpoint is in the box.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", KvError::ForeignCheckpoint)]
pub struct ForeignCheckpoint(pub(crate) SavedCheckpoint);

impl ForeignCheckpoint {
    /// The checkpoint, to be given to its cache.
    pub fn into_checkpoint(self) -> SavedCheckpoint {
        self.0
    }
}

/// A saved checkpoint, by number; valid while its owner keeps the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SavedPlace {
    pub checkpoint: CheckpointId,
    pub boundary: u32,
    pub has_draft: bool,
}

impl From<SavedCheckpoint> for CheckpointStorage {
    fn from(saved: SavedCheckpoint) -> Self {
        saved.storage
    }
}

/// Whether a request can be saved at a position: a block ends there.
#[must_use]
pub const fn is_boundary(position: u32) -> bool {
    position > 0 && position.is_multiple_of(BLOCK_TOKENS)
}

/// The free checkpoints. Taking and giving back are O(1) and allocate nothing.
#[derive(Debug, Serialize)]
pub(crate) struct CheckpointPool {
    free: Vec<CheckpointStorage>,
    total: u32,
    #[serde(skip)]
    cache: CacheId,
}

impl CheckpointPool {
    /// A cache's pool of `total` free checkpoints; the lowest is taken first.
    #[must_use]
    pub fn new(cache: CacheId, total: u32) -> Self {
        let checkpoint = |id| CheckpointStorage { id: CheckpointId(id), cache };
        Self { free: (0..total).rev().map(checkpoint).collect(), total, cache }
    }

    /// A free checkpoint, or `None` when all are taken.
    pub fn take(&mut self) -> Option<CheckpointStorage> {
        self.free.pop()
    }

    /// The free checkpoints in the order in which [`Self::take`] gives them out.
    pub(crate) fn next_free(&self) -> impl Iterator<Item = CheckpointId> {
        self.free.iter().rev().map(CheckpointStorage::id)
    }

    /// Refuses a checkpoint of another pool.
    pub fn check_own(&self, saved: &SavedCheckpoint) -> Result<(), KvError> {
        if saved.cache() == self.cache { Ok(()) } else { Err(KvError::ForeignCheckpoint) }
    }

    /// Returns a checkpoint of this pool, saved or not. Queued copies of it stay correct: the next write of the
    /// storage is queued after them.
    pub fn give_back(&mut self, checkpoint: impl Into<CheckpointStorage>) {
        let checkpoint = checkpoint.into();
        debug_assert_eq!(checkpoint.cache, self.cache, "a checkpoint of another pool");
        self.free.push(checkpoint);
    }

    /// Checkpoints that are free.
    #[must_use]
    pub fn free(&self) -> u32 {
        self.free.len() as u32
    }

    /// Number of checkpoints in the pool, free or not.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.total
    }
}
