//! A random load: requests that match, compute, register, finish; leases; evictions.

use std::time::Duration;

use dsv4_kv_prefix::{
    Checkpoints, Freed, Lease, Limits, Need, NotTaken, Origin, PinRefused, Placement, PrefixTree,
    Reference, RootKey, ScoredLru,
};
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use crate::index::{CAPACITY, Index};
use crate::model::{Block, Checkpoint, Model, Path, T};

/// Sizes of a run.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    pub blocks: u32,
    pub checkpoints: u32,
    pub interval: Option<u32>,
}

type Tree = PrefixTree<Block, Checkpoint, ScoredLru, T>;
type Given = Vec<Freed<Block, Checkpoint>>;

struct Request {
    root: usize,
    tokens: Vec<u32>,
    checkpoints: Checkpoints,
    reference: Reference,
    /// Tokens computed and registered: whole blocks.
    done: usize,
    /// Own copies of blocks that the tree had already.
    own: Vec<Block>,
}

struct Pinned {
    lease: Lease,
    until: Duration,
    path: Path,
}

pub struct Run {
    pub tree: Tree,
    random: SmallRng,
    settings: Settings,
    model: Model,
    roots: Vec<RootKey>,
    requests: Vec<Request>,
    leases: Vec<Pinned>,
    free_blocks: Vec<Block>,
    free_checkpoints: Vec<u32>,
    /// Prompts to vary.
    prompts: Vec<Vec<u32>>,
    now: Duration,
    /// Built from events.
    pub index: Index,
}

impl Run {
    pub fn new(seed: u64, settings: Settings) -> Self {
        let limits = Limits {
            block_bytes: 10,
            checkpoint_bytes: 80,
            lease_bytes: 300,
            remembered: 256,
            reserved_blocks: settings.blocks,
        };
        let capacity = u64::from(settings.blocks) * 10 + u64::from(settings.checkpoints) * 80;
        let keys: [(&[u8], &[u8]); 3] = [(b"", b""), (b"a", b""), (b"", b"a")];
        let roots = keys.map(|(salt, adapter)| RootKey::new(salt, adapter, b"model"));
        let mut tree = Tree::new(limits, ScoredLru { capacity });
        tree.log_events(CAPACITY);
        Self {
            tree,
            random: SmallRng::seed_from_u64(seed),
            settings,
            model: Model::default(),
            index: Index::new(roots.to_vec()),
            roots: roots.into(),
            requests: Vec::new(),
            leases: Vec::new(),
            free_blocks: (0..settings.blocks).map(Block).collect(),
            free_checkpoints: (0..settings.checkpoints).collect(),
            prompts: vec![vec![1; 30]],
            now: Duration::ZERO,
        }
    }

    pub fn step(&mut self) -> Result<(), String> {
        match self.random.random_range(0..100) {
            0..25 => self.admit()?,
            25..75 => self.compute()?,
            75..88 => self.finish()?,
            88..92 => self.pin()?,
            92..95 => self.unpin()?,
            95..98 => self.evict(None)?,
            _ => self.look()?,
        }
        match self.random.random_range(0..20) {
            0 => self.index.start_anew(&mut self.tree)?,
            1..5 => self.index.drain(&mut self.tree)?,
            _ => return self.check(),
        }
        self.check_index()?;
        self.check()
    }

    /// Checks that the index from events equals the model.
    fn check_index(&self) -> Result<(), String> {
        let (told, there) = (self.index.paths(), self.model.paths());
        if told == there { Ok(()) } else { Err(format!("told: {told:?}, there: {there:?}")) }
    }

    /// Ends all requests and leases. The remaining blocks must all be evictable.
    pub fn end(&mut self) -> Result<(), String> {
        while !self.requests.is_empty() {
            self.finish()?;
            self.check()?;
        }
        self.now += Duration::from_secs(1000);
        self.expire()?;
        self.check()?;
        let counts = self.tree.counts();
        let all = Need { blocks: counts.blocks, checkpoints: counts.checkpoints };
        self.evict(Some(all))?;
        self.check()?;
        self.index.drain(&mut self.tree)?;
        self.check_index()?;
        let left = self.tree.counts();
        if left == Default::default() { Ok(()) } else { Err(format!("{left:?} is left")) }
    }

