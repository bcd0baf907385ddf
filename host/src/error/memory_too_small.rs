//! The refusal of a cache that does not fit into the memory given.

/// Memory that does not hold the slots, blocks and buffers that a cache needs at least.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{memory} bytes of memory are too few: the cache needs {}, for {slots} slots of {slot_bytes} bytes, {blocks} \
     blocks of {block_bytes}, {checkpoint_bytes} bytes of checkpoints, and {working_bytes} bytes that steps need; \
     give more memory, or ask for fewer slots or checkpoints or a shorter context",
    self.needed()
)]
pub struct MemoryTooSmall {
    /// Bytes given.
    pub memory: u64,
    /// Request slots wanted.
    pub slots: u32,
    /// Bytes of one slot over all layers.
    pub slot_bytes: u64,
    /// Blocks needed at least.
    pub blocks: u32,
    /// Bytes of one block over all layers.
    pub block_bytes: u64,
    /// Bytes of all checkpoints.
    pub checkpoint_bytes: u64,
    /// Bytes of the block table, the work lists and the metadata of a step.
    pub working_bytes: u64,
}

impl MemoryTooSmall {
    /// Bytes that the cache needs.
    #[must_use]
    pub fn needed(&self) -> u64 {
        let of = |count: u32, bytes: u64| u64::from(count).saturating_mul(bytes);
        [of(self.blocks, self.block_bytes), self.checkpoint_bytes, self.working_bytes]
            .into_iter()
            .fold(of(self.slots, self.slot_bytes), u64::saturating_add)
    }
}
