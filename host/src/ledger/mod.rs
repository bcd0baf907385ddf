//! The ledger: blocks and requests, without a device. `KvCacheManager` keeps one; a scheduler that
//! only wants to know what would fit can keep one by itself.
//!
//! | file | what it holds |
//! |---|---|
//! | `mod.rs` | admission, release, queries |
//! | `requests.rs` | request slots, and the progress of each request |
//! | `limits.rs` | limits of a step |
//! | `check.rs` | checks of a step, before anything changes |
//! | `open_step.rs` | types of a step: `StepRequest`, `Accepted`, `StepPlan`, the open step |
//! | `wanted_checkpoints.rs` | positions at which checkpoints of requests are wanted |
//! | `save_in_steps.rs` | checkpoints that steps write, or that are saved after a step |
//! | `prefix_tree.rs` | the prefix tree and each request's reference to it |
//! | `prefix_reuse.rs` | prefix match on admission, block registration on commit |
//! | `eviction.rs` | eviction and leases |
//! | `offers.rs` | checkpoints offered to a lower tier |
//! | `output_checkpoints.rs` | checkpoints of outputs |
//! | `save_between_steps.rs` | save and restore of checkpoints between steps |
//! | `fork.rs` | forked requests |
//! | `suspend.rs` | suspended requests |
//! | `tier.rs` | prefixes that leave and enter the tree: lower tier, other caches |
//! | `transfer.rs` | requests that move between caches |
//! | `step.rs` | a step: begin, commit, reject |
//! | `slot_queue.rs` | values by slot, in the order in which they were set |
//! | `unit_list.rs` | freed blocks and slots that are to be poisoned |

mod check;
mod eviction;
mod fork;
mod limits;
mod offers;
mod open_step;
mod output_checkpoints;
mod prefix_reuse;
mod prefix_tree;
pub(crate) mod requests;
mod save_between_steps;
mod save_in_steps;
mod slot_queue;
mod step;
mod suspend;
mod tier;
mod transfer;
pub(crate) mod unit_list;
mod wanted_checkpoints;

use dsv4_kv_prefix::{Counts, ReuseStats};
use kv_layout::geometry::{LayerKind, swa_ring_rows};
use serde::Serialize;

pub use open_step::{Accepted, StepPlan, StepRequest, Written};

use crate::block::{self, BlockPool, BlockShares, RequestBlock};
use crate::checkpoints::CheckpointPool;
use crate::config::CacheConfig;
use crate::error::KvError;
use crate::ids::{BlockId, LayerGroup, RequestId, SlotId};
use crate::ledger::limits::StepLimits;
use crate::ledger::requests::{Progress, Request, Requests};
use crate::ledger::unit_list::UnitList;
use crate::pool_kind::PoolUnit;
use crate::step_meta::StepLayout;
pub(crate) use fork::Fork;
use open_step::{Growth, OpenStep};
pub(crate) use open_step::{largest_layout, may_save};
pub(crate) use prefix_tree::RequestPrefix;
pub use prefix_tree::{Admission, Prompt};
use prefix_tree::{Pools, PrefixCache, Tree};
pub(crate) use tier::{LoadTarget, StoreSource};
use wanted_checkpoints::WantedCheckpoints;

/// Records which request holds which slot, blocks and checkpoints, and which of these are free. The prefix tree is
/// left out of the serialised form, which is for reports and comparisons.
#[derive(Debug, Serialize)]
pub struct Ledger {
    blocks: BlockPool,
    shares: BlockShares,
    checkpoints: CheckpointPool,
    /// Free slots for suspended requests.
    free_suspended_slots: Vec<SlotId>,
    /// Most suspended requests.
    max_suspended: u32,
    requests: Requests,
    /// The step that each group runs, by [`LayerGroup::index`].
    open: [OpenStep; 2],
    largest_layout: StepLayout,
    /// Rows of a slot's sliding-window ring.
    ring: u32,
    /// Whether any layer stores entries, that is, whether requests need blocks.
    has_entries: bool,
    /// Whether the model has draft layers.
    has_drafts: bool,
    /// The requests that need blocks for the step that was checked last. Scratch, so that checking allocates
    /// nothing.
    #[serde(skip)]
    growing: Vec<Growth>,
    /// Positions at which checkpoints of requests are wanted, and checkpoints that were saved.
    wanted: WantedCheckpoints,
    /// The prefix tree and each request's reference to it; `None` if nothing can be shared.
    #[serde(skip)]
    prefix_cache: Option<Box<PrefixCache>>,
    /// Blocks that were freed since the last `take_to_poison`; none unless the cache is poisoned.
    #[serde(skip)]
    to_poison: UnitList,
    /// Blocks in a request's row of the block table.
    max_blocks: u32,
    /// Limits of a step, from the configuration of the cache.
    limits: StepLimits,
    /// Most tokens of a request in a decode step, `max_draft` + 1. So many positions can be taken back.
    max_decode_tokens: u32,
}

