//! Sizes of the host tier, and the device memory that it takes.

use crate::config::{CacheConfig, check_setting};
use crate::error::KvError;
use crate::memory::state_layout;
use crate::ops::JOB;
use crate::pool_kind::PoolUnit;
use crate::schema::Schema;

/// Most bytes of blocks that one launch packs. A copy of this size takes much longer than starting one.
const ROUND: u64 = 16 << 20;
/// Staging buffers, each for one round: two per direction, so that one is packed while the other is copied.
const ROUNDS: usize = 4;

/// The sizes of a host tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TierLayout {
    /// Bytes of a unit of host memory, which holds the image of a block, or a part of a checkpoint.
    pub unit_bytes: u64,
    /// Bytes of a checkpoint.
    pub checkpoint_bytes: u64,
    /// Units of a checkpoint.
    pub checkpoint_units: u32,
    /// Number of units of host memory.
    pub units: u32,
    /// Blocks that one launch packs: at most a quarter of the longest request, so that its transfer uses each half more
    /// than once.
    pub round_blocks: u32,
    /// Blocks of the longest request.
    pub most_blocks: u32,
}

impl TierLayout {
    /// The layout of a cache's host tier; `None` without one.
    ///
    /// # Errors
    /// [`KvError::Config`] for a host tier that is too small for one block and one checkpoint, that has more than
    /// `u32::MAX` units, or whose cache has no checkpoints.
    pub fn new(config: &CacheConfig, schema: &Schema) -> Result<Option<Self>, KvError> {
        if config.host_bytes == 0 {
            return Ok(None);
        }
        let most = CacheConfig::MAX_CHECKPOINTS;
        check_setting("num_checkpoints", config.num_checkpoints, 1, most)?;
        let layout = Self::unchecked(config, schema);
        let (setting, value) = ("host_bytes", config.host_bytes);
        let unit = layout.unit_bytes;
        let least = unit * (1 + u64::from(layout.checkpoint_units));
        let most = if unit == 0 { 0 } else { unit.saturating_mul(u32::MAX.into()) };
        if unit == 0 || !(least..=most).contains(&value) {
            return Err(KvError::Config { setting, value, least, most });
        }
        Ok(Some(layout))
    }

    fn unchecked(config: &CacheConfig, schema: &Schema) -> Self {
        let unit_bytes = state_layout::unit_image_bytes(schema, PoolUnit::Block);
        let checkpoint_bytes = state_layout::checkpoint_bytes(schema);
        let most_blocks = config.max_blocks_per_request();
        let units = |bytes: u64| bytes.checked_div(unit_bytes).unwrap_or(0);
        Self {
            unit_bytes,
            checkpoint_bytes,
            checkpoint_units: checkpoint_bytes.div_ceil(unit_bytes.max(1)) as u32,
            units: units(config.host_bytes).min(u32::MAX.into()) as u32,
            round_blocks: units(ROUND).clamp(1, most_blocks.div_ceil(4).into()) as u32,
            most_blocks,
        }
    }

    /// Elements of the jobs of the longest transfer.
    pub fn jobs(self) -> u64 {
        u64::from(self.most_blocks) * JOB as u64
    }

    /// Bytes of the blocks that are packed by one launch.
    pub fn round_bytes(self) -> u64 {
        u64::from(self.round_blocks) * self.unit_bytes
    }

    /// Bytes of each buffer on the device.
    fn device_bytes(self) -> impl Iterator<Item = u64> {
        let jobs = self.jobs() * size_of::<i32>() as u64;
        [self.round_bytes(); ROUNDS].into_iter().chain([jobs; 2])
    }
}

/// The layout for a configuration that may be invalid; `None` if it is, or has no host tier.
fn planned(config: &CacheConfig, schema: &Schema) -> Option<TierLayout> {
    TierLayout::new(config, schema).ok().flatten()
}

/// Bytes that the host tier takes on the device.
pub(crate) fn device_bytes(config: &CacheConfig, schema: &Schema) -> u64 {
    planned(config, schema).map_or(0, |layout| layout.device_bytes().sum())
}

/// Allocations on the device.
pub(crate) fn buffers(config: &CacheConfig, schema: &Schema) -> u32 {
    planned(config, schema).map_or(0, |layout| layout.device_bytes().count() as u32)
}

/// Bytes of pinned host memory that hold blocks and checkpoints.
pub(crate) fn host_bytes(config: &CacheConfig, schema: &Schema) -> u64 {
    planned(config, schema).map_or(0, |layout| u64::from(layout.units) * layout.unit_bytes)
}
