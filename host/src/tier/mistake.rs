//! Mistakes that tests make on purpose, to see that they are found. Only with the feature `mistakes`; without it nothing of
//! them is left.

/// A mistake in what moves between the device and host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// None.
    Nothing,
    /// The room of a prefetch that was cancelled is free before its copies are done.
    FreedInFlight,
    /// What arrives is entered before its copies are done.
    EnteredEarly,
    /// The room of a prefetch that was cancelled never comes back.
    CancelLeaks,
    /// A prefetch that was cancelled is entered all the same.
    CancelIgnored,
    /// A prompt that waits for its turn arrives, though nobody wants it any more.
    CancelForgotten,
    /// A prefetch that finds no room on the device keeps what is above it.
    RefusalKeeps,
    /// Host memory may evict what arrives from there.
    SourceNotHeld,
    /// Units that host memory evicts never come back.
    EvictedUnitsLost,
    /// The checkpoint that came back lies a block too high.
    CheckpointTooHigh,
    /// The device may evict what leaves.
    ReadNotHeld,
    /// What arrives does not wait for the poisoning of its room.
    ArrivesUnordered,
    /// The room of what arrives is poisoned by the next step.
    PoisonedAfter,
    /// Blocks come back in the wrong order.
    BlocksSwapped,
    /// Blocks are packed into memory from which others are still copied.
    PackedTooEarly,
    /// Blocks are copied to the host before they are packed.
    CopiedTooEarly,
    /// Blocks are copied from the host to memory from which others are still unpacked.
    OverwrittenTooEarly,
    /// Blocks are unpacked before they are copied from the host.
    UnpackedTooEarly,
    /// A transfer to the device ends before the last blocks are unpacked.
    EndedTooEarly,
}

dsv4_kv_prefix::mistake_switch!(Mistake);
