//! Shared prefixes in the ledger: random requests, with a check after each operation of who holds each block, and of
//! its contents.

use std::collections::HashMap;

use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::ledger::Written;
use dsv4_kv::{
    Accepted, BlockId, CacheConfig, KvError, LayerGroup, Ledger, Prompt, RequestId, StepRequest,
};
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

const TRUNK: LayerGroup = LayerGroup::Trunk;
const CONTEXT: u32 = 900;

fn config(num_blocks: u32, num_checkpoints: u32, checkpoint_interval: u32) -> CacheConfig {
    CacheConfig {
        max_requests: 4,
        num_blocks,
        max_context: CONTEXT,
        max_step_tokens: 700,
        max_draft: 2,
        num_checkpoints,
        checkpoint_interval,
        lease_bytes: u64::MAX,
        ..CacheConfig::new(ModelConfig::preset("tiny").unwrap())
    }
}

struct Request {
    id: RequestId,
    salt: u8,
    /// Its prompt, and its answer so far.
    tokens: Vec<u32>,
    done: usize,
}

/// The contents of a block: the salt and all tokens up to its end.
type Content = (u8, Vec<u32>);

struct Run {
    random: SmallRng,
    ledger: Ledger,
    array: Vec<i32>,
    requests: Vec<Request>,
    content: HashMap<BlockId, Content>,
    prompts: Vec<Vec<u32>>,
    evicted: u64,
}

impl Run {
    fn new(seed: u64, config: &CacheConfig) -> Self {
        let ledger = Ledger::new(config).unwrap();
        let array = vec![0; ledger.largest_layout().elements()];
        Self {
            random: SmallRng::seed_from_u64(seed),
            array,
            ledger,
            requests: Vec::new(),
            content: HashMap::new(),
            prompts: vec![(0..500).collect()],
            evicted: 0,
        }
    }

    /// An earlier prompt, perhaps cut and continued with other tokens.
    fn prompt(&mut self) -> Vec<u32> {
        let random = &mut self.random;
        let mut prompt = self.prompts.choose(random).unwrap().clone();
        if random.random_bool(0.6) {
            prompt.truncate(random.random_range(0..=prompt.len()));
            let first = random.random_range(1..4) * 1000;
            prompt.extend(first..first + random.random_range(1..400));
        }
        prompt.truncate(CONTEXT as usize - 100);
        if self.prompts.len() < 8 {
            self.prompts.push(prompt.clone());
        }
        prompt
    }

    fn operate(&mut self) {
        match self.random.random_range(0..10) {
            0..3 => self.admit(),
            3..7 => self.step(),
            7..9 => self.release(),
            _ => {
                let tokens = self.prompt();
                let salt = [self.random.random_range(0..2)];
                let prefix = Prompt { tokens: &tokens, salt: &salt, adapter: b"" };
                let until = std::time::Duration::from_secs(self.random.random_range(0..3));
                let pinned = self.ledger.pin(&prefix, until);
                if let Ok(lease) = pinned
                    && self.random.random()
                {
                    assert!(self.ledger.unpin(lease));
                }
                self.ledger.expire(std::time::Duration::from_secs(2));
            }
        }
    }

    fn admit(&mut self) {
        let (tokens, salt) = (self.prompt(), self.random.random_range(0..2));
        let prompt = Prompt { tokens: &tokens, salt: &[salt], adapter: b"" };
        match self.ledger.admit_with(&prompt) {
            Err(KvError::NoFreeSlot { .. }) => assert_eq!(self.requests.len(), 4),
            Err(error) => panic!("{error}"),
            Ok(admission) => {
                let done = admission.reused as usize;
                assert!(done < tokens.len().max(1) && done.is_multiple_of(128));
                assert_eq!(self.ledger.committed(admission.id).unwrap() as usize, done);
                self.requests.push(Request { id: admission.id, salt, tokens, done });
            }
        }
    }

    fn step(&mut self) {
        let most = [3, 300][self.random.random_range(0..2)];
        let mut parts = Vec::new();
        for request in &mut self.requests {
            let tokens = self.random.random_range(1..=most);
            // After its prompt a request answers with random tokens.
            while request.tokens.len() < request.done + tokens {
                request.tokens.push(self.random.random_range(0..3));
            }
            let tokens = tokens.min(CONTEXT as usize - request.done) as u32;
            if tokens > 0 && self.random.random_bool(0.7) {
                parts.push(StepRequest { id: request.id, start: request.done as u32, tokens });
            }
        }
        let counts = self.ledger.tree_counts();
        let free = self.ledger.free_blocks();
        match self.ledger.begin_step(TRUNK, &parts, &mut self.array) {
            Ok(_) => {}
            Err(KvError::OutOfBlocks { needed, free: most }) => {
                assert_eq!(most, free + counts.evictable_blocks);
                assert!(needed > most);
                assert_eq!((self.ledger.tree_counts(), self.ledger.free_blocks()), (counts, free));
                return;
            }
            Err(KvError::StepTooLong { .. }) => return,
            Err(error) => panic!("{error}"),
        }
        if self.random.random_bool(0.1) {
            return self.ledger.reject_step(TRUNK, Written::Nothing);
        }
        let accepted: Vec<_> = parts
            .iter()
            .map(|part| {
                let drafts = if part.tokens <= 3 { part.tokens } else { 0 };
                part.tokens - self.random.random_range(0..=drafts)
            })
            .collect();
        let told = self.random.random_bool(0.98);
        let all = parts.iter().zip(&accepted).map(|(part, &accepted)| {
            let request = self.requests.iter().find(|request| request.id == part.id).unwrap();
            let tokens = &request.tokens[request.done..][..accepted as usize];
            Accepted { id: part.id, accepted, tokens: if told { tokens } else { &[] } }
        });
        let all: Vec<_> = all.collect();
        self.ledger.commit_step(TRUNK, &all).unwrap();
        for (part, accepted) in parts.iter().zip(accepted) {
            let request = self.requests.iter_mut().find(|request| request.id == part.id).unwrap();
            request.done += accepted as usize;
            // Records the contents of the blocks that the step closed.
            let table: Vec<_> = self.ledger.block_table(part.id).unwrap().collect();
            let closed = part.start as usize / 128..request.done / 128;
            for (at, block) in closed.clone().zip(&table[closed]) {
                let content = request.tokens[..(at + 1) * 128].to_vec();
                self.content.insert(*block, (request.salt, content));
            }
        }
    }

