//! Capacity planning: which requests fit in a cache at once, and in how many bytes.
//!
//! A request takes one slot and the blocks of its tokens, and nothing else can run out. So a set of
//! requests fits if its slots and blocks fit, independent of the order of admission and of the
//! chunks. Tokens are all that are written: drafts after the last accepted token of a request count
//! too.
//!
//! With shared prefixes a set may need more: requests that compute the same prompt at the same time keep their own blocks, and
//! hold those that the first of them gave to the prefix tree. Release such a request and admit it again: it then shares the
//! tree's blocks.

use kv_layout::config::ModelConfig;
use kv_layout::geometry::{BLOCK_TOKENS, CSA_RATIO, LayerKind};
use serde::Serialize;

use crate::block;
use crate::config::{CacheConfig, check_setting};
use crate::error::{KvError, MemoryTooSmall};
use crate::memory::{cache_memory, state_layout, state_memory, step_memory};
use crate::pool_kind::{PoolKind, PoolUnit};
use crate::schema::{Pool, Schema};
use crate::tier::layout::{self, TierLayout};

/// The units that a cache has room for, and its exact bytes on the device.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Capacity {
    /// Request slots.
    pub slots: u32,
    /// Blocks.
    pub blocks: u32,
    /// Checkpoints.
    pub checkpoints: u32,
    /// Slots of suspended requests, beside those of requests that run.
    pub suspended: u32,
    /// Longest context the cache is configured for, in tokens.
    pub max_context: u32,
    /// Bytes of a checkpoint over all layers.
    pub checkpoint_bytes: u64,
    /// Bytes of a slot over all layers. Every request takes them, however short it is.
    pub slot_bytes: u64,
    /// Bytes of a block over all layers; 0 if no layer stores entries.
    pub block_bytes: u64,
    /// `block_bytes` over 128: the bytes of one more token of context. May be a fraction; it is exact.
    pub bytes_per_token: f64,
    /// Bytes of a slot and of a block, by kind of layer; only kinds that the model has.
    pub layers: Vec<LayerBytes>,
    /// Sizes of the pools, by kind; only kinds that the model has.
    pub pools: Vec<PoolBytes>,
    /// Bytes of everything but pools and checkpoints: block table, work lists, StepMeta, tables for copies of state,
    /// alignment of the pools.
    pub working_bytes: u64,
    /// The part of `working_bytes` that is staging memory for transfers to and from host memory; 0 without a host tier.
    pub staging_bytes: u64,
    /// Bytes of pinned host memory for evicted prefixes.
    pub host_bytes: u64,
    /// Allocations that the cache makes on a GPU, one of them for all pools, one for all checkpoints. A driver may round
    /// each up: CUDA to 2 MiB.
    pub buffers: u32,
}

/// Bytes of all layers of one kind.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerBytes {
    /// The kind.
    pub kind: LayerKind,
    /// Number of layers of this kind.
    pub layers: u32,
    /// Bytes of a slot in these layers.
    pub slot_bytes: u64,
    /// Bytes of a block in these layers.
    pub block_bytes: u64,
    /// `block_bytes` over 128.
    pub bytes_per_token: f64,
}

/// Bytes of all pools of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PoolBytes {
    /// The kind.
    pub kind: PoolKind,
    /// Unit of the pools: slot or block.
    pub unit: PoolUnit,
    /// Bytes of one slot or block, over all layers.
    pub unit_bytes: u64,
    /// Bytes of all slots or blocks, over all layers.
    pub bytes: u64,
}

/// Bytes of device memory that a cache takes besides its pools.
fn working_bytes(config: &CacheConfig, schema: &Schema) -> u64 {
    cache_memory::bytes(config, schema)
        + step_memory::bytes(config)
        + layout::device_bytes(config, schema)
}

