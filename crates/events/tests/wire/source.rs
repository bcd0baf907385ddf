//! Sources of events: a bare prefix tree, a cache on a device, or the ledger of a cache.

use dsv4_kv::Ledger;
use dsv4_kv_events::{Published, Publisher};

use crate::cache::Cache;
use crate::index::Index;
use crate::requests::Requests;
use crate::snapshot::index;

pub trait Source {
    /// Does a random operation.
    fn operation(&mut self);
    fn publish(&mut self, publisher: &mut Publisher) -> Published;
    /// Number of blocks in the prefix tree.
    fn blocks(&self) -> u32;
    /// The blocks in the prefix tree. Changes nothing.
    fn dump(&self) -> Index;
}

impl Source for Cache {
    fn operation(&mut self) {
        Self::operation(self);
    }

    fn publish(&mut self, publisher: &mut Publisher) -> Published {
        publisher.publish(&mut self.tree).unwrap()
    }

    fn blocks(&self) -> u32 {
        self.tree.counts().blocks
    }

    fn dump(&self) -> Index {
        Self::dump(self)
    }
}

impl Source for Requests {
    fn operation(&mut self) {
        Self::operation(self);
    }

    fn publish(&mut self, publisher: &mut Publisher) -> Published {
        publisher.publish(&mut self.fed.manager).unwrap()
    }

    fn blocks(&self) -> u32 {
        self.fed.manager.ledger().tree_counts().blocks
    }

    fn dump(&self) -> Index {
        index(&self.fed.manager.resident_events())
    }
}

impl Source for Ledger {
    fn operation(&mut self) {
        unreachable!("a trace says what happens");
    }

    fn publish(&mut self, publisher: &mut Publisher) -> Published {
        publisher.publish(self).unwrap()
    }

    fn blocks(&self) -> u32 {
        self.tree_counts().blocks
    }

    fn dump(&self) -> Index {
        index(&self.resident_events())
    }
}
