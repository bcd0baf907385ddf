//! The prefix tree of a ledger, and each request's reference to it.

use dsv4_kv_prefix::{
    Checkpoints, Freed, Limits, Origin, Placement, PrefixTree, Reference, ScoredLru,
};
use kv_layout::geometry::BLOCK_TOKENS;

use super::offers::Offers;
use super::slot_queue::SlotQueue;
use crate::block::{BLOCK, Block, BlockPool, BlockShares, RequestBlock};
use crate::checkpoints::{CheckpointPool, SavedCheckpoint};
use crate::config::CacheConfig;
use crate::ids::{RequestId, SlotId};
use crate::ledger::unit_list::UnitList;
use crate::memory::state_layout;
use crate::schema::Schema;

/// Number of evicted blocks that the tree remembers, to report why tokens were not reused.
const REMEMBERED: u32 = 1 << 16;

pub(crate) type Tree = PrefixTree<Block, SavedCheckpoint, ScoredLru, BLOCK>;
type FreedUnit = Freed<Block, SavedCheckpoint>;

/// The prompt of a request, and which other requests may share it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prompt<'p> {
    /// Token ids.
    pub tokens: &'p [u32],
    /// Only requests with the same salt share prefixes. Use one salt for each trust domain: response times reveal whether
    /// a prefix was cached.
    pub salt: &'p [u8],
    /// Only requests with the same adapter share prefixes: its name, or anything else that changes the cached bytes
    /// of the same tokens.
    pub adapter: &'p [u8],
}

/// A request that was admitted with its prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admission {
    /// The request.
    pub id: RequestId,
    /// Tokens that it already has and that need not be computed; its first step starts there.
    pub reused: u32,
    /// Tokens of its prompt whose blocks are in the prefix tree. Those from `reused` on are computed again, because
    /// the match has no checkpoint after `reused`.
    pub matched: u32,
}

/// The prefix tree and the requests that use it, in a cache with checkpoints.
#[derive(Debug)]
pub(super) struct PrefixCache {
    pub tree: Tree,
    pub placement: Placement,
    /// Identity of model and formats, the same for all requests of this cache.
    pub model: Vec<u8>,
    /// Checkpoints offered to the lower tier, if there is one.
    pub offers: Offers,
    /// By slot.
    pub of_slot: Vec<Option<RequestPrefix>>,
    /// Whether checkpoints of outputs are kept.
    pub keeps_outputs: bool,
    /// The last checkpoint of each running request's output, the oldest first. It moves to the tree when the request
    /// ends, or is given up earlier when room is needed.
    pub outputs: SlotQueue<SavedCheckpoint>,
    /// Most tokens of a request whose ids are known and that are not registered in the tree: part of
    /// a block, and a step.
    pub token_capacity: usize,
}

/// A request that uses the prefix tree.
#[derive(Debug)]
pub(crate) struct RequestPrefix {
    /// To the end of the request's registered blocks.
    pub(super) reference: Reference,
    /// Ids of the tokens after the registered blocks.
    pub(super) tokens: Vec<u32>,
    /// The part of its prompt that was not reused: the position of the first token, and the tokens.
    pub(super) prompt: (u32, Box<[u32]>),
    /// Boundaries of its prompt at which it is saved.
    pub(super) checkpoints: Checkpoints,
    /// Next boundary at which its output is saved.
    pub(super) next_output: u32,
    /// Whether its blocks can still be registered: all token ids were given, and no closed block is shared with a fork.
    pub(super) can_register: bool,
}

/// The pools that take back blocks and checkpoints from requests and from the prefix tree.
pub(super) struct Pools<'l> {
    pub blocks: &'l mut BlockPool,
    pub checkpoints: &'l mut CheckpointPool,
    /// Freed blocks that the manager still has to poison.
    pub to_poison: &'l mut UnitList,
}

impl Pools<'_> {
    /// Returns a block to the pool, and marks it for poisoning.
    pub fn free_block(&mut self, block: Block) {
        self.to_poison.add(block.id().0);
        self.blocks.give_back(block);
    }

    /// Releases blocks of a request, and frees those that neither another request nor the prefix tree
    /// holds. The pool hands out the last of them first.
    pub fn give_up(&mut self, held: impl Iterator<Item = RequestBlock>, shares: &mut BlockShares) {
        held.filter_map(|held| shares.give_up(held)).for_each(|block| self.free_block(block));
    }

    /// Returns a block or a checkpoint of the prefix tree to its pool.
    pub fn take_back(&mut self, freed: FreedUnit) {
        match freed {
            Freed::Block(block) => self.free_block(block),
            Freed::Checkpoint(checkpoint) => self.checkpoints.give_back(checkpoint),
        }
    }
}

