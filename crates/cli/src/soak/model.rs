//! A slow, plain model of what the ledger should share and evict: a map of prefixes with one entry per block of 128
//! tokens, and the default eviction policy. It shares no code with the prefix tree or the ledger.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::rc::Rc;

use dsv4_kv::{CacheConfig, Capacity, RequestId, StepRequest};

use crate::texts::{mixed, then};

/// Tokens per block.
const BLOCK: u32 = 128;

/// A hash of all tokens up to the end of a block. 0 is the root, before the first block.
type Path = u64;

/// Paths are hashes already, and are not hashed again.
#[derive(Default)]
struct AsItIs(u64);

impl Hasher for AsItIs {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.0 = mixed(self.0 ^ u64::from(byte)));
    }

    fn write_u64(&mut self, path: u64) {
        self.0 = path;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// Why a checkpoint was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Prompt,
    Junction,
    Interval,
    /// The last boundary of an answer.
    Output,
}

/// A checkpoint at the end of a block.
#[derive(Clone, Copy, Debug)]
struct Saved {
    origin: Origin,
    /// Value of `shared_bytes` when it was last used.
    last_use: i64,
    hits: i64,
    /// Number of the checkpoint. Among checkpoints of equal rank the oldest is evicted first.
    number: u64,
}

/// A block that requests may share.
#[derive(Debug, Default)]
struct Entry {
    above: Path,
    below: Vec<Path>,
    /// Number of requests that end at this block or below it.
    holds: u32,
    saved: Option<Saved>,
}

/// A block of a request.
#[derive(Clone, Debug)]
enum Held {
    /// A block in the map.
    Shared,
    /// A block of the request, which its copies may share.
    Own(Rc<()>),
}

/// A request.
#[derive(Clone, Debug)]
struct Live {
    tokens: u32,
    blocks: Vec<Held>,
    /// `None` if the request does not share prefixes.
    shares: Option<Sharing>,
}

#[derive(Clone, Debug)]
struct Sharing {
    /// The path of its last block that is in the map.
    end: Path,
    /// The block that it holds: the last of the run that contains `end` and that has no branch and no checkpoint
    /// inside.
    held: Path,
    /// The path of all tokens of the request, including those after `end`.
    open: Path,
    /// Positions at which it should be saved, in ascending order.
    wanted: BTreeMap<u32, Origin>,
    /// The next position at which its answer should be saved; `None` if answers are not saved.
    next_output: Option<u32>,
}

/// The model.
#[derive(Debug)]
pub struct Model {
    entries: HashMap<Path, Entry, BuildHasherDefault<AsItIs>>,
    live: HashMap<RequestId, Live>,
    /// Paths that have a checkpoint.
    saved: Vec<Path>,
    /// For each running request the last checkpoint of its answer, with its position; the oldest first.
    outputs: Vec<(RequestId, u32)>,
    keeps_outputs: bool,
    context: u32,
    free_blocks: i64,
    free_checkpoints: i64,
    interval: u32,
    block_bytes: i64,
    checkpoint_bytes: i64,
    capacity: i64,
    /// Bytes that were ever shared.
    shared_bytes: i64,
    /// Number of checkpoints that were ever shared.
    numbers: u64,
}

/// Blocks of a request with `tokens` tokens: one for each 128 tokens in which an entry (of 4 tokens) has closed.
fn blocks_of(tokens: u32) -> usize {
    (tokens / 4).div_ceil(BLOCK / 4) as usize
}

impl Sharing {
    /// Plans the next save of the answer. The request has `tokens` tokens, which reach at least the last boundary of
    /// its prompt.
    fn want_output(&mut self, tokens: u32, context: u32) {
        let Some(next) = self.next_output.as_mut().filter(|next| tokens >= **next) else { return };
        *next = (tokens / BLOCK + 1) * BLOCK;
        if *next <= context {
            self.wanted.insert(*next, Origin::Output);
        }
    }
}

impl Model {
    /// An empty cache of this configuration.
    pub fn new(config: &CacheConfig) -> Self {
        let Capacity { block_bytes, checkpoint_bytes, blocks, checkpoints, .. } =
            Capacity::new(config);
        let (block_bytes, checkpoint_bytes) = (block_bytes as i64, checkpoint_bytes as i64);
        let (free_blocks, free_checkpoints) = (i64::from(blocks), i64::from(checkpoints));
        Self {
            entries: HashMap::default(),
            live: HashMap::new(),
            saved: Vec::new(),
            outputs: Vec::new(),
            keeps_outputs: config.keep_outputs,
            context: config.max_context,
            free_blocks,
            free_checkpoints,
            interval: config.checkpoint_interval,
            block_bytes,
            checkpoint_bytes,
            capacity: free_blocks * block_bytes + free_checkpoints * checkpoint_bytes,
            shared_bytes: 0,
            numbers: 0,
        }
    }

