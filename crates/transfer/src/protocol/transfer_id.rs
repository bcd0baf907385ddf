//! The name of a transfer.

/// Which transfer: a number that is unique to its receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TransferId(pub(super) u64);
