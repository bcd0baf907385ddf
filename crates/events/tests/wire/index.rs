//! A router's index: the blocks that a cache holds according to messages.

use std::collections::BTreeMap;

use serde::Deserialize;

/// A message, as a router reads it.
#[derive(Debug, Deserialize)]
pub struct Message(pub f64, pub Vec<Event>, pub u32);

#[derive(Debug, Deserialize)]
#[serde(tag = "type", deny_unknown_fields)]
#[expect(dead_code, reason = "fields that are read only to see that they are there")]
pub enum Event {
    BlockStored {
        block_hashes: Vec<u64>,
        parent_block_hash: Option<u64>,
        token_ids: Vec<u32>,
        block_size: usize,
        lora_id: Option<u32>,
        medium: Option<String>,
        lora_name: Option<String>,
        #[serde(default)]
        extra_keys: Option<Vec<Option<Vec<String>>>>,
    },
    BlockRemoved {
        block_hashes: Vec<u64>,
        medium: Option<String>,
    },
    AllBlocksCleared {},
}

/// A block: its parent, its tokens, its salt and adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    pub parent: Option<u64>,
    pub tokens: Vec<u32>,
    pub keys: Option<Vec<String>>,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Index(pub BTreeMap<u64, Block>);

impl Index {
    /// Applies a message. Panics on a wrong one: a block may not be stored twice or without its parent, nor removed
    /// when it is unknown or has children.
    pub fn apply(&mut self, message: &Message) {
        message.1.iter().for_each(|event| self.event(event));
    }

    fn event(&mut self, event: &Event) {
        match event {
            Event::AllBlocksCleared {} => self.0.clear(),
            Event::BlockRemoved { block_hashes, .. } => {
                for hash in block_hashes {
                    assert!(self.0.remove(hash).is_some(), "{hash} is not there");
                    let orphan = self.0.values().find(|block| block.parent == Some(*hash));
                    assert!(orphan.is_none(), "{orphan:?} is left of {hash}");
                }
            }
            Event::BlockStored { block_hashes, parent_block_hash, token_ids, .. } => {
                let mut parent = *parent_block_hash;
                assert!(parent.is_none_or(|parent| self.0.contains_key(&parent)), "in the air");
                assert_eq!(block_hashes.len() * 128, token_ids.len());
                for (at, (&hash, tokens)) in
                    block_hashes.iter().zip(token_ids.chunks(128)).enumerate()
                {
                    let Event::BlockStored { extra_keys, .. } = event else { unreachable!() };
                    let keys = extra_keys.as_ref().and_then(|keys| keys[at].clone());
                    let block = Block { parent, tokens: tokens.to_vec(), keys };
                    assert!(self.0.insert(hash, block).is_none(), "{hash} is there already");
                    parent = Some(hash);
                }
            }
        }
    }
}