/// Configurations that fit in a given amount of memory.
impl CacheConfig {
    /// A configuration for `model` with the formats it was trained for, neither drafts nor checkpoints, and as many
    /// blocks as fit in `memory` bytes besides `max_requests` slots and the memory of steps. For prefix reuse set
    /// `num_checkpoints`, and call [`Self::with_memory`].
    ///
    /// # Errors
    /// [`KvError::MemoryTooSmall`] if not even one block fits; [`KvError::Model`], [`KvError::Config`],
    /// [`KvError::DraftLayerKind`].
    pub fn for_memory(model: ModelConfig, memory: u64, max_requests: u32) -> Result<Self, KvError> {
        Self { max_requests, ..Self::new(model) }.with_memory(memory)
    }

    /// The same configuration with as many blocks as fit in `memory` bytes besides its slots and the memory of
    /// steps. Not counted: an indexer's workspace ([`crate::WorkspaceSize`]), staging memory for requests that move
    /// ([`crate::transfer::transfer_staging_bytes`]), and the bytes by which the driver rounds up an allocation, up to
    /// 2 MiB for each of [`Capacity::buffers`].
    ///
    /// ```
    /// use dsv4_kv::kv_layout::config::ModelConfig;
    /// use dsv4_kv::{CacheConfig, Capacity};
    ///
    /// let flash = ModelConfig::preset("flash").expect("a preset");
    /// let longest = CacheConfig { max_context: 1 << 20, ..CacheConfig::new(flash) };
    /// let config = CacheConfig { max_requests: 32, ..longest }.with_memory(40 << 30)?;
    /// let capacity = Capacity::new(&config);
    /// assert!(capacity.bytes() <= 40 << 30);
    ///
    /// // 32 prompts of 8,192 tokens and their outputs fit at once, as many of 1,000,000 tokens do not.
    /// assert!(capacity.fits(&[(10_000, 32)]));
    /// assert!(!capacity.fits(&[(1_000_000, 32)]));
    /// println!("{} requests of 100,000 tokens", capacity.requests_of(100_000));
    /// # Ok::<(), dsv4_kv::KvError>(())
    /// ```
    ///
    /// # Errors
    /// [`KvError::MemoryTooSmall`] if not even one block fits; [`KvError::Model`], [`KvError::Config`],
    /// [`KvError::DraftLayerKind`].
    pub fn with_memory(mut self, memory: u64) -> Result<Self, KvError> {
        self.num_blocks = 1;
        self.num_blocks = self.compute_block_budget(memory)?;
        Ok(self)
    }

    /// Number of blocks that fit in `memory` bytes besides the slots and the memory of steps, up to
    /// [`Self::MAX_BLOCKS`]; one if no layer stores entries, since then blocks have no bytes and no
    /// request needs any. A driver may round every allocation up: [`crate::Capacity::buffers`].
    ///
    /// # Errors
    /// [`KvError::MemoryTooSmall`] if not even one block fits; [`KvError::Model`], [`KvError::Config`],
    /// [`KvError::DraftLayerKind`].
    pub fn compute_block_budget(&self, memory: u64) -> Result<u32, KvError> {
        self.validate()?;
        let schema = Schema::new(self);
        let (slot_bytes, block_bytes) = (schema.slot_bytes(), schema.block_bytes());
        TierLayout::new(self, &schema)?;
        let working_bytes = working_bytes(self, &schema);
        let slots = self.units(PoolUnit::Slot);
        let checkpoint_bytes = state_memory::checkpoint_bytes(self, &schema);
        let taken = slot_bytes.saturating_mul(u64::from(slots)).saturating_add(checkpoint_bytes);
        let left = memory.checked_sub(taken.saturating_add(working_bytes));
        match left.map(|left| left.checked_div(block_bytes).unwrap_or(1)) {
            Some(blocks @ 1..) => Ok(blocks.min(u64::from(Self::MAX_BLOCKS)) as u32),
            _ => Err(KvError::MemoryTooSmall(Box::new(MemoryTooSmall {
                memory,
                slots,
                slot_bytes,
                blocks: 1,
                block_bytes,
                checkpoint_bytes,
                working_bytes,
            }))),
        }
    }
}

