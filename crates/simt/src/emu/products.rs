//! The products of warpgroups that a thread has started.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;

use super::fault::Site;
use super::in_flight::InFlight;

/// The products that a thread has started.
#[derive(Debug, Default)]
pub struct Products {
    started: u32,
    /// A hash of the places where it started products and waited for them, and of the operands, in order.
    places: u64,
    /// The products that it has not waited for, the oldest first.
    in_flight: VecDeque<InFlight>,
}

impl Products {
    /// Starts a product of these operands in shared memory; returns its number.
    pub fn start(&mut self, product: InFlight, operands: impl Hash) -> u32 {
        self.pass((product.location, operands));
        self.in_flight.push_back(product);
        self.started += 1;
        self.started - 1
    }

    /// Adds to the hash: the place and operands of a start, or the place of a wait and its number of pending products.
    fn pass(&mut self, place: impl Hash) {
        let mut hasher = DefaultHasher::new();
        (self.places, place).hash(&mut hasher);
        self.places = hasher.finish();
    }

    /// Whether another thread started the same products and waited for them, in the same places and in the
    /// same order.
    pub fn is_same(&self, other: &Self) -> bool {
        self.places == other.places
    }

    /// Number of products that were started.
    pub fn started(&self) -> u32 {
        self.started
    }

    /// Waits for all products but the last `pending`; returns the numbers of those that were in flight until now.
    pub fn wait_for_all_but(&mut self, pending: usize, location: Site) -> Range<u32> {
        self.pass((location, pending));
        let oldest = self.started - self.in_flight.len() as u32;
        let done = self.in_flight.len().saturating_sub(pending);
        self.in_flight.drain(..done);
        oldest..oldest + done as u32
    }

    /// The oldest product that was not waited for.
    pub fn oldest(&self) -> Option<InFlight> {
        self.in_flight.front().copied()
    }
}