    fn prompt(&mut self) -> Vec<u32> {
        let random = &mut self.random;
        let mut prompt = self.prompts.choose(random).unwrap().clone();
        // Few different tokens, so that blocks often differ only in late tokens.
        match random.random_range(0..4) {
            0 => prompt.truncate(random.random_range(0..=prompt.len())),
            1 => {
                let at = random.random_range(0..=prompt.len());
                prompt.truncate(at);
                prompt.extend((0..random.random_range(0..40)).map(|_| random.random_range(0..2)));
            }
            2 => prompt.extend((0..random.random_range(0..9)).map(|_| random.random_range(0..2))),
            _ => {}
        }
        if random.random_bool(0.4) {
            if self.prompts.len() == 12 {
                self.prompts.swap_remove(random.random_range(0..12));
            }
            self.prompts.push(prompt.clone());
        }
        prompt
    }

    fn admit(&mut self) -> Result<(), String> {
        if self.requests.len() >= 6 {
            return Ok(());
        }
        let (root, tokens) = (self.random.random_range(0..self.roots.len()), self.prompt());
        let before = self.tree.stats();
        let evictable = self.tree.counts().evictable_blocks;
        let referenced = self.tree.referenced(&self.roots[root], &tokens);
        let found_prefix = self.tree.match_and_lock(&self.roots[root], &tokens);
        let after = self.tree.stats();
        let taken = evictable - self.tree.counts().evictable_blocks;
        if taken + referenced != found_prefix.reused / T as u32 {
            return Err(format!(
                "{found_prefix:?}: {referenced} were referenced, {taken} were not"
            ));
        }
        let want = self.model.lookup(root, &tokens);
        if (found_prefix.matched, found_prefix.reused) != (want.matched, want.reusable) {
            return Err(format!("{found_prefix:?} of {tokens:?}, should be {want:?}"));
        }
        let told = [after.reused - before.reused, after.no_checkpoint - before.no_checkpoint];
        if told != [want.reusable, want.matched - want.reusable].map(u64::from) {
            return Err(format!("statistics {before:?}, then {after:?}, of {want:?}"));
        }
        let groups = [after.reused, after.no_checkpoint, after.missed_by_eviction];
        let groups = groups.into_iter().chain([after.other_root, after.tail, after.never_seen]);
        if groups.sum::<u64>() != after.prompt_tokens {
            return Err(format!("{after:?} does not add up"));
        }
        let done = found_prefix.reused as usize;
        let placement = Placement {
            block_tokens: T as u32,
            branch_points: true,
            interval: self.settings.interval,
        };
        let request = Request {
            root,
            checkpoints: placement.checkpoints(tokens.len() as u32, found_prefix.matched),
            done,
            reference: found_prefix.reference,
            own: Vec::new(),
            tokens,
        };
        let checkpoint = self.tree.checkpoint(&request.reference).unwrap();
        let found = checkpoint.map(|checkpoint| checkpoint.0);
        let there = self.model.checkpoint(root, &request.tokens[..done]);
        self.same_path(&request)?;
        self.requests.push(request);
        if found == there { Ok(()) } else { Err(format!("checkpoint {found:?} for {there:?}")) }
    }

    /// Checks that a request's path has the blocks of its tokens.
    fn same_path(&self, request: &Request) -> Result<(), String> {
        let told: Vec<_> = self.tree.tokens(&request.reference).unwrap().collect();
        if !told.into_iter().rev().eq(request.tokens[..request.done].as_chunks().0) {
            return Err("the path has other tokens".to_owned());
        }
        let path = self.tree.blocks(&request.reference).unwrap();
        let mut path: Vec<_> = path.map(|(index, block)| (index as usize, block.0)).collect();
        path.reverse();
        let want = (0..request.done / T).map(|index| {
            let prefix = &request.tokens[..(index + 1) * T];
            (index, self.model.block(request.root, prefix).unwrap_or(u32::MAX))
        });
        if path.iter().copied().eq(want.clone()) {
            return Ok(());
        }
        Err(format!("path {path:?} should be {:?}", want.collect::<Vec<_>>()))
    }

    /// A step of a request: computes and registers some more blocks, with checkpoints at boundaries.
    fn compute(&mut self) -> Result<(), String> {
        if self.requests.is_empty() {
            return Ok(());
        }
        let chosen = self.random.random_range(0..self.requests.len());
        let mut request = self.requests.swap_remove(chosen);
        let whole = request.tokens.len() / T * T;
        let to = (request.done + T * self.random.random_range(1..5)).min(whole);
        let needed = (to.saturating_sub(request.done) / T) as u32;
        self.requests.push(request);
        if needed > self.free_blocks.len() as u32 {
            let short = needed - self.free_blocks.len() as u32;
            self.evict(Some(Need { blocks: short, checkpoints: 0 }))?;
        }
        if needed > self.free_blocks.len() as u32 {
            return Ok(());
        }
        request = self.requests.pop().unwrap();
        let mut result = Ok(());
        while request.done < to && result.is_ok() {
            let next = request.checkpoints.after(request.done as u32);
            let stop = next.map_or(to, |(at, _)| to.min(at as usize));
            result = self.register(&mut request, stop);
            let wanted = next.filter(|&(at, _)| at as usize == stop && result.is_ok());
            if let Some((_, origin)) = wanted {
                result = self.attach(&request, stop, origin);
            }
        }
        self.requests.push(request);
        result
    }

