//! The same tokens under different salts or adapters never have equal hashes, neither in full nor in the form on the
//! wire.

use std::collections::HashMap;
use std::time::Instant;

use dsv4_kv_prefix::RootKey;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::hash::{BLOCK, BlockHash, Hasher};

/// A function that hashes blocks.
type Hash = fn(&mut Hasher, &RootKey, Option<BlockHash>, &[u32; BLOCK]) -> BlockHash;

/// Hashes `count` random pairs of prefixes under two different roots. Fails if a hash, in full or as on the wire,
/// belongs to two roots or two prefixes. Returns the number of hashes that were computed more than once.
fn pairs(count: u64, hash: Hash) -> Result<u64, String> {
    // Some of these are equal when salt and adapter are concatenated, and one looks like the CBOR of another.
    let parts: [&[u8]; 7] = [b"", b"a", b"b", b"ab", b"\0", b"\xff", b"\x61a"];
    let roots: Vec<_> = parts
        .iter()
        .flat_map(|salt| parts.map(|adapter| RootKey::new(salt, adapter, b"model")))
        .collect();
    let (mut random, mut hasher) = (SmallRng::seed_from_u64(37), Hasher::default());
    let (mut whole, mut wire, mut again) = (HashMap::new(), HashMap::new(), 0);
    for _ in 0..count {
        // Few prompts, many with the same beginning, so that the same prefix occurs again.
        let (first, second) = (random.random_range(0..64), random.random_range(0..1 << 12));
        let one = random.random_range(0..roots.len());
        let two = (one + random.random_range(1..roots.len())) % roots.len();
        for root in [one, two] {
            let above = hash(&mut hasher, &roots[root], None, &[first; BLOCK]);
            let below = hash(&mut hasher, &roots[root], Some(above), &[second; BLOCK]);
            for (hash, of) in [(above, (root, first, None)), (below, (root, first, Some(second)))] {
                let before = *whole.entry(hash.0).or_insert(of);
                let number = *wire.entry(hash.wire()).or_insert(of);
                if (before, number) != (of, of) {
                    return Err(format!("{before:?}, {number:?} and {of:?} have one hash"));
                }
                again += 1;
            }
        }
    }
    Ok(again - whole.len() as u64)
}

#[test]
fn another_salt_has_other_hashes() {
    assert!(pairs(10_000, Hasher::hash).unwrap() > 5_000, "the same prefix has the same hash");
}

#[test]
#[ignore = "a million pairs: docs/reliability.md"]
fn another_salt_has_other_hashes_a_million_times() {
    let begun = Instant::now();
    let again = pairs(1_000_000, Hasher::hash).unwrap();
    println!(
        "1,000,000 pairs in {:.1?}; {again} hashes came again under their own",
        begun.elapsed()
    );
    assert!(again > 500_000, "the same prefix has the same hash");
}

#[test]
fn hashes_without_a_root_are_found() {
    let rootless: Hash =
        |hasher, _, parent, tokens| hasher.hash(&RootKey::new(b"", b"", b"model"), parent, tokens);
    pairs(10, rootless).unwrap_err();
    // Leaving the salt out of all blocks but the first is no mistake, since the chain contains it; here it is left out
    // of all blocks.
    let saltless: Hash = |hasher, root, parent, tokens| {
        hasher.hash(&RootKey::new(b"", root.adapter(), b"model"), parent, tokens)
    };
    pairs(1_000, saltless).unwrap_err();
}
