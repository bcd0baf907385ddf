//! Counters and events of the host tier.

use serde::Serialize;

/// Counters of the host tier since its cache was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TierStats {
    /// Blocks that were copied to host memory and entered there.
    pub stored_blocks: u64,
    /// Checkpoints that were copied and entered.
    pub stored_checkpoints: u64,
    /// Bytes that were copied.
    pub bytes_to_host: u64,
    /// Blocks that were copied back to the device and entered there.
    pub restored_blocks: u64,
    /// Checkpoints that were copied and entered.
    pub restored_checkpoints: u64,
    /// Bytes that were copied.
    pub bytes_from_host: u64,
    /// Tokens that became reusable on the device because a checkpoint came back. Tokens that were reusable there
    /// before are not counted.
    pub restored_tokens: u64,
    /// Blocks that were evicted from host memory.
    pub evicted_blocks: u64,
    /// Checkpoints that were evicted from host memory.
    pub evicted_checkpoints: u64,
    /// Offered checkpoints that were dropped because a lower tier had 1,024 newer offers to take.
    pub lost_offers: u64,
    /// Number of misses of each kind, by [`TierMiss::index`].
    pub misses: [u64; TierMiss::ALL.len()],
}

/// Why a prefix was not transferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TierMiss {
    /// Host memory has no checkpoint of the prompt that is deeper than those of the device.
    NotThere,
    /// The device has no free room, and too little that can be evicted.
    NoRoomOnDevice,
    /// Host memory has no free room, and too little that can be evicted.
    NoRoomOnHost,
    /// All requests for it were cancelled.
    Cancelled,
    /// The device failed.
    Device,
}

impl TierMiss {
    /// All reasons, in the order of [`Self::index`].
    pub const ALL: [Self; 5] =
        [Self::NotThere, Self::NoRoomOnDevice, Self::NoRoomOnHost, Self::Cancelled, Self::Device];

    /// Its place in [`Self::ALL`].
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }
}

/// An event of the host tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "type")]
pub enum TierEvent {
    /// Blocks, and a checkpoint of `tokens` tokens, have arrived in host memory.
    Stored {
        /// Tokens down to the checkpoint.
        tokens: u32,
        /// Blocks that were entered.
        blocks: u32,
        /// Bytes that were copied.
        bytes: u64,
    },
    /// Blocks, and a checkpoint of `tokens` tokens, have arrived on the device.
    Restored {
        /// Tokens down to the checkpoint.
        tokens: u32,
        /// Blocks that were entered.
        blocks: u32,
        /// Bytes that were copied.
        bytes: u64,
    },
    /// A prefix was not transferred.
    Missed {
        /// Why.
        miss: TierMiss,
    },
}
