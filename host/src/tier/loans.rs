//! References held for images and reservations that are lent to a lower tier. It may drop them at any time, on any
//! thread; the next call on the cache releases them.

use std::sync::{Arc, Weak};

use dsv4_kv_prefix::Reference;

/// Part of a lent image or reservation: the loan ends when it is dropped.
#[derive(Debug)]
pub(super) struct Loan(Arc<()>);

/// What the tier keeps for a loan.
#[derive(Debug)]
struct Kept {
    alive: Weak<()>,
    /// Reference of the host's tree.
    reference: Reference,
    /// Units of the loan that are not in the tree.
    units: usize,
}

/// All loans.
#[derive(Debug, Default)]
pub(super) struct Loans(Vec<Kept>);

impl Loans {
    /// Keeps a reference for as long as the loan lives. `units` is the number of units that are lent and not in the
    /// tree.
    pub fn lend(&mut self, reference: Reference, units: usize) -> Loan {
        let loan = Loan(Arc::default());
        self.0.push(Kept { alive: Arc::downgrade(&loan.0), reference, units });
        loan
    }

    /// Ends a loan and returns its reference; `None` if it belongs to another tier.
    pub fn take(&mut self, loan: &Loan) -> Option<Reference> {
        let is_it = |kept: &Kept| std::ptr::eq(kept.alive.as_ptr(), Arc::as_ptr(&loan.0));
        let at = self.0.iter().position(is_it)?;
        Some(self.0.swap_remove(at).reference)
    }

    /// Removes the loans that were dropped; returns their references.
    pub fn take_dropped(&mut self) -> Vec<Reference> {
        let dropped = self.0.extract_if(.., |kept| kept.alive.strong_count() == 0);
        dropped.map(|kept| kept.reference).collect()
    }

    /// Whether nothing is lent.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Number of units that are lent and not in the tree.
    pub fn units(&self) -> usize {
        let live = self.0.iter().filter(|kept| kept.alive.strong_count() > 0);
        live.map(|kept| kept.units).sum()
    }
}
