//! Whose events are published: a bare tree, a cache on a device, or the books of one.

use std::collections::BTreeMap;

use dsv4_kv::Ledger;
use dsv4_kv_events::{Hasher, Published, Publisher};
use dsv4_kv_prefix::{Event, EventBatch};

use crate::cache::{Cache, T};
use crate::index::{Block, Index};
use crate::requests::Requests;

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

/// A router's index of what a snapshot says is there.
pub fn index(snapshot: &EventBatch<T>) -> Index {
    let (mut hasher, mut hashes) = (Hasher::default(), BTreeMap::new());
    let mut index = Index::default();
    for event in snapshot.iter() {
        let Event::Stored(run) = event else { panic!("{event:?} in a snapshot") };
        let mut parent = run.parent.map(|parent| hashes[&parent]);
        let text = |part: &[u8]| String::from_utf8(part.to_vec()).unwrap();
        for (&serial, tokens) in run.serials.iter().zip(run.tokens) {
            let hash = hasher.hash(run.root, parent, tokens);
            let salt = parent.is_none().then(|| text(run.root.salt()));
            let keys = [Some(text(run.root.adapter())), salt];
            let keys: Vec<_> = keys.into_iter().flatten().filter(|key| !key.is_empty()).collect();
            let keys = (!keys.is_empty()).then_some(keys);
            let above = parent.map(dsv4_kv_events::BlockHash::wire);
            let block = Block { parent: above, tokens: tokens.to_vec(), keys };
            assert!(index.0.insert(hash.wire(), block).is_none());
            hashes.insert(serial, hash);
            parent = Some(hash);
        }
    }
    index
}
