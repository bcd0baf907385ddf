//! Counters and events of the host tier.

use serde::Serialize;

/// What the host tier has done since its cache was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TierStats {
    /// Blocks that were copied to host memory, and that it did not have by then.
    pub stored_blocks: u64,
    /// Checkpoints that were.
    pub stored_checkpoints: u64,
    /// Bytes that were copied.
    pub bytes_to_host: u64,
    /// Blocks that were brought back, and that the device did not have by then.
    pub restored_blocks: u64,
    /// Checkpoints that were.
    pub restored_checkpoints: u64,
    /// Bytes that were copied.
    pub bytes_from_host: u64,
    /// Tokens that prompts can go on from because their checkpoint came back: those that the device had too, above it,
    /// are not counted.
    pub restored_tokens: u64,
    /// Blocks that host memory had no room for any more.
    pub evicted_blocks: u64,
    /// Checkpoints that it had no room for any more.
    pub evicted_checkpoints: u64,
    /// Checkpoints that a tier below did not look at before a thousand others had come.
    pub lost_offers: u64,
    /// Why nothing was moved, by [`TierMiss::index`].
    pub misses: [u64; TierMiss::ALL.len()],
}

/// Why something was not moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TierMiss {
    /// Host memory has no checkpoint of the prompt behind those of the device.
    NotThere,
    /// The device has no room that nobody uses.
    NoRoomOnDevice,
    /// Host memory has no room that nobody uses.
    NoRoomOnHost,
    /// Whoever asked for it does not want it any more.
    Cancelled,
    /// The device failed.
    Device,
}

impl TierMiss {
    /// All of them, in the order of [`Self::index`].
    pub const ALL: [Self; 5] =
        [Self::NotThere, Self::NoRoomOnDevice, Self::NoRoomOnHost, Self::Cancelled, Self::Device];

    /// Its place in [`Self::ALL`].
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }
}

/// Something that the host tier did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "type")]
pub enum TierEvent {
    /// Blocks, and a checkpoint of `tokens` tokens, have arrived in host memory.
    Stored {
        /// Tokens down to the checkpoint.
        tokens: u32,
        /// Blocks that were not there.
        blocks: u32,
        /// Bytes that were copied.
        bytes: u64,
    },
    /// They have arrived on the device.
    Restored {
        /// Tokens down to the checkpoint.
        tokens: u32,
        /// Blocks that were not there.
        blocks: u32,
        /// Bytes that were copied.
        bytes: u64,
    },
    /// Something was not moved.
    Missed {
        /// Why.
        miss: TierMiss,
    },
}
