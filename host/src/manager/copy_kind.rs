//! The kinds of copies between steps.

/// Source and destination of a copy between steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyKind {
    /// Slots to checkpoints, of all layers.
    Save,
    /// Checkpoints to slots, of all layers.
    Restore,
    /// Checkpoints to slots, of the trunk.
    RestoreTrunk,
    /// Slots to slots.
    Slots,
    /// Blocks to blocks.
    Blocks,
}
