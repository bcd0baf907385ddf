//! What requests share: the prefix tree, and each request's place in it.

use dsv4_kv_prefix::{
    Checkpoints, Freed, Limits, Origin, Placement, PrefixTree, Reference, ScoredLru,
};
use kv_layout::geometry::BLOCK_TOKENS;

use super::offers::Offers;
use crate::block::{BLOCK, Block, BlockPool, BlockShares, Held};
use crate::checkpoints::{CheckpointPool, SavedCheckpoint};
use crate::config::CacheConfig;
use crate::ids::{RequestId, SlotId};
use crate::ledger::unit_list::UnitList;
use crate::memory::state_layout;
use crate::schema::Schema;

/// Evicted blocks that are remembered, to tell why tokens were not reused.
const REMEMBERED: u32 = 1 << 16;

pub(crate) type Tree = PrefixTree<Block, SavedCheckpoint, ScoredLru, BLOCK>;
type FreedUnit = Freed<Block, SavedCheckpoint>;

/// The prompt of a request, and who may share it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prompt<'p> {
    /// Token ids.
    pub tokens: &'p [u32],
    /// Only requests with the same salt share prefixes. Use one salt for each trust domain: response times reveal whether
    /// a prefix was cached.
    pub salt: &'p [u8],
    /// Only requests with the same adapter share prefixes: its name, or whatever else makes other bytes of the same
    /// tokens.
    pub adapter: &'p [u8],
}

/// A request that was admitted with its prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admission {
    /// The request.
    pub id: RequestId,
    /// Tokens that it has already, and that are not to be computed: its first step starts there.
    pub reused: u32,
    /// Tokens of its prompt whose blocks are there. Those from `reused` on are computed again, since no checkpoint is
    /// at or below their end.
    pub matched: u32,
}

impl Offers {
    /// Gives the tree a checkpoint, which is offered then; the checkpoint, if the tree does not take it.
    pub fn attach(
        &mut self,
        tree: &mut Tree,
        (reference, blocks, origin): (&Reference, u32, Origin),
        saved: SavedCheckpoint,
    ) -> Option<SavedCheckpoint> {
        let attached = tree.attach(reference, blocks, origin, saved);
        attached.map(|place| self.add(place)).err().map(|not_taken| not_taken.0)
    }
}

/// What requests share, in a cache with checkpoints.
#[derive(Debug)]
pub(super) struct Sharing {
    pub tree: Tree,
    pub placement: Placement,
    /// What is the same for all requests of this cache: model and formats.
    pub model: Vec<u8>,
    /// Checkpoints for a lower tier to keep, if there is one.
    pub offers: Offers,
    /// By slot.
    pub sharers: Vec<Option<Sharer>>,
    /// Whether answers have checkpoints.
    pub keeps_outputs: bool,
    /// The last checkpoint of the answer of each request that runs, the oldest first: given to the tree when the request
    /// ends, and given up before that when room is needed.
    pub outputs: Vec<(SlotId, SavedCheckpoint)>,
    /// Most tokens that a request has told and that are not the tree's: part of a block, and a step.
    pub most_told: usize,
}

/// A request that shares.
#[derive(Debug)]
pub(crate) struct Sharer {
    /// At the end of what is registered of it.
    pub(super) reference: Reference,
    /// The tokens behind that.
    pub(super) tokens: Vec<u32>,
    /// The part of the prompt that it was admitted with, behind what it reused, and where that begins.
    pub(super) prompt: (u32, Box<[u32]>),
    /// Where it is to be saved.
    pub(super) checkpoints: Checkpoints,
    /// Where its answer is to be saved next.
    pub(super) next_output: u32,
    /// Whether all of its tokens were told.
    pub(super) is_told: bool,
}

/// Where blocks and checkpoints go that a request or the prefix tree gives up.
pub(super) struct Pools<'l> {
    pub blocks: &'l mut BlockPool,
    pub checkpoints: &'l mut CheckpointPool,
    /// Freed blocks that the manager has still to poison.
    pub unowned: &'l mut UnitList,
}

