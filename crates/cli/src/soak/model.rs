//! What the ledger should share and evict, slow and plain: a map of prefixes, one entry for each block of 128 tokens,
//! with the default policy. It shares no code with the prefix tree or the ledger.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::rc::Rc;

use dsv4_kv::{CacheConfig, Capacity, RequestId, StepRequest};

use crate::texts::{mixed, then};

/// Tokens of a block.
const BLOCK: u32 = 128;

/// All tokens down to the end of a block, in a number. 0 is before the first block.
type Path = u64;

/// Paths are as good as hashed.
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

/// Why a checkpoint is where it is.
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
    /// Bytes that had been shared when it was last used.
    last_use: i64,
    hits: i64,
    /// Counts checkpoints, to tell equal ones apart.
    number: u64,
}

/// A block that requests may share.
#[derive(Debug, Default)]
struct Entry {
    above: Path,
    below: Vec<Path>,
    /// Requests that end at or below it.
    holds: u32,
    saved: Option<Saved>,
}

/// A block of a request.
#[derive(Clone, Debug)]
enum Held {
    /// One of the map.
    Shared,
    /// Its own, or one that its copies have too.
    Own(Rc<()>),
}

/// A request.
#[derive(Clone, Debug)]
struct Live {
    tokens: u32,
    blocks: Vec<Held>,
    /// `None` if it shares nothing.
    shares: Option<Sharing>,
}

#[derive(Clone, Debug)]
struct Sharing {
    /// The last block of it that is in the map.
    end: Path,
    /// What it holds: the last block of a run without a branch or a checkpoint that `end` is in.
    held: Path,
    /// The path of the tokens behind `end`.
    open: Path,
    /// Positions at which it is to be saved, upwards.
    wanted: BTreeMap<u32, Origin>,
    /// Where its answer is to be saved next; none of an answer that is not.
    next_output: Option<u32>,
}

/// The model.
#[derive(Debug)]
pub struct Model {
    entries: HashMap<Path, Entry, BuildHasherDefault<AsItIs>>,
    live: HashMap<RequestId, Live>,
    /// Prefixes that have a checkpoint.
    saved: Vec<Path>,
    /// The last checkpoint of the answers of requests that run, and its position, the oldest first.
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
    /// Checkpoints that were ever shared.
    numbers: u64,
}

/// Blocks that requests with so many tokens hold: one for each 128 tokens of which an entry, of 4 tokens, exists.
fn blocks_of(tokens: u32) -> usize {
    (tokens / 4).div_ceil(BLOCK / 4) as usize
}

impl Sharing {
    /// The request has so many tokens, the last of its prompt's boundaries at least: its answer is to be saved at the
    /// next.
    fn want_output(&mut self, tokens: u32, context: u32) {
        let Some(next) = self.next_output.as_mut().filter(|next| tokens >= **next) else { return };
        *next = (tokens / BLOCK + 1) * BLOCK;
        if *next <= context {
            self.wanted.insert(*next, Origin::Output);
        }
    }
}

impl Model {
    /// An empty cache of that configuration.
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

    /// A request begins with `prompt`, or shares nothing. In the ledger it has `reused` tokens of it already, and so
    /// it has here; how many it should have.
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
            // What only the ledger has is there from now on, so that one difference makes no others.
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

    /// Where a prompt of which so many blocks are reused, are there, and can be, is to be saved.
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

    /// A step that the ledger has run: `tokens` are those of its requests, in its order.
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

    /// A request ends.
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

    /// A copy of a request begins: of a block that is not full it gets one of its own.
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
            // Where a prompt is to be saved is said when a request is admitted, and is not copied.
            wanted.retain(|_, origin| *origin == Origin::Output);
        }
        self.live.insert(id, copy);
    }

    /// A request gives its slot up.
    pub fn suspend(&mut self, id: RequestId) {
        self.keep_output(id);
    }

    /// A request goes on under another name.
    pub fn rename(&mut self, from: RequestId, to: RequestId) {
        if let Some(live) = self.live.remove(&from) {
            self.live.insert(to, live);
        }
    }

    /// Which requests the step saves, where: while checkpoints are free, and in steps that have a chunk.
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

    /// The tokens of a request's step become final: blocks that they fill are shared, by who fills them first.
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

    /// A block becomes everybody's, unless the map has it.
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

    /// A request was saved. Of answers the last checkpoint is kept, aside.
    fn save(&mut self, id: RequestId, at: u32, origin: Origin) {
        if origin != Origin::Output {
            return self.enter(id, at, origin);
        }
        let others = self.outputs.len();
        self.outputs.retain(|(of, _)| *of != id);
        self.free_checkpoints += (others - self.outputs.len()) as i64;
        self.outputs.push((id, at));
    }

    /// The checkpoint of an answer becomes everybody's.
    fn keep_output(&mut self, id: RequestId) {
        if let Some(place) = self.outputs.iter().position(|(of, _)| *of == id) {
            let (_, at) = self.outputs.remove(place);
            self.enter(id, at, Origin::Output);
        }
    }

    /// A checkpoint becomes everybody's, unless there is one.
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

    /// The block of a request that ends at a position.
    fn path_at(&self, live: &Live, at: u32) -> Option<Path> {
        let mut path = live.shares.as_ref()?.end;
        for _ in at / BLOCK..live.tokens / BLOCK {
            path = self.entries.get(&path)?.above;
        }
        Some(path)
    }

    /// Holds a block and those above it; what is held. The tree refers to runs of blocks, and holds them whole.
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

    /// Lets go of what [`Self::hold`] held, and frees what nobody can use.
    fn let_go(&mut self, held: Path) {
        let mut next = held;
        while let Some(entry) = self.entries.get_mut(&next) {
            entry.holds -= 1;
            next = entry.above;
        }
        self.trim(held);
    }

    /// Frees a block that nobody can go on from, and those above it.
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

    /// Someone goes on from a checkpoint: it and those above it were used now.
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

    /// Evicts until so many blocks and checkpoints more are free.
    fn evict(&mut self, blocks: i64, checkpoints: i64) {
        let free = self.free_checkpoints;
        while self.free_checkpoints < free + checkpoints && self.evict_first(true) {}
        let free = self.free_blocks;
        while self.free_blocks < free + blocks && self.evict_first(false) {}
    }

    /// Evicts the checkpoint of the lowest rank that nobody holds: of a path's end, or of an interval or an answer
    /// that was never hit if `expendable` ones may go.
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
