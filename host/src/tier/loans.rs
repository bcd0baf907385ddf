//! References held for images and rooms that are lent to a lower tier. It may drop them at any time, on any thread; the
//! next call on the cache releases them.

use std::sync::{Arc, Weak};

use dsv4_kv_prefix::Reference;

/// Held by whoever has an image, or room.
#[derive(Debug)]
pub(super) struct Loan(Arc<()>);

/// What is kept for it.
#[derive(Debug)]
struct Kept {
    alive: Weak<()>,
    /// In the host's tree.
    reference: Reference,
    /// Units that the tree does not have.
    units: usize,
}

/// All that is lent.
#[derive(Debug, Default)]
pub(super) struct Loans(Vec<Kept>);

impl Loans {
    /// Keeps a reference for as long as the loan lives. Whoever gets it has so many units that the tree does not have.
    pub fn lend(&mut self, reference: Reference, units: usize) -> Loan {
        let loan = Loan(Arc::default());
        self.0.push(Kept { alive: Arc::downgrade(&loan.0), reference, units });
        loan
    }

    /// Ends a loan; `None` if it is another tier's.
    pub fn take(&mut self, loan: &Loan) -> Option<Reference> {
        let is_it = |kept: &Kept| std::ptr::eq(kept.alive.as_ptr(), Arc::as_ptr(&loan.0));
        let at = self.0.iter().position(is_it)?;
        Some(self.0.swap_remove(at).reference)
    }

    /// The references of those that were dropped.
    pub fn take_dropped(&mut self) -> Vec<Reference> {
        let dropped = self.0.extract_if(.., |kept| kept.alive.strong_count() == 0);
        dropped.map(|kept| kept.reference).collect()
    }

    /// Units that are lent and that the tree does not have.
    pub fn units(&self) -> usize {
        let live = self.0.iter().filter(|kept| kept.alive.strong_count() > 0);
        live.map(|kept| kept.units).sum()
    }
}
