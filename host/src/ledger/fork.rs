//! Forks in the ledger: requests that start as copies of other requests.

use kv_layout::geometry::BLOCK_TOKENS;

use super::Ledger;
use crate::block::{Block, RequestBlock};
use crate::error::KvError;
use crate::ids::{BlockId, LayerGroup, RequestId};

/// A fork that has begun and is not yet completed or undone.
#[derive(Debug)]
pub(crate) struct Fork {
    /// The request that is copied.
    pub of: RequestId,
    /// The new request.
    pub id: RequestId,
    /// Number of leading blocks that both requests share: all that no step writes any more.
    pub shared: u32,
    /// The last block, if steps still write it, and the new block that becomes its copy.
    pub copied: Option<(BlockId, Block)>,
}

impl Ledger {
    /// Admits a request that is a copy of another: both share the blocks that no step writes any more. For a ledger
    /// without device memory; with a cache, call [`KvCacheManager::fork`](crate::KvCacheManager::fork).
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`], [`KvError::ForeignRequest`], [`KvError::RequestInStep`], [`KvError::NoFreeSlot`],
    /// [`KvError::OutOfBlocks`]. Nothing has changed then.
    pub fn fork(&mut self, of: RequestId) -> Result<RequestId, KvError> {
        let fork = self.begin_fork(of)?;
        Ok(self.enter_fork(fork))
    }

    /// Admits the request that becomes a copy of `of`. If steps still write the last block of `of`, takes a
    /// new block for its copy.
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`], [`KvError::ForeignRequest`], [`KvError::RequestInStep`], [`KvError::NoFreeSlot`],
    /// [`KvError::OutOfBlocks`]. Nothing is taken then.
    pub(crate) fn begin_fork(&mut self, of: RequestId) -> Result<Fork, KvError> {
        let request = self.request(of)?;
        self.check_in_no_step(of)?;
        let committed = request.groups[LayerGroup::Trunk.index()].committed;
        // The request may hold more blocks than `needed`, for tokens that were rejected.
        let needed = self.blocks_of(committed);
        let shared = needed.min(committed / BLOCK_TOKENS);
        let last =
            request.blocks.get(shared as usize).map(RequestBlock::id).filter(|_| shared < needed);
        let id = self.admit()?;
        if last.is_some()
            && let Err(error) = self.require_blocks(1)
        {
            drop(self.requests.release(id));
            return Err(error);
        }
        let copied = last.and_then(|last| Some((last, self.blocks.take()?)));
        Ok(Fork { of, id, shared, copied })
    }

    /// Completes a fork: the new request gets the tokens of the other one and shares its blocks.
    pub(crate) fn enter_fork(&mut self, fork: Fork) -> RequestId {
        let Fork { of, id, shared, copied } = fork;
        let Self { requests, shares, .. } = self;
        let mut both = (Vec::new(), Default::default());
        if let Some(request) = requests.get_mut(of) {
            let blocks = request.blocks.iter_mut().take(shared as usize);
            both = (blocks.map(|held| shares.share(held)).collect(), request.groups);
        }
        if let Some(request) = requests.get_mut(id) {
            request.blocks.extend(both.0);
            request.blocks.extend(copied.map(|(_, block)| RequestBlock::Own(block)));
            request.groups = both.1;
        }
        // Blocks of the prefix tree stay for the new request only if it has a reference of its own.
        let committed = self.committed(id).unwrap_or(0);
        self.fork_prefix(of.slot(), id.slot(), committed);
        id
    }

    /// Undoes a failed fork: returns its slot and its block.
    pub(crate) fn undo_fork(&mut self, fork: Fork) {
        let Fork { id, copied, .. } = fork;
        if let Some((_, block)) = copied {
            self.pools().free_block(block);
        }
        drop(self.requests.release(id));
    }
}