    fn release(&mut self) {
        if !self.requests.is_empty() {
            let at = self.random.random_range(0..self.requests.len());
            self.ledger.release(self.requests.swap_remove(at).id).unwrap();
        }
    }

    fn check(&mut self) {
        self.ledger.audit().unwrap();
        let counts = self.ledger.tree_counts();
        self.evicted = self.ledger.reuse_stats().evicted_blocks;
        let mut tables = Vec::new();
        for request in &self.requests {
            let table: Vec<_> = self.ledger.block_table(request.id).unwrap().collect();
            assert!(table.len() >= request.done / 128);
            for (at, block) in table.iter().enumerate().take(request.done / 128) {
                let (salt, tokens) = &self.content[block];
                assert_eq!(*salt, request.salt, "{block:?} of another salt");
                let want = &request.tokens[..(at + 1) * 128];
                assert!(tokens == want, "block {at} of {} has other tokens", request.id);
            }
            tables.push(table);
        }
        // Each block is in a table, in the tree, or free; the request's own blocks are in one table only.
        let held: std::collections::HashSet<_> = tables.iter().flatten().collect();
        let (held, free) = (held.len() as u32, self.ledger.free_blocks());
        let total = self.ledger.total_blocks();
        assert!(held + free <= total, "{held} in tables, {free} free of {total}");
        assert!(held + free + counts.blocks >= total, "blocks are lost: {held} {free} {counts:?}");
        let kept = counts.checkpoints + self.ledger.output_checkpoints();
        let checkpoints = self.ledger.free_checkpoints() + kept;
        assert_eq!(checkpoints, self.ledger.total_checkpoints(), "{counts:?}");
    }
}

#[test]
fn who_holds_what_is_right_after_every_operation() {
    let mut evicted = 0;
    for (seed, (blocks, checkpoints, interval)) in
        [(20, 4, 0), (26, 9, 256), (80, 40, 128), (14, 2, 128)].into_iter().enumerate()
    {
        let mut run = Run::new(seed as u64, &config(blocks, checkpoints, interval));
        for _ in 0..3000 {
            run.operate();
            run.check();
        }
        assert!(run.ledger.reuse_stats().hits > 50, "{:?}", run.ledger.reuse_stats());
        evicted += run.evicted;
        while !run.requests.is_empty() {
            run.release();
        }
        run.ledger.expire(std::time::Duration::MAX);
        run.check();
        let counts = run.ledger.tree_counts();
        assert_eq!(counts.blocks, counts.evictable_blocks);
        assert_eq!(run.ledger.free_blocks() + counts.blocks, blocks, "no block is lost");
    }
    assert!(evicted > 300, "{evicted} blocks were evicted");
}

/// Blocks after tokens without ids are not shared; those before stay shared.
#[test]
fn what_was_not_told_is_not_shared() {
    let mut ledger = Ledger::new(&config(40, 8, 128)).unwrap();
    let mut array = vec![0; ledger.largest_layout().elements()];
    let tokens: Vec<u32> = (0..600).collect();
    let prompt = Prompt { tokens: &tokens, salt: b"", adapter: b"" };
    let id = ledger.admit_with(&prompt).unwrap().id;
    let mut step = |ledger: &mut Ledger, start: u32, count: u32, told: &[u32]| {
        let step = [StepRequest { id, start, tokens: count }];
        ledger.begin_step(TRUNK, &step, &mut array).unwrap();
        ledger.commit_step(TRUNK, &[Accepted { id, accepted: count, tokens: told }]).unwrap();
    };
    step(&mut ledger, 0, 200, &tokens[..200]);
    step(&mut ledger, 200, 200, &[]);
    step(&mut ledger, 400, 150, &tokens[400..550]);
    assert_eq!(ledger.tree_counts().blocks, 1);
    ledger.release(id).unwrap();
    assert_eq!(ledger.admit_with(&prompt).unwrap().reused, 128);
    // Without checkpoints nothing is shared.
    let mut without = Ledger::new(&config(40, 0, 128)).unwrap();
    let id = without.admit_with(&prompt).unwrap().id;
    let step = [StepRequest { id, start: 0, tokens: 600 }];
    without.begin_step(TRUNK, &step, &mut array).unwrap();
    without.commit_step(TRUNK, &[Accepted { id, accepted: 600, tokens: &tokens }]).unwrap();
    assert_eq!(without.admit_with(&prompt).unwrap().reused, 0);
}