    /// Admits a request with `prompt`, or without sharing. The ledger reused `reused` tokens, and so does the model.
    /// Returns the number of tokens that the model would have reused.
    pub fn admit(&mut self, id: RequestId, prompt: Option<&[u32]>, reused: u32) -> u32 {
        let Some(prompt) = prompt else {
            self.live.insert(id, Live { tokens: 0, blocks: Vec::new(), shares: None });
            return 0;
        };
        let last = (prompt.len() as u32).saturating_sub(1) / BLOCK;
        let (mut path, mut matched, mut expected) = (0, 0, 0);
        let mut paths = Vec::new();
        for block in prompt.chunks_exact(BLOCK as usize).take(last as usize) {
            let next = block.iter().fold(path, |path, &token| then(path, token));
            let entry = self.entries.get(&next);
            if entry.is_none() && paths.len() as u32 >= reused / BLOCK {
                break;
            }
            // Blocks that only the ledger has are added to the map, so that one difference does not cause others.
            matched += u32::from(entry.is_some());
            if entry.is_some_and(|entry| entry.saved.is_some()) {
                expected = matched;
            }
            self.free_blocks -= i64::from(self.share(path, next));
            path = next;
            paths.push(path);
        }
        let reused = reused / BLOCK;
        let end = (reused as usize).checked_sub(1).map_or(0, |last| paths[last]);
        let held = self.hold(end);
        self.use_now(end);
        let wanted = self.wanted(reused, matched, last);
        let next_output = self.keeps_outputs.then_some(0);
        let mut sharing = Sharing { end, held, open: end, wanted, next_output };
        sharing.want_output(reused.max(last) * BLOCK, self.context);
        let blocks = (0..reused).map(|_| Held::Shared).collect();
        self.live.insert(id, Live { tokens: reused * BLOCK, blocks, shares: Some(sharing) });
        expected * BLOCK
    }

    /// The positions at which a prompt should be saved. Of its blocks, `reused` are reused, `matched` are in the tree,
    /// and `last` could be.
    fn wanted(&self, reused: u32, matched: u32, last: u32) -> BTreeMap<u32, Origin> {
        let mut wanted = BTreeMap::new();
        let mut want = |at: u32, origin| {
            if at > reused * BLOCK && at <= last * BLOCK {
                wanted.insert(at, origin);
            }
        };
        let most = (last * BLOCK).checked_div(self.interval).unwrap_or(0);
        (1..=most).for_each(|at| want(at * self.interval, Origin::Interval));
        want(matched * BLOCK, Origin::Junction);
        want(last * BLOCK, Origin::Prompt);
        wanted
    }

    /// Applies a step that the ledger has run. `tokens` are those of its requests, in its order.
    pub fn step(&mut self, step: &[StepRequest], tokens: &[u32]) {
        let live = |part: &StepRequest| &self.live[&part.id];
        let more = |part: &StepRequest| {
            blocks_of(part.start + part.tokens).saturating_sub(live(part).blocks.len())
        };
        let new: usize = step.iter().map(more).sum();
        self.evict(new as i64 - self.free_blocks, 0);
        self.free_blocks -= new as i64;
        let saves = self.plan_saves(step);
        let mut left = tokens;
        for part in step {
            let (tokens, others) = left.split_at(part.tokens as usize);
            left = others;
            self.commit(part, tokens);
        }
        for (id, at, origin) in saves {
            self.save(id, at, origin);
        }
    }

    /// Ends a request.
    pub fn release(&mut self, id: RequestId) {
        self.keep_output(id);
        let Some(Live { blocks, shares, .. }) = self.live.remove(&id) else { return };
        if let Some(Sharing { held, .. }) = shares {
            self.let_go(held);
        }
        for held in blocks {
            if let Held::Own(block) = held {
                self.free_blocks += i64::from(Rc::into_inner(block).is_some());
            }
        }
    }

