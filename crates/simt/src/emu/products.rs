//! The products of warpgroups that a thread has started.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::fault::Site;
use super::shared_memory::InFlight;

/// What a thread reads of the operands of a product.
#[derive(Clone, Debug)]
pub struct Product {
    /// Byte offsets of the words in the block's shared memory.
    pub words: Vec<u32>,
    /// Who started the product, where and when.
    pub in_flight: InFlight,
}

/// The products that a thread has started.
#[derive(Debug, Default)]
pub struct Products {
    started: u32,
    /// A hash of where it started products and waited for them, in this order.
    places: u64,
    /// Those that it has not waited for, the oldest first.
    in_flight: VecDeque<Product>,
}

impl Products {
    /// Starts a product; its number.
    pub fn start(&mut self, in_flight: InFlight) -> u32 {
        self.pass(in_flight.location);
        self.in_flight.push_back(Product { words: Vec::new(), in_flight });
        self.started += 1;
        self.started - 1
    }

    /// Notes that the product which was started last reads a word; which it is.
    pub fn read(&mut self, word: u32) -> InFlight {
        let product = self.in_flight.back_mut().expect("one was started");
        product.words.push(word);
        product.in_flight
    }

    /// Starts a product at a place, or waits there for all but so many.
    fn pass(&mut self, place: impl Hash) {
        let mut hasher = DefaultHasher::new();
        (self.places, place).hash(&mut hasher);
        self.places = hasher.finish();
    }

    /// Whether another thread did the same: started as many products, and waited for them, in the same places.
    pub fn is_same(&self, other: &Self) -> bool {
        self.places == other.places
    }

    /// How many were started.
    pub fn started(&self) -> u32 {
        self.started
    }

    /// Waits for all products but the last `pending`, and takes them out.
    pub fn wait_for_all_but(&mut self, pending: usize, location: Site) -> Vec<Product> {
        self.pass((location, pending));
        let done = self.in_flight.len().saturating_sub(pending);
        self.in_flight.drain(..done).collect()
    }

    /// The oldest product that was not waited for.
    pub fn oldest(&self) -> Option<&Product> {
        self.in_flight.front()
    }
}
