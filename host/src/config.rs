//! `CacheConfig`: every choice that shapes the cache, in one value that can be printed and stored.

use kv_layout::config::ModelConfig;
use kv_layout::geometry::{BLOCK_TOKENS, MAX_CONTEXT};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;
use serde::{Deserialize, Serialize};

use crate::error::KvError;
use crate::schema::{PoolUnit, Schema};
use crate::workspace;

/// The shape of one cache.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CacheConfig {
    /// The model whose attention it serves.
    pub model: ModelConfig,
    /// Format of main rows: the window and the compressed entries.
    pub main_format: MainFormat,
    /// Format of indexer keys.
    pub index_format: IndexFormat,
    /// Draft tokens of a verify step that may be rejected; 0 without speculation.
    pub max_draft: u32,
    /// Requests that can be admitted at once.
    pub max_requests: u32,
    /// Blocks of 128 tokens that all requests share.
    pub num_blocks: u32,
    /// Longest context of one request, in tokens.
    pub max_context: u32,
    /// Most tokens of one step, over all its requests.
    pub max_step_tokens: u32,
    /// Whether memory that nobody owns is filled with NaN, and gathered rows and scored keys that come
    /// from it are reported by `KvCacheManager::check_poison`. For tests and for hunting faults: it
    /// costs a look at every one of them.
    #[serde(default)]
    pub poison: bool,
}

impl CacheConfig {
    /// Most blocks a cache can have: block ids and rows are 32-bit on the device.
    pub const MAX_BLOCKS: u32 = 1 << 25;
    /// Most requests: slot times ring rows is 32-bit on the device.
    pub const MAX_REQUESTS: u32 = 1 << 16;

    /// A configuration for `model` with the formats it was trained for, no speculation, and as many
    /// blocks as `memory` bytes hold beside `max_requests` slots and what steps need.
    ///
    /// # Errors
    /// [`KvError::MemoryTooSmall`] if not even one block fits; [`KvError::Config`].
    pub fn for_memory(model: ModelConfig, memory: u64, max_requests: u32) -> Result<Self, KvError> {
        Self { max_requests, ..Self::smallest(model) }.with_memory(memory)
    }

    /// A configuration for `model` with the formats it was trained for, no speculation, one request
    /// and one block: what the others start from.
    #[must_use]
    pub fn smallest(model: ModelConfig) -> Self {
        let max_context = model.max_context.min(MAX_CONTEXT);
        Self {
            model,
            main_format: MainFormat::default(),
            index_format: IndexFormat::default(),
            max_draft: 0,
            max_requests: 1,
            num_blocks: 1,
            max_context,
            max_step_tokens: 8192,
            poison: false,
        }
    }

    /// The same configuration with as many blocks as `memory` bytes hold beside its slots and what
    /// steps need.
    ///
    /// # Errors
    /// [`KvError::MemoryTooSmall`] if not even one block fits; [`KvError::Config`].
    pub fn with_memory(mut self, memory: u64) -> Result<Self, KvError> {
        self.num_blocks = 1;
        self.num_blocks = self.compute_block_budget(memory)?;
        Ok(self)
    }

    /// Blocks that `memory` bytes hold beside the slots and what steps need, up to
    /// [`Self::MAX_BLOCKS`]; one if no layer stores entries, since then blocks have no bytes and no
    /// request needs any. A driver may round every allocation up: [`crate::Capacity::buffers`].
    ///
    /// # Errors
    /// [`KvError::MemoryTooSmall`] if not even one block fits; [`KvError::Config`].
    pub fn compute_block_budget(&self, memory: u64) -> Result<u32, KvError> {
        self.validate()?;
        let schema = Schema::new(self);
        let (slot_bytes, block_bytes) = (schema.slot_bytes(), schema.block_bytes());
        let working_bytes = workspace::working_bytes(self);
        let slots = slot_bytes.saturating_mul(u64::from(self.max_requests));
        let left = memory.checked_sub(slots.saturating_add(working_bytes));
        match left.map(|left| left.checked_div(block_bytes).unwrap_or(1)) {
            Some(blocks @ 1..) => Ok(blocks.min(u64::from(Self::MAX_BLOCKS)) as u32),
            _ => Err(KvError::MemoryTooSmall {
                memory,
                slots: self.max_requests,
                slot_bytes,
                blocks: 1,
                block_bytes,
                working_bytes,
            }),
        }
    }

    /// How many there are of what a pool has one of.
    #[must_use]
    pub const fn units(&self, unit: PoolUnit) -> u32 {
        match unit {
            PoolUnit::Slot => self.max_requests,
            PoolUnit::Block => self.num_blocks,
        }
    }

    /// Checks every setting.
    ///
    /// # Errors
    /// [`KvError::Config`] names the first setting out of range, its value and the range.
    pub fn validate(&self) -> Result<(), KvError> {
        let range = |setting, value: u32, least: u32, most: u32| {
            if (least..=most).contains(&value) {
                Ok(())
            } else {
                let [value, least, most] = [value, least, most].map(u64::from);
                Err(KvError::Config { setting, value, least, most })
            }
        };
        range("model.layers", self.model.layers.len() as u32, 1, 4096)?;
        range("max_draft", self.max_draft, 0, 127)?;
        range("max_requests", self.max_requests, 1, Self::MAX_REQUESTS)?;
        range("num_blocks", self.num_blocks, 1, Self::MAX_BLOCKS)?;
        range("max_context", self.max_context, 1, self.model.max_context.min(MAX_CONTEXT))?;
        range("max_step_tokens", self.max_step_tokens, 1, 1 << 20)
    }

    /// Tokens a request may write in one step and still have part of them rejected: the drafts and
    /// the token they follow.
    #[must_use]
    pub const fn step_tokens_with_rollback(&self) -> u32 {
        self.max_draft + 1
    }

    /// Blocks of the longest request.
    #[must_use]
    pub const fn max_blocks_per_request(&self) -> u32 {
        self.max_context.div_ceil(BLOCK_TOKENS)
    }
}
