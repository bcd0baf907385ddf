//! The same tokens under another salt or adapter share nothing, whatever else was computed under either.

use std::collections::HashMap;
use std::time::Instant;

use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::{Accepted, BlockId, CacheConfig, LayerGroup, Ledger, Prompt, StepRequest};
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

const TRUNK: LayerGroup = LayerGroup::Trunk;

/// Pairs of salt and adapter, some of which are equal when they are concatenated.
fn keys() -> Vec<(Vec<u8>, Vec<u8>)> {
    let parts: [&[u8]; 6] = [b"", b"a", b"b", b"ab", b"\0", b"\0\0\0\0\0\0\0\x01a"];
    let pairs =
        parts.iter().flat_map(|salt| parts.map(|adapter| (salt.to_vec(), adapter.to_vec())));
    pairs.collect()
}

/// Prompts of 129 to 500 tokens, many of which have a common prefix.
fn prompts(random: &mut SmallRng, count: usize) -> Vec<Vec<u32>> {
    let mut prompts: Vec<Vec<u32>> = Vec::new();
    for number in 0..count as u32 {
        let mut prompt = prompts.choose(random).cloned().unwrap_or_default();
        prompt.truncate(random.random_range(0..=prompt.len()));
        let tokens = random.random_range(129..=500_u32).max(prompt.len() as u32 + 1);
        prompt.extend((prompt.len() as u32..tokens).map(|at| number * 1000 + at));
        prompt.truncate(500);
        prompts.push(prompt);
    }
    prompts
}

/// A ledger, and the contents of each block: its key, and all tokens up to its end.
struct Run {
    ledger: Ledger,
    array: Vec<i32>,
    owners: HashMap<BlockId, (usize, usize, usize)>,
    prompts: Vec<Vec<u32>>,
    keys: Vec<(Vec<u8>, Vec<u8>)>,
    reused: u64,
}

impl Run {
    /// Admits a prompt under a key, checks each block that it shares, computes it, and ends it.
    fn ask(&mut self, key: usize, prompt: usize) {
        let (salt, adapter) = &self.keys[key];
        let tokens = &self.prompts[prompt];
        let asked = Prompt { tokens, salt, adapter };
        let admission = self.ledger.admit_with(&asked).unwrap();
        let shared = admission.reused as usize / 128;
        for (at, block) in self.ledger.block_table(admission.id).unwrap().take(shared).enumerate() {
            let &(of, told, number) = self.owners.get(&block).expect("somebody computed it");
            assert_eq!(of, key, "block {at} of prompt {prompt} is of another salt");
            let end = (at + 1) * 128;
            assert!(number == at && self.prompts[told][..end] == tokens[..end], "other tokens");
        }
        self.reused += u64::from(admission.reused);
        let count = tokens.len() as u32 - admission.reused;
        let step = [StepRequest { id: admission.id, start: admission.reused, tokens: count }];
        self.ledger.begin_step(TRUNK, &step, &mut self.array).unwrap();
        let told = &tokens[admission.reused as usize..];
        let accepted = [Accepted { id: admission.id, accepted: count, tokens: told }];
        self.ledger.commit_step(TRUNK, &accepted).unwrap();
        let own = self.ledger.block_table(admission.id).unwrap().enumerate().skip(shared);
        self.owners.extend(own.map(|(at, block)| (block, (key, prompt, at))));
        self.ledger.release(admission.id).unwrap();
    }
}

/// For `count` pairs: a prompt is computed under one key, then requested under another.
fn pairs(count: usize) {
    let mut random = SmallRng::seed_from_u64(17);
    let config = CacheConfig {
        num_blocks: 2_000,
        max_context: 512,
        max_step_tokens: 512,
        num_checkpoints: 600,
        checkpoint_interval: 128,
        ..CacheConfig::new(ModelConfig::preset("tiny").unwrap())
    };
    let ledger = Ledger::new(&config).unwrap();
    let (array, prompts) = (vec![0; ledger.largest_layout().elements()], prompts(&mut random, 64));
    let (owners, keys) = (HashMap::new(), keys());
    let mut run = Run { ledger, array, owners, prompts, keys, reused: 0 };
    let begun = Instant::now();
    for _ in 0..count {
        let one = random.random_range(0..run.keys.len());
        let two = (one + random.random_range(1..run.keys.len())) % run.keys.len();
        let prompt = random.random_range(0..run.prompts.len());
        run.ask(one, prompt);
        run.ask(two, prompt);
    }
    run.ledger.audit().unwrap();
    let stats = run.ledger.reuse_stats();
    println!("{count} pairs in {:.1?}, none shared: {stats:?}", begun.elapsed());
    assert!(stats.hits > count as u64 / 20 && run.reused == stats.reused, "{stats:?}");
    assert!(stats.evicted_blocks > count as u64 / 20, "{stats:?}");
}

#[test]
fn another_salt_shares_nothing() {
    pairs(10_000);
}

#[test]
#[ignore = "a million pairs: docs/reliability.md"]
fn another_salt_shares_nothing_a_million_times() {
    pairs(1_000_000);
}
