//! Whose events are published: a bare tree, a cache on a device, or the bookkeeping of one.

use dsv4_kv::Ledger;
use dsv4_kv_events::{Published, Publisher};

use crate::cache::Cache;
use crate::index::Index;
use crate::requests::Requests;
use crate::snapshot::index;

pub trait Source {
    /// Something happens.
    fn operation(&mut self);
    fn publish(&mut self, publisher: &mut Publisher) -> Published;
    /// Blocks that are there.
    fn blocks(&self) -> u32;
    /// What is there. Nothing changes by it.
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