impl Capacity {
    /// The capacity of a cache of this configuration, which [`CacheConfig::validate`] accepts.
    ///
    /// # Panics
    /// For a configuration that it does not accept: numbers may overflow.
    #[must_use]
    pub fn new(config: &CacheConfig) -> Self {
        let schema = Schema::new(config);
        let block_bytes = schema.block_bytes();
        Self {
            slots: config.max_requests,
            blocks: config.num_blocks,
            checkpoints: config.num_checkpoints,
            suspended: config.max_suspended,
            max_context: config.max_context,
            checkpoint_bytes: state_layout::checkpoint_bytes(&schema),
            slot_bytes: schema.slot_bytes(),
            block_bytes,
            bytes_per_token: bytes_per_token(block_bytes),
            layers: layer_bytes(&schema),
            pools: pool_bytes(&schema, config),
            working_bytes: working_bytes(config, &schema),
            staging_bytes: layout::device_bytes(config, &schema),
            host_bytes: layout::host_bytes(config, &schema),
            buffers: cache_memory::allocations(config)
                + step_memory::buffers(config)
                + layout::buffers(config, &schema),
        }
    }

    /// Bytes of all pools.
    #[must_use]
    pub fn pool_bytes(&self) -> u64 {
        let slots = u64::from(self.slots) + u64::from(self.suspended);
        slots * self.slot_bytes + u64::from(self.blocks) * self.block_bytes
    }

    /// Bytes of all checkpoints.
    #[must_use]
    pub fn all_checkpoint_bytes(&self) -> u64 {
        u64::from(self.checkpoints).saturating_mul(self.checkpoint_bytes)
    }

    /// Bytes of everything the cache allocates on the device.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let pools = self.pool_bytes().saturating_add(self.all_checkpoint_bytes());
        pools.saturating_add(self.working_bytes)
    }

    /// Blocks of a request of `tokens` tokens.
    #[must_use]
    pub fn blocks_of(&self, tokens: u32) -> u32 {
        if self.block_bytes > 0 { block::blocks_of(tokens) } else { 0 }
    }

    /// Bytes of the slot and the blocks of a request of `tokens` tokens.
    #[must_use]
    pub fn request_bytes(&self, tokens: u32) -> u64 {
        self.slot_bytes + u64::from(self.blocks_of(tokens)) * self.block_bytes
    }

    /// Number of requests of exactly `tokens` tokens that fit at once.
    #[must_use]
    pub fn requests_of(&self, tokens: u32) -> u32 {
        if tokens > self.max_context {
            return 0;
        }
        let by_blocks = self.blocks.checked_div(self.blocks_of(tokens));
        by_blocks.map_or(self.slots, |requests| requests.min(self.slots))
    }

    /// Tokens of the longest request that fits in an otherwise empty cache.
    #[must_use]
    pub fn longest_request(&self) -> u32 {
        if self.block_bytes == 0 {
            return self.max_context;
        }
        // A request needs its next block only when the first entry in it closes.
        let tokens = u64::from(self.blocks) * u64::from(BLOCK_TOKENS) + u64::from(CSA_RATIO - 1);
        tokens.min(u64::from(self.max_context)) as u32
    }

    /// Whether all requests of a mix fit at once. The pairs are a number of tokens, and the number
    /// of requests that have it.
    #[must_use]
    pub fn fits(&self, mix: &[(u32, u32)]) -> bool {
        let (mut slots, mut blocks) = (0u64, 0u64);
        for &(tokens, count) in mix.iter().filter(|&&(_, count)| count > 0) {
            if tokens > self.max_context {
                return false;
            }
            let count = u64::from(count);
            slots += count;
            blocks = blocks.saturating_add(count * u64::from(self.blocks_of(tokens)));
        }
        slots <= u64::from(self.slots) && blocks <= u64::from(self.blocks)
    }
}