impl Ledger {
    /// An empty ledger.
    ///
    /// # Errors
    /// [`KvError::Model`], [`KvError::Config`] or [`KvError::DraftLayerKind`] if a setting is out of range.
    pub fn new(config: &CacheConfig) -> Result<Self, KvError> {
        config.validate()?;
        let has_entries = config.model.layers.iter().any(|&kind| kind != LayerKind::Swa);
        let most_blocks = config.max_blocks_per_request().min(config.num_blocks);
        let requests = Requests::new(config.max_requests, most_blocks);
        Ok(Self {
            blocks: BlockPool::new(config.num_blocks),
            shares: BlockShares::default(),
            checkpoints: CheckpointPool::new(requests.cache(), config.num_checkpoints),
            max_suspended: config.max_suspended,
            free_suspended_slots: (config.max_requests..config.units(PoolUnit::Slot))
                .rev()
                .map(SlotId)
                .collect(),
            requests,
            open: LayerGroup::ALL.map(|group| {
                let saves = if may_save(group, config) { config.num_checkpoints } else { 0 };
                OpenStep::new(config.max_requests, saves)
            }),
            largest_layout: largest_layout(LayerGroup::Trunk, config),
            max_blocks: config.max_blocks_per_request(),
            ring: swa_ring_rows(config.max_decode_tokens()),
            has_entries,
            has_drafts: !config.group_layers(LayerGroup::Draft).is_empty(),
            growing: Vec::with_capacity(config.max_requests as usize),
            wanted: WantedCheckpoints::new(config),
            prefix_cache: PrefixCache::new(config, has_entries),
            to_poison: UnitList::new(if config.poison { config.num_blocks } else { 0 }),
            limits: StepLimits::of_cache(config),
            max_decode_tokens: config.max_decode_tokens(),
        })
    }

    /// Admits a request with no tokens.
    ///
    /// # Errors
    /// [`KvError::NoFreeSlot`].
    pub fn admit(&mut self) -> Result<RequestId, KvError> {
        self.requests.admit().ok_or(KvError::NoFreeSlot { slots: self.limits.requests })
    }

    /// Fails with [`KvError::NoFreeSlot`] if all slots are taken.
    pub(crate) fn check_free_slot(&self) -> Result<(), KvError> {
        let slots = self.limits.requests;
        if self.live_requests() < slots { Ok(()) } else { Err(KvError::NoFreeSlot { slots }) }
    }

