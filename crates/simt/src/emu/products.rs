//! The products of warpgroups that a thread has started.

use std::collections::VecDeque;

use super::fault::Site;

/// What a thread reads of the operands of a product.
#[derive(Clone, Debug)]
pub struct Product {
    /// Byte offsets of the words in the block's shared memory.
    pub words: Vec<u32>,
    /// Where the product was started, and when.
    pub location: Site,
    pub time: u64,
}

/// The products that a thread has started.
#[derive(Debug, Default)]
pub struct Products {
    started: u32,
    /// Those that it has not waited for, the oldest first.
    in_flight: VecDeque<Product>,
}

impl Products {
    /// Starts a product; its number.
    pub fn start(&mut self, location: Site, time: u64) -> u32 {
        self.in_flight.push_back(Product { words: Vec::new(), location, time });
        self.started += 1;
        self.started - 1
    }

    /// Notes that the product which was started last reads a word.
    pub fn read(&mut self, word: u32) {
        self.in_flight.back_mut().expect("one was started").words.push(word);
    }

    /// How many were started.
    pub fn started(&self) -> u32 {
        self.started
    }

    /// Takes out all products but the last `pending`.
    pub fn take_all_but(&mut self, pending: usize) -> Vec<Product> {
        let done = self.in_flight.len().saturating_sub(pending);
        self.in_flight.drain(..done).collect()
    }

    /// The oldest product that was not waited for.
    pub fn oldest(&self) -> Option<&Product> {
        self.in_flight.front()
    }
}
