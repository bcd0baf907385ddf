//! Compares hashes and messages with those of vLLM's own code. `tests/golden/README.md` describes how they were made.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dsv4_kv_prefix::RootKey;
use serde::Deserialize;

use crate::hash::{BLOCK, BlockHash, Hasher};
use crate::message::{Message, StoredBlocks};

#[derive(Deserialize)]
struct Vectors {
    root: String,
    chains: Vec<Chain>,
    messages: Vec<String>,
}

#[derive(Deserialize)]
struct Chain {
    salt: String,
    adapter: String,
    tokens: Vec<u32>,
    hashes: Vec<String>,
    wire: Vec<String>,
}

fn vectors() -> Vectors {
    serde_json::from_str(include_str!("../tests/golden/vectors.json")).expect("vectors")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Chain {
    fn root(&self) -> RootKey {
        RootKey::new(self.salt.as_bytes(), self.adapter.as_bytes(), b"model")
    }

    fn blocks(&self) -> &[[u32; BLOCK]] {
        self.tokens.as_chunks().0
    }

    fn hashes(&self) -> Vec<BlockHash> {
        let (root, mut hasher, mut parent) = (self.root(), Hasher::default(), None);
        let hash = |tokens| {
            parent = Some(hasher.hash(&root, parent, tokens));
            parent
        };
        self.blocks().iter().filter_map(hash).collect()
    }
}

#[test]
fn hashes_are_vllms() {
    let Vectors { root, chains, .. } = vectors();
    assert_eq!(hex(&BlockHash::root().0), root);
    assert_eq!(chains.len(), 4);
    for chain in chains {
        let hashes = chain.hashes();
        assert_eq!(hashes.iter().map(|hash| hex(&hash.0)).collect::<Vec<_>>(), chain.hashes);
        let wire = hashes.iter().map(|hash| hash.wire().to_string());
        assert_eq!(wire.collect::<Vec<_>>(), chain.wire);
    }
}

#[test]
fn messages_are_vllms() {
    let Vectors { chains, messages, .. } = vectors();
    let time: SystemTime = UNIX_EPOCH + Duration::from_millis(1_700_000_000_250);
    for (chain, want) in chains.iter().zip(&messages) {
        let (root, blocks) = (chain.root(), chain.blocks());
        let hashes: Vec<_> = chain.hashes().iter().map(|hash| hash.wire()).collect();
        let reversed: Vec<_> = hashes.iter().rev().copied().collect();
        let mut message = Message::default();
        for _ in 0..2 {
            message.cleared();
            let (root, none) = (&root, None);
            let first = (&hashes[..1], &blocks[..1]);
            message.stored(&StoredBlocks { root, parent: none, hashes: first.0, tokens: first.1 });
            let parent = Some(hashes[0]);
            let rest = (&hashes[1..], &blocks[1..]);
            message.stored(&StoredBlocks { root, parent, hashes: rest.0, tokens: rest.1 });
            message.removed(&reversed);
            let message_is_vllms = hex(&message.finish(time, 3)) == *want;
            assert!(message_is_vllms, "of {:?}, {:?}", chain.salt, chain.adapter);
            assert!(message.is_empty());
        }
    }
}

/// Salts and names that are not UTF-8 have hashes that differ from those of all text, and from each other's.
#[test]
fn roots_that_are_no_text_have_hashes_of_their_own() {
    let parts: [&[u8]; 5] = [b"", b"\xff", b"\xfe", b"ff", "\u{fffd}".as_bytes()];
    let mut hasher = Hasher::default();
    let mut hashes = Vec::new();
    for salt in parts {
        for adapter in parts {
            let root = RootKey::new(salt, adapter, b"model");
            hashes.push(hasher.hash(&root, None, &[1; BLOCK]).0);
            let mut message = Message::default();
            let hashes = &[1][..];
            let tokens = &[[1; BLOCK]];
            message.stored(&StoredBlocks { root: &root, parent: None, hashes, tokens });
            let bytes = message.finish(UNIX_EPOCH, 0);
            rmp_serde::from_slice::<serde::de::IgnoredAny>(&bytes).expect("msgpack");
        }
    }
    hashes.sort_unstable();
    hashes.dedup();
    assert_eq!(hashes.len(), 25);
}