    /// Copies a request. A block that is not full is copied too.
    pub fn fork(&mut self, of: RequestId, id: RequestId) {
        let Some(mut copy) = self.live.get(&of).cloned() else { return };
        let (all, full) = (blocks_of(copy.tokens), (copy.tokens / BLOCK) as usize);
        copy.blocks.truncate(all.min(full));
        if all > full {
            self.evict(1 - self.free_blocks, 0);
            self.free_blocks -= 1;
            copy.blocks.push(Held::Own(Rc::new(())));
        }
        if let Some(Sharing { end, held, wanted, .. }) = &mut copy.shares {
            *held = self.hold(*end);
            // The save positions of a prompt are set at admission, and are not copied.
            wanted.retain(|_, origin| *origin == Origin::Output);
        }
        self.live.insert(id, copy);
    }

    /// Suspends a request.
    pub fn suspend(&mut self, id: RequestId) {
        self.keep_output(id);
    }

    /// Changes the handle of a request.
    pub fn rename(&mut self, from: RequestId, to: RequestId) {
        if let Some(live) = self.live.remove(&from) {
            self.live.insert(to, live);
        }
    }

    /// The requests that the step saves, and the positions, as long as checkpoints are free. Steps without a chunk save
    /// nothing.
    fn plan_saves(&mut self, step: &[StepRequest]) -> Vec<(RequestId, u32, Origin)> {
        let mut saves = Vec::new();
        for part in step {
            let inside = part.start + 1..=part.start + part.tokens;
            let shares = self.live.get_mut(&part.id).and_then(|live| live.shares.as_mut());
            let passed = shares.map(|shares| {
                let later = shares.wanted.split_off(&(inside.end() + 1));
                std::mem::replace(&mut shares.wanted, later)
            });
            saves.extend(passed.into_iter().flatten().map(|(at, origin)| (part.id, at, origin)));
        }
        if step.iter().all(|part| part.tokens == 1) {
            return Vec::new();
        }
        self.evict(0, saves.len() as i64 - self.free_checkpoints);
        let short = (saves.len() as i64 - self.free_checkpoints).max(0) as usize;
        self.free_checkpoints += self.outputs.drain(..short.min(self.outputs.len())).len() as i64;
        saves.truncate(self.free_checkpoints.max(0) as usize);
        self.free_checkpoints -= saves.len() as i64;
        saves
    }

    /// Commits the tokens of a request's step. Blocks that they fill are shared, unless an equal block is in the map
    /// already.
    fn commit(&mut self, part: &StepRequest, tokens: &[u32]) {
        let Some(mut live) = self.live.remove(&part.id) else { return };
        let held = blocks_of(part.start + part.tokens).max(live.blocks.len());
        live.blocks.resize_with(held, || Held::Own(Rc::new(())));
        if let Some(sharing) = &mut live.shares {
            let (end, held) = (sharing.end, sharing.held);
            for &token in tokens {
                live.tokens += 1;
                sharing.open = then(sharing.open, token);
                if live.tokens.is_multiple_of(BLOCK) {
                    let block = &mut live.blocks[(live.tokens / BLOCK - 1) as usize];
                    if self.share(sharing.end, sharing.open) {
                        *block = Held::Shared;
                    }
                    sharing.end = sharing.open;
                }
            }
            sharing.want_output(live.tokens, self.context);
            if sharing.end != end {
                sharing.held = self.hold(sharing.end);
                self.let_go(held);
            }
        } else {
            live.tokens += part.tokens;
        }
        self.live.insert(part.id, live);
    }

    /// Adds a block to the map, unless it is there. Returns whether it was added.
    fn share(&mut self, above: Path, path: Path) -> bool {
        if self.entries.contains_key(&path) {
            return false;
        }
        self.shared_bytes += self.block_bytes;
        self.entries.insert(path, Entry { above, ..Entry::default() });
        if let Some(entry) = self.entries.get_mut(&above) {
            entry.below.push(path);
        }
        true
    }

    /// Records a checkpoint. For an answer only the last one is kept, aside.
    fn save(&mut self, id: RequestId, at: u32, origin: Origin) {
        if origin != Origin::Output {
            return self.enter(id, at, origin);
        }
        let others = self.outputs.len();
        self.outputs.retain(|(of, _)| *of != id);
        self.free_checkpoints += (others - self.outputs.len()) as i64;
        self.outputs.push((id, at));
    }

