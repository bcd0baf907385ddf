//! The name of a transfer.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::image::Source;
use crate::mistake::{Mistake, made};

/// Which transfer. No two of a process are equal, of whichever receivers they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TransferId {
    number: u64,
    source: Source,
}

impl TransferId {
    /// A transfer from there.
    pub(super) fn new(source: Source) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number =
            if made(Mistake::IdsRepeat) { 0 } else { NEXT.fetch_add(1, Ordering::Relaxed) };
        Self { number, source }
    }

    /// What the source holds for it: what a target names that gives the transfer up
    /// ([`Control::give_up`](super::Control::give_up)).
    #[must_use]
    pub const fn source(self) -> Source {
        self.source
    }
}
