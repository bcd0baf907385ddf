//! The cost of a match, and a check that the event log allocates nothing.

use std::time::{Duration, Instant};

use dsv4_kv_prefix::{
    Drained, Event, EventBatch, EventSource, Limits, Origin, PrefixTree, RootKey, ScoredLru,
};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

const T: usize = 128;

type Tree = PrefixTree<u32, u32, ScoredLru, T>;

/// A tree of `prompts` prompts of `blocks` blocks with a checkpoint at each 16th, and the prompts.
fn filled(prompts: u32, blocks: usize) -> (Tree, RootKey, Vec<Vec<u32>>) {
    let limits = Limits {
        block_bytes: 449_824,
        checkpoint_bytes: 3_719_168,
        lease_bytes: 0,
        remembered: 1 << 16,
        reserved_blocks: prompts * blocks as u32,
    };
    let mut tree = Tree::new(limits, ScoredLru { capacity: 1 << 37 });
    let root = RootKey::new(b"salt", b"", b"model");
    let mut random = SmallRng::seed_from_u64(1);
    let mut next = 0;
    let mut all = Vec::new();
    for _ in 0..prompts {
        let prompt: Vec<u32> = (0..=blocks * T).map(|_| random.random_range(0..129_280)).collect();
        let mut at = tree.match_and_lock(&root, &prompt).reference;
        for part in prompt[..blocks * T].as_chunks().0.chunks(16) {
            tree.extend(&mut at, part, |i| next + i as u32, |_| ()).unwrap();
            next += part.len() as u32;
            tree.attach(&at, at.blocks(), Origin::Interval, 0).unwrap();
        }
        tree.release(at, |_| ()).unwrap();
        all.push(prompt);
    }
    (tree, root, all)
}

/// Two trees do the same operations, one of them with a log that overflows once. Neither allocates.
#[test]
fn a_log_allocates_nothing() {
    let prompt: Vec<u32> = (0..64 * T as u32 + 1).collect();
    let root = RootKey::new(b"salt", b"", b"model");
    let mut batch = EventBatch::with_capacity(80);
    let mut stored = 0;
    let counts = [0, 80].map(|capacity| {
        let (lease_bytes, remembered, reserved_blocks) = (0, 0, 64);
        let limits = Limits {
            block_bytes: 1,
            checkpoint_bytes: 8,
            lease_bytes,
            remembered,
            reserved_blocks,
        };
        let mut tree = Tree::new(limits, ScoredLru { capacity: 1000 });
        tree.log_events(capacity);
        let mut all = || {
            for blocks in [16, 32, 48, 64] {
                let mut at = tree.match_and_lock(&root, &prompt).reference;
                let from = at.blocks() as usize * T;
                let new = prompt[from..blocks * T].as_chunks().0;
                tree.extend(&mut at, new, |i| i as u32, |_| ()).unwrap();
                tree.attach(&at, blocks as u32, Origin::Prompt, 0).unwrap();
                tree.release(at, |_| ()).unwrap();
                let drained = tree.drain_events(&mut batch);
                assert_eq!(drained, if capacity > 0 { Drained::Events } else { Drained::Off });
                let told = |event| u32::from(matches!(event, Event::Stored(_)));
                stored += batch.iter().map(told).sum::<u32>();
            }
            while tree.evict_first(|_| ()) {}
            let mut at = tree.match_and_lock(&root, &prompt).reference;
            tree.extend(&mut at, prompt[1..].as_chunks().0, |i| i as u32, |_| ()).unwrap();
            let drained = tree.drain_events(&mut batch);
            assert_eq!(drained, if capacity > 0 { Drained::Overflowed } else { Drained::Off });
            tree.release(at, |_| ()).unwrap();
        };
        allocation_counter::measure(&mut all).count_total
    });
    assert_eq!((counts, stored), ([0; 2], 4));
}

#[test]
#[ignore = "a measurement, half a gigabyte of tokens: cargo test --release -p dsv4-kv-prefix --test speed -- --ignored --nocapture"]
fn a_match_with_a_million_blocks() {
    // Prompts of 128 k tokens, and their first 8 k tokens.
    let (mut tree, root, prompts) = filled(977, 1024);
    println!("{:?}", tree.counts());
    for tokens in [8 << 10, 128 << 10] {
        let mut samples: Vec<Duration> = Vec::new();
        let mut matches = Vec::new();
        for turn in 0..2000 {
            // A different prompt each time, so that the tree's tokens are not in the CPU's caches. Those of the prompt
            // are.
            let prompt = &prompts[turn * 7919 % prompts.len()][..=tokens];
            let copy = prompt.to_vec();
            let start = Instant::now();
            let found = tree.lookup(&root, &copy);
            samples.push(start.elapsed());
            assert_eq!(found.reusable as usize, tokens);
            let start = Instant::now();
            let found = tree.match_and_lock(&root, &copy);
            matches.push(start.elapsed());
            tree.release(found.reference, |_| ()).unwrap();
        }
        for (what, mut samples) in [("lookup", samples), ("match_and_lock", matches)] {
            samples.sort_unstable();
            let [median, p99] = [50, 99].map(|percent| samples[samples.len() * percent / 100]);
            println!("{what} of {tokens} tokens: median {median:?}, p99 {p99:?}");
        }
    }
}
