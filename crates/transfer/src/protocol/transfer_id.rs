//! The id of a transfer.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::image::Source;
use crate::mistake::{Mistake, made};

/// Identifies a transfer. Unique in the process, also across receivers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TransferId {
    number: u64,
    source: Source,
}

impl TransferId {
    /// A new transfer from `source`.
    pub(super) fn new(source: Source) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number =
            if made(Mistake::IdsRepeat) { 0 } else { NEXT.fetch_add(1, Ordering::Relaxed) };
        Self { number, source }
    }

    /// The lease at the source. A target that gives the transfer up names it in
    /// [`Control::give_up`](super::Control::give_up).
    #[must_use]
    pub const fn source(self) -> Source {
        self.source
    }
}