/// `config` with the slots and blocks that let the most requests of `tokens` tokens fit into
/// `memory` bytes at once: one slot for each, and as many blocks as fit in the rest of the memory.
/// Its `max_requests` and `num_blocks` do not matter.
///
/// # Errors
/// [`KvError::MemoryTooSmall`] if not even one request fits; [`KvError::Config`] for a setting out
/// of range, `tokens` included.
pub fn most_requests(
    config: CacheConfig,
    memory: u64,
    tokens: u32,
) -> Result<CacheConfig, KvError> {
    let config = CacheConfig { max_requests: 1, num_blocks: 1, ..config };
    config.validate()?;
    check_setting("tokens", tokens, 1, config.max_context)?;
    let one = Capacity::new(&config);
    let blocks = one.blocks_of(tokens);
    // More slots than requests take memory from blocks, so the best cache has one slot for each. It
    // has at least one block, even if none of these requests needs it.
    let sized = |requests: u32| CacheConfig {
        max_requests: requests,
        num_blocks: (requests * blocks).max(1),
        ..config.clone()
    };
    let by_blocks = CacheConfig::MAX_BLOCKS.checked_div(blocks).unwrap_or(u32::MAX);
    // The bytes grow with the number of requests, so a binary search finds the first number that does not fit.
    let (mut most, mut too_many) = (0, by_blocks.min(CacheConfig::MAX_REQUESTS) + 1);
    while most + 1 < too_many {
        let requests = u32::midpoint(most, too_many);
        match Capacity::new(&sized(requests)).bytes() <= memory {
            true => most = requests,
            false => too_many = requests,
        }
    }
    match most {
        0 => Err(KvError::MemoryTooSmall(Box::new(MemoryTooSmall {
            memory,
            slots: 1 + one.suspended,
            slot_bytes: one.slot_bytes,
            blocks: blocks.max(1),
            block_bytes: one.block_bytes,
            checkpoint_bytes: one.all_checkpoint_bytes(),
            working_bytes: one.working_bytes,
        }))),
        max_requests => CacheConfig { max_requests, ..config }.with_memory(memory),
    }
}

/// A division by a power of two: exact.
fn bytes_per_token(block_bytes: u64) -> f64 {
    block_bytes as f64 / f64::from(BLOCK_TOKENS)
}

fn layer_bytes(schema: &Schema) -> Vec<LayerBytes> {
    let of_kind = |kind| {
        let layers = || schema.layers.iter().filter(move |layer| layer.kind == kind);
        let sum = |unit| layers().map(|layer| layer.unit_bytes(unit)).sum();
        let block_bytes = sum(PoolUnit::Block);
        LayerBytes {
            kind,
            layers: layers().count() as u32,
            slot_bytes: sum(PoolUnit::Slot),
            block_bytes,
            bytes_per_token: bytes_per_token(block_bytes),
        }
    };
    let kinds = [LayerKind::Swa, LayerKind::Csa, LayerKind::Hca].map(of_kind);
    kinds.into_iter().filter(|kind| kind.layers > 0).collect()
}

fn pool_bytes(schema: &Schema, config: &CacheConfig) -> Vec<PoolBytes> {
    let mut pools: Vec<PoolBytes> = Vec::new();
    for pool in schema.layers.iter().flat_map(|layer| &layer.pools) {
        let &Pool { kind, unit, .. } = pool;
        let (unit_bytes, units) = (pool.unit_bytes(), u64::from(config.units(unit)));
        match pools.iter_mut().find(|found| found.kind == kind) {
            Some(found) => {
                found.unit_bytes += unit_bytes;
                found.bytes += units * unit_bytes;
            }
            None => pools.push(PoolBytes { kind, unit, unit_bytes, bytes: units * unit_bytes }),
        }
    }
    pools
}