    fn register(&mut self, request: &mut Request, to: usize) -> Result<(), String> {
        let Request { root, tokens, done, own, reference, .. } = request;
        let count = (to - *done) / T;
        let at = self.free_blocks.len() - count;
        let mut blocks: Vec<_> = self.free_blocks.drain(at..).map(Some).collect();
        let ids: Vec<_> = blocks.iter().flatten().map(|block| block.0).collect();
        let mut freed = Given::new();
        let take = |index: usize| blocks[index].take().expect("each block is taken once");
        let new = tokens[*done..to].as_chunks().0;
        let taken = self.tree.extend(reference, new, take, |block| freed.push(block)).unwrap();
        let mut kept = 0;
        for (index, (block, id)) in blocks.into_iter().zip(ids).enumerate() {
            let prefix = &tokens[..*done + (index + 1) * T];
            let was_there = self.model.block(*root, prefix).is_some();
            if let Some(block) = block {
                kept += 1;
                own.push(block);
                if !was_there {
                    return Err(format!("a block of {prefix:?} was not taken"));
                }
            } else {
                self.model.insert(*root, prefix, id)?;
            }
        }
        if kept + taken != count {
            return Err(format!("{taken} of {count} blocks were taken, and {kept} were not"));
        }
        *done = to;
        let held = (*root, tokens[..to].to_vec());
        self.give_back(freed, &[held])
    }

    /// Attaches a checkpoint after the first `tokens` tokens of a request.
    fn attach(&mut self, request: &Request, tokens: usize, origin: Origin) -> Result<(), String> {
        // Without room there is no checkpoint; that is no error.
        let Some(id) = self.free_checkpoints.pop() else { return Ok(()) };
        let prefix = request.tokens[..tokens].to_vec();
        let wanted = self.model.attach(request.root, &prefix, id);
        let checkpoint = Checkpoint(id, request.root, prefix);
        match self.tree.attach(&request.reference, (tokens / T) as u32, origin, checkpoint) {
            Ok(_) if wanted => Ok(()),
            Err(NotTaken(back)) if !wanted => {
                self.free_checkpoints.push(back.0);
                Ok(())
            }
            other => Err(format!("a checkpoint was {other:?}, wanted: {wanted}")),
        }
    }

    fn finish(&mut self) -> Result<(), String> {
        if self.requests.is_empty() {
            return Ok(());
        }
        let chosen = self.random.random_range(0..self.requests.len());
        let mut request = self.requests.swap_remove(chosen);
        if self.random.random_bool(0.3) && request.done > 0 {
            let tokens = T * self.random.random_range(1..=request.done / T);
            self.attach(&request, tokens, Origin::Output)?;
        }
        let mut freed = Given::new();
        self.tree.release(request.reference, |block| freed.push(block)).unwrap();
        self.free_blocks.append(&mut request.own);
        self.give_back(freed, &[])
    }

    fn pin(&mut self) -> Result<(), String> {
        let (root, prefix) = (self.random.random_range(0..self.roots.len()), self.prompt());
        let until = self.now + Duration::from_secs(self.random.random_range(0..6));
        let most = [prefix.as_slice(), &[0]].concat();
        let there = self.model.lookup(root, &most).reusable;
        match self.tree.pin(&self.roots[root], &prefix, until) {
            Ok(lease) if lease.tokens() == there && there > 0 => {
                let path = (root, prefix[..there as usize].to_vec());
                self.leases.push(Pinned { lease, until, path });
                Ok(())
            }
            Err(PinRefused::NothingThere) if there == 0 => Ok(()),
            Err(PinRefused::OverBudget { needed, held, budget }) => {
                let all: u64 = self.leases.iter().map(|pinned| pinned.lease.bytes()).sum();
                let right = held == all && needed + held > budget;
                if right { Ok(()) } else { Err(format!("{needed} + {held} ({all}) of {budget}")) }
            }
            other => Err(format!("pinned {other:?} of {there} tokens")),
        }
    }

    fn unpin(&mut self) -> Result<(), String> {
        self.now += Duration::from_secs(1);
        if self.random.random_bool(0.5) || self.leases.is_empty() {
            return self.expire();
        }
        let chosen = self.random.random_range(0..self.leases.len());
        let pinned = self.leases.swap_remove(chosen);
        let mut freed = Given::new();
        let ended = self.tree.unpin(pinned.lease, |block| freed.push(block)).unwrap();
        self.give_back(freed, &[])?;
        if ended { Ok(()) } else { Err("a lease had ended early".to_owned()) }
    }