impl Pools<'_> {
    /// Returns a block to the pool, and marks it for poisoning.
    pub fn free_block(&mut self, block: Block) {
        self.unowned.add(block.id().0);
        self.blocks.give_back(block);
    }

    /// Gives up blocks of a request, and frees those that nobody else has, the last of which is taken next.
    pub fn give_up(&mut self, held: impl Iterator<Item = Held>, shares: &mut BlockShares) {
        held.filter_map(|held| shares.give_up(held)).for_each(|block| self.free_block(block));
    }

    /// Frees what the prefix tree gave up.
    pub fn take_back(&mut self, freed: FreedUnit) {
        match freed {
            Freed::Block(block) => self.free_block(block),
            Freed::Checkpoint(checkpoint) => self.checkpoints.give_back(checkpoint),
        }
    }
}

impl Sharing {
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
            room: config.num_blocks,
        };
        let (blocks, checkpoints) = (config.num_blocks.into(), config.num_checkpoints.into());
        let capacity = limits.block_bytes.saturating_mul(blocks);
        let capacity = capacity.saturating_add(limits.checkpoint_bytes.saturating_mul(checkpoints));
        let interval = (config.checkpoint_interval > 0).then_some(config.checkpoint_interval);
        let mut tree = Tree::new(limits, ScoredLru { capacity });
        tree.log_events(config.event_capacity);
        Some(Box::new(Self {
            tree,
            placement: Placement { block_tokens: BLOCK_TOKENS, junctions: true, interval },
            model: config.identity(),
            offers: Offers::default(),
            sharers: (0..config.max_requests).map(|_| None).collect(),
            keeps_outputs: config.keep_outputs,
            outputs: Vec::with_capacity(config.max_requests as usize),
            most_told: BLOCK + config.max_step_tokens as usize,
        }))
    }

    pub fn of(&self, slot: SlotId) -> Option<&Sharer> {
        self.sharers.get(slot.0 as usize)?.as_ref()
    }

    /// The same, to change it.
    pub fn of_mut(&mut self, slot: SlotId) -> Option<&mut Sharer> {
        self.sharers.get_mut(slot.0 as usize)?.as_mut()
    }

    /// Tokens that a request has told, with room for those of a step.
    pub fn told(&self, tokens: &[u32]) -> Vec<u32> {
        let mut told = Vec::with_capacity(self.most_told);
        told.extend_from_slice(tokens);
        told
    }
}

impl Sharer {
    /// The request goes on behind its first `tokens` tokens, and may have others from there on.
    pub fn go_back(&mut self, tokens: u32) {
        let registered = self.reference.blocks() * BLOCK_TOKENS;
        self.tokens.truncate(tokens.saturating_sub(registered) as usize);
        self.next_output = 0;
    }

    /// Where a told token is not the prompt's: its position, and the prompt's token.
    pub fn first_mismatch(&self, committed: u32, told: &[u32]) -> Option<(usize, u32)> {
        let (start, prompt) = &self.prompt;
        let rest = prompt.get(committed.checked_sub(*start)? as usize..)?;
        let at = rest.iter().zip(told).position(|(token, told)| token != told)?;
        Some((at, rest[at]))
    }

    /// Where in the tree a checkpoint of the request belongs; `None` if its blocks are not there.
    pub fn place_of(&self, saved: &SavedCheckpoint) -> Option<(&Reference, u32, Origin)> {
        let boundary = saved.boundary();
        let planned = self.checkpoints.after(boundary - 1).filter(|&(at, _)| at == boundary);
        // Of its prompt, but not planned: somebody asked for it.
        let other = if boundary > self.checkpoints.end() { Origin::Output } else { Origin::Prompt };
        let origin = planned.map_or(other, |(_, origin)| origin);
        let blocks = boundary / BLOCK_TOKENS;
        (blocks <= self.reference.blocks()).then_some((&self.reference, blocks, origin))
    }
}