    /// Ends a request and frees its slot and its own blocks. Shared blocks stay while another request uses them;
    /// the prefix tree may keep its blocks until they are evicted.
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`], [`KvError::ForeignRequest`]; [`KvError::RequestInStep`] while a
    /// step that it takes part in is open.
    pub fn release(&mut self, id: RequestId) -> Result<(), KvError> {
        self.request(id)?;
        self.check_in_no_step(id)?;
        self.leave_prefix_cache(id.slot());
        self.wanted.forget(id.slot());
        let Self { requests, shares, blocks, checkpoints, to_poison, .. } = self;
        let mut pools = Pools { blocks, checkpoints, to_poison };
        // In reverse, so that the pool hands them out again in the same order.
        pools.give_up(requests.release(id).into_iter().flatten(), shares);
        Ok(())
    }

    /// Moves the draft layers of a request back to `committed` tokens, after the trunk has rejected
    /// the drafts that follow.
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`], [`KvError::ForeignRequest`], [`KvError::RequestInStep`]; [`KvError::CannotRewind`]
    /// if it has fewer tokens, or if more than `max_draft` + 1 positions from `committed` on were written;
    /// [`KvError::Overwritten`] after a rejected step of more tokens than that, or a restore that failed.
    pub fn rewind_draft(&mut self, id: RequestId, committed: u32) -> Result<(), KvError> {
        let group = LayerGroup::Draft;
        let (max_decode_tokens, is_open) = (self.max_decode_tokens, self.is_in_step(group, id));
        let request = self.request_mut(id)?;
        let progress = &mut request.groups[group.index()];
        if is_open {
            return Err(KvError::RequestInStep { request: id, group });
        }
        let Progress { committed: written, written_to, .. } = *progress;
        if !progress.can_resume_at(written, max_decode_tokens) {
            return Err(KvError::Overwritten { request: id, group, committed: written });
        }
        if committed > written || !progress.can_resume_at(committed, max_decode_tokens) {
            let (to, earliest) = (committed, written_to.saturating_sub(max_decode_tokens));
            return Err(KvError::CannotRewind { request: id, to, committed: written, earliest });
        }
        progress.committed = committed;
        Ok(())
    }

    /// Blocks a request of `end` tokens holds: one for each 128 tokens of which an entry exists.
    #[must_use]
    pub fn blocks_of(&self, end: u32) -> u32 {
        if self.has_entries { block::blocks_of(end) } else { 0 }
    }

    /// The largest layout that the StepMeta of a step can have: an array with its number of elements holds
    /// every step. That of one step is [`StepPlan::layout`].
    #[must_use]
    pub fn largest_layout(&self) -> StepLayout {
        self.largest_layout
    }

    /// Final tokens of a request in the trunk.
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`], [`KvError::ForeignRequest`].
    pub fn committed(&self, id: RequestId) -> Result<u32, KvError> {
        self.committed_in(LayerGroup::Trunk, id)
    }

    /// Final tokens of a request in a layer group.
    ///
    /// # Errors
    /// As [`Self::committed`].
    pub fn committed_in(&self, group: LayerGroup, id: RequestId) -> Result<u32, KvError> {
        self.request(id).map(|request| request.groups[group.index()].committed)
    }

    /// Blocks of a request, in the order of its tokens: its block table.
    ///
    /// # Errors
    /// As [`Self::committed`].
    pub fn block_table(
        &self,
        id: RequestId,
    ) -> Result<impl ExactSizeIterator<Item = BlockId>, KvError> {
        self.request(id).map(|request| request.blocks.iter().map(RequestBlock::id))
    }

    /// For each block of a request, in the order of its tokens, whether this request alone holds it. The other blocks
    /// belong to the prefix tree or are shared by forked requests.
    ///
    /// # Errors
    /// As [`Self::committed`].
    pub fn own_blocks(
        &self,
        id: RequestId,
    ) -> Result<impl ExactSizeIterator<Item = bool>, KvError> {
        self.request(id).map(|request| request.blocks.iter().map(RequestBlock::is_own))
    }

    /// Blocks that are free.
    #[must_use]
    pub fn free_blocks(&self) -> u32 {
        self.blocks.free()
    }

    /// Number of blocks in the pool, free or not.
    #[must_use]
    pub fn total_blocks(&self) -> u32 {
        self.blocks.total()
    }

    /// The request in the slot; `None` if the slot is free, or reserved for a request that is being imported.
    #[must_use]
    pub fn request_in(&self, slot: SlotId) -> Option<RequestId> {
        self.requests.in_slot(slot)
    }

    /// Number of admitted requests, plus slots that are reserved for requests being imported.
    #[must_use]
    pub fn live_requests(&self) -> u32 {
        self.requests.live()
    }

    /// Counts of the blocks and checkpoints in the prefix tree.
    #[must_use]
    pub fn tree_counts(&self) -> Counts {
        self.prefix_cache
            .as_ref()
            .map_or(Counts::default(), |prefix_cache| prefix_cache.tree.counts())
    }

    /// Tokens of prompts that were reused, and why others were not.
    #[must_use]
    pub fn reuse_stats(&self) -> ReuseStats {
        self.prefix_cache
            .as_ref()
            .map_or(ReuseStats::default(), |prefix_cache| prefix_cache.tree.stats())
    }

    /// Counts everything in the prefix tree again, for tests.
    ///
    /// # Errors
    /// Describes the first inconsistency.
    pub fn audit(&self) -> Result<(), String> {
        self.prefix_cache.as_ref().map_or(Ok(()), |prefix_cache| prefix_cache.tree.audit())
    }

    /// The prefix tree; `None` if nothing can be shared.
    pub(crate) fn tree(&self) -> Option<&Tree> {
        self.prefix_cache.as_ref().map(|prefix_cache| &prefix_cache.tree)
    }

    /// The prefix tree, mutable; `None` if nothing can be shared.
    pub(crate) fn tree_mut(&mut self) -> Option<&mut Tree> {
        self.prefix_cache.as_mut().map(|prefix_cache| &mut prefix_cache.tree)
    }

    /// Removes and returns the blocks that were freed since the last call; none unless the cache is poisoned.
    pub(crate) fn take_to_poison(&mut self) -> impl Iterator<Item = BlockId> {
        std::iter::from_fn(|| self.to_poison.pop().map(BlockId))
    }

    /// Refuses a request that takes part in an open step.
    fn check_in_no_step(&self, id: RequestId) -> Result<(), KvError> {
        match LayerGroup::ALL.into_iter().find(|&group| self.is_in_step(group, id)) {
            Some(group) => Err(KvError::RequestInStep { request: id, group }),
            None => Ok(()),
        }
    }

    fn request(&self, id: RequestId) -> Result<&Request, KvError> {
        self.requests.get(id).ok_or_else(|| self.refused(id))
    }

    fn request_mut(&mut self, id: RequestId) -> Result<&mut Request, KvError> {
        let refused = self.refused(id);
        self.requests.get_mut(id).ok_or(refused)
    }

    /// The pools that take back released blocks and checkpoints.
    fn pools(&mut self) -> Pools<'_> {
        let Self { blocks, checkpoints, to_poison, .. } = self;
        Pools { blocks, checkpoints, to_poison }
    }

    /// The error for an id that names no request of this ledger.
    #[cold]
    fn refused(&self, id: RequestId) -> KvError {
        if self.requests.is_foreign(id) {
            KvError::ForeignRequest { request: id }
        } else {
            KvError::UnknownRequest { request: id }
        }
    }
}