    fn expire(&mut self) -> Result<(), String> {
        let before = self.leases.len();
        let now = self.now;
        self.leases.retain(|pinned| pinned.until >= now);
        let mut freed = Given::new();
        let ended = self.tree.expire(now, |block| freed.push(block));
        self.give_back(freed, &[])?;
        let want = before - self.leases.len();
        if ended == want { Ok(()) } else { Err(format!("{ended} leases ended, not {want}")) }
    }

    fn evict(&mut self, need: Option<Need>) -> Result<(), String> {
        let random = &mut self.random;
        let need = need.unwrap_or_else(|| Need {
            blocks: random.random_range(0..10),
            checkpoints: random.random_range(0..3),
        });
        let (evictable, before) = (self.tree.counts(), self.tree.counts());
        let there = need.blocks <= evictable.evictable_blocks
            && need.checkpoints <= evictable.evictable_checkpoints;
        let mut freed = Given::new();
        let result = self.tree.evict(need, |block| freed.push(block));
        let blocks = freed.iter().filter(|freed| matches!(freed, Freed::Block(_))).count() as u32;
        let checkpoints = freed.len() as u32 - blocks;
        self.give_back(freed, &[])?;
        let enough = blocks >= need.blocks && checkpoints >= need.checkpoints;
        let nothing = blocks == 0 && checkpoints == 0 && self.tree.counts() == before;
        match result {
            Ok(()) if there && enough => Ok(()),
            Err(_) if !there && nothing => Ok(()),
            other => Err(format!("{need:?}: {other:?}, {blocks} and {checkpoints}, {before:?}")),
        }
    }

    fn look(&mut self) -> Result<(), String> {
        let (root, prompt) = (self.random.random_range(0..self.roots.len()), self.prompt());
        let got = self.tree.lookup(&self.roots[root], &prompt);
        let want = self.model.lookup(root, &prompt);
        if got == want { Ok(()) } else { Err(format!("{prompt:?}: {got:?}, not {want:?}")) }
    }

    /// The paths that requests or leases hold.
    fn held(&self) -> Vec<Path> {
        let requests = self.requests.iter();
        let held = requests.map(|request| (request.root, request.tokens[..request.done].to_vec()));
        held.chain(self.leases.iter().map(|pinned| pinned.path.clone())).collect()
    }

    fn give_back(&mut self, freed: Given, also_held: &[Path]) -> Result<(), String> {
        let held = [&self.held(), also_held].concat();
        self.model.free(&freed, &held)?;
        for freed in freed {
            match freed {
                Freed::Block(block) => self.free_blocks.push(block),
                Freed::Checkpoint(checkpoint) => self.free_checkpoints.push(checkpoint.0),
            }
        }
        Ok(())
    }

    fn check(&self) -> Result<(), String> {
        self.tree.audit()?;
        let (held, counts) = (self.held(), self.tree.counts());
        if self.model.counts() != (counts.blocks, counts.checkpoints) {
            return Err(format!("{counts:?} should be {:?}", self.model.counts()));
        }
        let most = self.model.evictable(&held);
        let evictable = (counts.evictable_blocks, counts.evictable_checkpoints);
        // A reference holds the whole segment that it ends in, although it may need only a part of it.
        let exact = self.requests.is_empty();
        if evictable.0 > most.0 || evictable.1 > most.1 || (exact && evictable != most) {
            return Err(format!("{evictable:?} can be evicted, should be {most:?}"));
        }
        if let Some(path) = self.model.dead(&held).filter(|_| exact) {
            return Err(format!("nobody can use {path:?}"));
        }
        self.requests.iter().try_for_each(|request| self.same_path(request))?;
        let own = self.requests.iter().flat_map(|request| &request.own);
        let blocks = self.free_blocks.iter().chain(own).map(|block| block.0);
        once(blocks.chain(self.model.blocks()), self.settings.blocks, "block")?;
        let checkpoints = self.free_checkpoints.iter().copied().chain(self.model.checkpoints());
        once(checkpoints, self.settings.checkpoints, "checkpoint")
    }
}

/// Checks that each of `total` numbers occurs exactly once.
fn once(all: impl Iterator<Item = u32>, total: u32, what: &str) -> Result<(), String> {
    let mut all: Vec<_> = all.collect();
    all.sort_unstable();
    if all.iter().copied().eq(0..total) {
        return Ok(());
    }
    Err(format!("each {what} should be at one place: {all:?}"))
}