    /// Moves the checkpoint of an answer to the map.
    fn keep_output(&mut self, id: RequestId) {
        if let Some(place) = self.outputs.iter().position(|(of, _)| *of == id) {
            let (_, at) = self.outputs.remove(place);
            self.enter(id, at, Origin::Output);
        }
    }

    /// Adds a checkpoint to the map, unless the block has one.
    fn enter(&mut self, id: RequestId, at: u32, origin: Origin) {
        let path = self.live.get(&id).and_then(|live| self.path_at(live, at));
        let entry = path.and_then(|path| self.entries.get_mut(&path));
        match entry.filter(|entry| entry.saved.is_none()) {
            None => self.free_checkpoints += 1,
            Some(entry) => {
                self.shared_bytes += self.checkpoint_bytes;
                self.numbers += 1;
                let (last_use, number) = (self.shared_bytes, self.numbers);
                entry.saved = Some(Saved { origin, last_use, hits: 0, number });
                self.saved.extend(path);
            }
        }
    }

    /// The path of a request's block that ends at a position.
    fn path_at(&self, live: &Live, at: u32) -> Option<Path> {
        let mut path = live.shares.as_ref()?.end;
        for _ in at / BLOCK..live.tokens / BLOCK {
            path = self.entries.get(&path)?.above;
        }
        Some(path)
    }

    /// Holds a block and those above it. Returns the block that is held: the tree refers to runs of blocks, and holds
    /// whole runs.
    fn hold(&mut self, path: Path) -> Path {
        let mut end = path;
        while let Some(Entry { below, saved: None, .. }) = self.entries.get(&end)
            && let [only] = below[..]
        {
            end = only;
        }
        let mut next = end;
        while let Some(entry) = self.entries.get_mut(&next) {
            entry.holds += 1;
            next = entry.above;
        }
        end
    }

    /// Releases what [`Self::hold`] held, and frees blocks that cannot be reused any more.
    fn let_go(&mut self, held: Path) {
        let mut next = held;
        while let Some(entry) = self.entries.get_mut(&next) {
            entry.holds -= 1;
            next = entry.above;
        }
        self.trim(held);
    }

    /// Frees a block from which no request can continue, and such blocks above it.
    fn trim(&mut self, mut path: Path) {
        while let Some(Entry { above, below, holds: 0, saved: None }) = self.entries.get(&path)
            && below.is_empty()
        {
            let above = *above;
            self.entries.remove(&path);
            self.free_blocks += 1;
            if let Some(entry) = self.entries.get_mut(&above) {
                entry.below.retain(|&below| below != path);
            }
            path = above;
        }
    }

    /// Records that a request continues from a checkpoint: this one and those above it were used now.
    fn use_now(&mut self, hit: Path) {
        let now = self.shared_bytes;
        let mut next = hit;
        while let Some(Entry { above, saved, .. }) = self.entries.get_mut(&next) {
            if let Some(saved) = saved {
                saved.last_use = now;
                saved.hits += i64::from(next == hit);
            }
            next = *above;
        }
    }

    /// Evicts until `blocks` more blocks and `checkpoints` more checkpoints are free.
    fn evict(&mut self, blocks: i64, checkpoints: i64) {
        let free = self.free_checkpoints;
        while self.free_checkpoints < free + checkpoints && self.evict_first(true) {}
        let free = self.free_blocks;
        while self.free_blocks < free + blocks && self.evict_first(false) {}
    }

    /// Evicts the checkpoint of the lowest rank that no request holds: one at the end of a path or, if `expendable`
    /// ones may be evicted, one of an interval or an answer that was never hit.
    fn evict_first(&mut self, expendable: bool) -> bool {
        let rank = |(place, path): (usize, &Path)| {
            let entry = &self.entries[path];
            let Saved { origin, last_use, hits, number } = entry.saved?;
            let unused = matches!(origin, Origin::Interval | Origin::Output) && hits == 0;
            let may_go = entry.holds == 0 && (entry.below.is_empty() || (expendable && unused));
            let quarter = self.capacity / 4;
            let rank = last_use + hits.min(3) * quarter - if unused { 5 * quarter } else { 0 };
            may_go.then_some((rank, number, place))
        };
        let first = self.saved.iter().enumerate().filter_map(rank).min();
        let Some((_, _, place)) = first else { return false };
        let path = self.saved.swap_remove(place);
        if let Some(entry) = self.entries.get_mut(&path) {
            entry.saved = None;
        }
        self.free_checkpoints += 1;
        self.trim(path);
        true
    }
}
