//! Deliberate mistakes, which tests make to prove that such bugs are found. They exist only with the feature
//! `mistakes`; without it they compile to nothing.

/// A mistake in transfers between the device and host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// None.
    Nothing,
    /// The blocks of a cancelled prefetch are freed before its copies are done.
    FreedInFlight,
    /// A prefetch is entered before its copies are done.
    EnteredEarly,
    /// The blocks of a cancelled prefetch are never freed.
    CancelLeaks,
    /// A prefetch that was cancelled is entered all the same.
    CancelIgnored,
    /// A prompt is loaded although it was cancelled while it waited for its turn.
    CancelForgotten,
    /// A prefetch that finds no room on the device keeps its reference to the blocks above.
    RefusalKeeps,
    /// Host memory may evict a prefix while it is copied to the device.
    SourceNotHeld,
    /// Units that host memory evicts are never freed.
    EvictedUnitsLost,
    /// A checkpoint that came back is attached one block too high.
    CheckpointTooHigh,
    /// The device may evict a prefix while it is copied to host memory.
    ReadNotHeld,
    /// A prefetch does not wait for the poisoning of its blocks.
    ArrivesUnordered,
    /// The blocks of a prefetch are poisoned by the next step, after they were written.
    PoisonedAfter,
    /// Blocks are loaded in the wrong order.
    BlocksSwapped,
    /// Blocks are packed into staging memory from which other blocks are still copied.
    PackedTooEarly,
    /// Blocks are copied to the host before they are packed.
    CopiedTooEarly,
    /// Blocks are copied from the host to staging memory from which other blocks are still unpacked.
    OverwrittenTooEarly,
    /// Blocks are unpacked before they are copied from the host.
    UnpackedTooEarly,
    /// A transfer to the device ends before the last blocks are unpacked.
    EndedTooEarly,
}

dsv4_kv_prefix::mistake_switch!(Mistake);
