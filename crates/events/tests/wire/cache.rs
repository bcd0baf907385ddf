//! A cache without a device: a prefix tree under a random load.

use dsv4_kv_prefix::{Limits, Need, Origin, PrefixTree, Reference, RootKey, ScoredLru};
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use crate::index::Index;
use crate::snapshot::index;

pub const T: usize = 128;

pub struct Cache {
    pub tree: PrefixTree<(), (), ScoredLru, T>,
    random: SmallRng,
    roots: Vec<RootKey>,
    prompts: Vec<Vec<u32>>,
    live: Vec<Reference>,
    most: u32,
}

impl Cache {
    /// A cache of about `most` blocks, with an event log of `capacity`, and prompts of these salts and adapters.
    pub fn new(seed: u64, (most, capacity): (u32, u32), roots: &[(&str, &str)]) -> Self {
        let limits = Limits {
            block_bytes: 1,
            checkpoint_bytes: 8,
            lease_bytes: 0,
            remembered: 0,
            reserved_blocks: most,
        };
        let mut tree = PrefixTree::new(limits, ScoredLru { capacity: u64::from(most) * 2 });
        tree.log_events(capacity);
        let root = |&(salt, adapter): &(&str, &str)| {
            RootKey::new(salt.as_bytes(), adapter.as_bytes(), b"model")
        };
        let roots = roots.iter().map(root).collect();
        let random = SmallRng::seed_from_u64(seed);
        Self { tree, random, roots, prompts: vec![vec![7; 1000]], live: Vec::new(), most }
    }

    /// A request arrives, computes its prompt, and may save a checkpoint; or a request ends.
    pub fn operation(&mut self) {
        if self.live.len() > 8 || (self.random.random_bool(0.4) && !self.live.is_empty()) {
            let ended = self.live.swap_remove(self.random.random_range(0..self.live.len()));
            return self.tree.release(ended, |_| ()).unwrap();
        }
        let random = &mut self.random;
        let mut prompt = self.prompts.choose(random).unwrap().clone();
        prompt.truncate(random.random_range(0..=prompt.len()));
        let step = random.random_range(0..5);
        prompt.extend((0..random.random_range(0..1500)).map(|at| at * step));
        prompt.truncate(T * 40);
        if self.prompts.len() == 20 {
            self.prompts.swap_remove(random.random_range(0..20));
        }
        self.prompts.push(prompt.clone());
        let root = self.roots.choose(random).unwrap().clone();
        let whole = prompt.len() / T;
        let saved = random.random_bool(0.8).then(|| random.random_range(0..=whole) as u32);
        self.compute(&root, &prompt, saved);
    }

    /// A request computes the missing part of a prompt, with a checkpoint after `saved` blocks.
    pub fn compute(&mut self, root: &RootKey, prompt: &[u32], saved: Option<u32>) {
        let mut at = self.tree.match_and_lock(root, prompt).reference;
        let new = prompt[at.blocks() as usize * T..].as_chunks().0;
        self.tree.extend(&mut at, new, |_| (), |_| ()).unwrap();
        if let Some(blocks) = saved.filter(|&blocks| blocks > 0) {
            // A checkpoint may exist already.
            let _ = self.tree.attach(&at, blocks, Origin::Prompt, ());
        }
        self.live.push(at);
        let counts = self.tree.counts();
        let blocks = counts.blocks.saturating_sub(self.most).min(counts.evictable_blocks);
        self.tree.evict(Need { blocks, checkpoints: 0 }, |_| ()).unwrap();
    }

    /// The blocks in the prefix tree.
    pub fn dump(&self) -> Index {
        index(&self.tree.resident_events())
    }
}
