//! The index that a router should have, computed from the cache itself.

use std::collections::BTreeMap;

use dsv4_kv_events::Hasher;
use dsv4_kv_prefix::{Event, EventBatch};

use crate::index::{Block, Index};

/// The index of the blocks in a snapshot.
pub fn index(snapshot: &EventBatch<128>) -> Index {
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