impl PrefixCache {
    /// `None` in a cache without checkpoints, or whose layers store no entries: nothing can be shared there.
    pub fn new(config: &CacheConfig, has_entries: bool) -> Option<Box<Self>> {
        if config.num_checkpoints == 0 || !has_entries {
            return None;
        }
        let schema = Schema::new(config);
        let limits = Limits {
            block_bytes: schema.block_bytes(),
            checkpoint_bytes: state_layout::checkpoint_bytes(&schema),
            lease_bytes: config.lease_bytes,
            remembered: REMEMBERED,
            reserved_blocks: config.num_blocks,
        };
        let (blocks, checkpoints) = (config.num_blocks.into(), config.num_checkpoints.into());
        let capacity = limits.block_bytes.saturating_mul(blocks);
        let capacity = capacity.saturating_add(limits.checkpoint_bytes.saturating_mul(checkpoints));
        let interval = (config.checkpoint_interval > 0).then_some(config.checkpoint_interval);
        let mut tree = Tree::new(limits, ScoredLru { capacity });
        tree.log_events(config.event_capacity);
        Some(Box::new(Self {
            tree,
            placement: Placement { block_tokens: BLOCK_TOKENS, branch_points: true, interval },
            model: config.identity(),
            offers: Offers::default(),
            of_slot: (0..config.max_requests).map(|_| None).collect(),
            keeps_outputs: config.keep_outputs,
            outputs: SlotQueue::new(config.max_requests),
            token_capacity: BLOCK + config.max_step_tokens as usize,
        }))
    }

    pub fn of(&self, slot: SlotId) -> Option<&RequestPrefix> {
        self.of_slot.get(slot.0 as usize)?.as_ref()
    }

    /// As [`Self::of`], mutable.
    pub fn of_mut(&mut self, slot: SlotId) -> Option<&mut RequestPrefix> {
        self.of_slot.get_mut(slot.0 as usize)?.as_mut()
    }

    /// A copy of `tokens`, with capacity for the tokens of a step.
    pub fn token_buffer(&self, tokens: &[u32]) -> Vec<u32> {
        let mut buffer = Vec::with_capacity(self.token_capacity);
        buffer.extend_from_slice(tokens);
        buffer
    }
}

impl RequestPrefix {
    /// Moves the request back to its first `tokens` tokens. The tokens that follow may differ from those before.
    pub fn go_back(&mut self, tokens: u32) {
        let registered = self.reference.blocks() * BLOCK_TOKENS;
        self.tokens.truncate(tokens.saturating_sub(registered) as usize);
        self.next_output = 0;
    }

    /// The first of the `committed_tokens` of a commit that differs from the prompt: its index among them, and the
    /// prompt's token. `committed`: the request's tokens before the commit.
    pub fn first_mismatch(&self, committed: u32, committed_tokens: &[u32]) -> Option<(usize, u32)> {
        let (start, prompt) = &self.prompt;
        let rest = prompt.get(committed.checked_sub(*start)? as usize..)?;
        let at = rest.iter().zip(committed_tokens).position(|(token, new)| token != new)?;
        Some((at, rest[at]))
    }

    /// Where a checkpoint of the request is attached to the tree; `None` if its blocks are not registered.
    pub fn attach_point(&self, saved: &SavedCheckpoint) -> Option<(&Reference, u32, Origin)> {
        let boundary = saved.boundary();
        let planned = self.checkpoints.after(boundary - 1).filter(|&(at, _)| at == boundary);
        // A checkpoint of the prompt that was not planned: the caller asked for it.
        let other = if boundary > self.checkpoints.end() { Origin::Output } else { Origin::Prompt };
        let origin = planned.map_or(other, |(_, origin)| origin);
        let blocks = boundary / BLOCK_TOKENS;
        (blocks <= self.reference.blocks()).then_some((&self.reference, blocks, origin))
    }
}
