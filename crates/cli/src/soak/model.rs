//! A slow, plain model of what the ledger should share, save and evict. It shares no code with the prefix tree or the
//! ledger.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use dsv4_kv::{CacheConfig, Capacity, RequestId, StepRequest};

use super::prefixes::{Origin, Path, Prefixes, ROOT, Reference};
use crate::texts::then;

/// Tokens per block.
const BLOCK: u32 = 128;

/// What [`Model::counts`] counts.
pub const COUNTED: [&str; 8] = [
    "free blocks",
    "free checkpoints",
    "checkpoints of outputs",
    "shared blocks",
    "shared checkpoints",
    "blocks that can be evicted",
    "checkpoints that can be evicted",
    "segments",
];

/// A block of a request.
#[derive(Clone, Debug)]
enum Held {
    /// A block in the map.
    Shared,
    /// A block of the request, which its copies may share.
    Own(Rc<()>),
}

/// A request.
#[derive(Debug)]
struct Live {
    tokens: u32,
    blocks: Vec<Held>,
    /// `None` if the request does not share prefixes.
    shares: Option<Sharing>,
}

#[derive(Debug)]
struct Sharing {
    /// The last of its blocks that are in the map.
    at: Reference,
    /// The path of all tokens of the request, including those of a block that is not full.
    open: Path,
    /// Positions at which it should be saved, in ascending order.
    wanted: BTreeMap<u32, Origin>,
    /// The next position at which its answer should be saved.
    next_output: u32,
}

/// A checkpoint that a step takes.
#[derive(Clone, Copy, Debug)]
struct Save {
    id: RequestId,
    at: u32,
    origin: Origin,
}

/// The model.
#[derive(Debug)]
pub struct Model {
    prefixes: Prefixes,
    live: HashMap<RequestId, Live>,
    /// For each running request the last checkpoint of its answer, with its position; the oldest first.
    outputs: Vec<(RequestId, u32)>,
    /// Whether requests need blocks: not if no layer stores entries.
    has_blocks: bool,
    /// Whether requests share prefixes at all.
    shares: bool,
    keeps_outputs: bool,
    context: u32,
    interval: u32,
    /// Most tokens of a step, and most tokens after a position, with which a request can be saved after the step.
    max_decode_tokens: u32,
}

impl Sharing {
    /// Plans the next save of the answer. The request has `tokens` tokens, which reach at least the last boundary of
    /// its prompt.
    fn want_output(&mut self, tokens: u32, context: u32) {
        if tokens >= self.next_output {
            self.next_output = (tokens / BLOCK + 1) * BLOCK;
            if self.next_output <= context {
                self.wanted.insert(self.next_output, Origin::Output);
            }
        }
    }
}

impl Model {
    /// An empty cache of this configuration.
    pub fn new(config: &CacheConfig) -> Self {
        let has_blocks = Capacity::new(config).block_bytes > 0;
        Self {
            prefixes: Prefixes::new(config),
            live: HashMap::new(),
            outputs: Vec::new(),
            has_blocks,
            shares: has_blocks && config.num_checkpoints > 0,
            keeps_outputs: config.keep_outputs,
            context: config.max_context,
            interval: config.checkpoint_interval,
            max_decode_tokens: config.max_draft + 1,
        }
    }

    /// Blocks of a request with `tokens` tokens: one for each 128 tokens in which an entry (of 4 tokens) has closed.
    fn blocks_of(&self, tokens: u32) -> usize {
        if self.has_blocks { (tokens / 4).div_ceil(BLOCK / 4) as usize } else { 0 }
    }

    /// The numbers of [`COUNTED`].
    pub fn counts(&self) -> [i64; 8] {
        let Prefixes { free_blocks, free_checkpoints, .. } = self.prefixes;
        let outputs = self.outputs.len() as i64;
        let [blocks, saved, unheld, unheld_saved, segments] = self.prefixes.counts();
        [free_blocks, free_checkpoints, outputs, blocks, saved, unheld, unheld_saved, segments]
    }

    /// Admits a request with `prompt`, or without sharing. The ledger reused `reused` tokens, and so does the model.
    /// Returns the number of tokens that the model would have reused.
    pub fn admit(&mut self, id: RequestId, prompt: Option<&[u32]>, reused: u32) -> u32 {
        let Some(prompt) = prompt.filter(|_| self.shares) else {
            self.live.insert(id, Live { tokens: 0, blocks: Vec::new(), shares: None });
            return 0;
        };
        let last = (prompt.len() as u32).saturating_sub(1) / BLOCK;
        let reused = reused / BLOCK;
        let mut path = ROOT;
        let mut paths = Vec::new();
        for block in prompt.chunks_exact(BLOCK as usize).take(last as usize) {
            path = block.iter().fold(path, |path, &token| then(path, token));
            if !self.prefixes.contains(path) && paths.len() as u32 >= reused {
                break;
            }
            paths.push(path);
        }
        let matched = paths.iter().take_while(|path| self.prefixes.contains(**path)).count();
        let is_saved = |path: &Path| self.prefixes.is_saved(*path);
        let expected = paths[..matched].iter().rposition(is_saved).map_or(0, |last| last + 1);
        let at = self.refer(&paths[..reused as usize], matched);
        self.prefixes.use_now(at.end);
        let shares = Sharing {
            open: at.end,
            at,
            wanted: self.wanted(reused, matched as u32, last),
            next_output: 0,
        };
        let answered = reused.max(last) * BLOCK;
        let blocks = vec![Held::Shared; reused as usize];
        self.enter(id, (reused * BLOCK, blocks), Some(shares), answered);
        expected as u32 * BLOCK
    }

    /// A reference to the last of `paths`, of which the first `matched` are in the map. The others, which only the
    /// ledger has, are added, so that one difference does not cause others.
    fn refer(&mut self, paths: &[Path], matched: usize) -> Reference {
        let (known, new) = paths.split_at(matched.min(paths.len()));
        let mut at = self.prefixes.refer(known.last().copied().unwrap_or(ROOT));
        self.prefixes.free_blocks -= self.prefixes.extend(&mut at, new) as i64;
        at
    }

    /// Enters a request. Its answer is saved from the first boundary after `answered` tokens on.
    fn enter(
        &mut self,
        id: RequestId,
        (tokens, blocks): (u32, Vec<Held>),
        mut shares: Option<Sharing>,
        answered: u32,
    ) {
        if let Some(shares) = shares.as_mut().filter(|_| self.keeps_outputs) {
            shares.want_output(answered, self.context);
        }
        self.live.insert(id, Live { tokens, blocks, shares });
    }

    /// The positions at which a prompt should be saved. Of its blocks, `reused` are reused, `matched` are in the map,
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
        want(matched * BLOCK, Origin::Branch);
        want(last * BLOCK, Origin::Prompt);
        wanted
    }

    /// Applies a step that the ledger has run. `tokens` are those of its requests, in its order.
    pub fn step(&mut self, step: &[StepRequest], tokens: &[u32]) {
        let live = |part: &StepRequest| &self.live[&part.id];
        let more = |part: &StepRequest| {
            self.blocks_of(part.start + part.tokens).saturating_sub(live(part).blocks.len())
        };
        let new: usize = step.iter().map(more).sum();
        self.prefixes.take_blocks(new as i64);
        let mut written = self.passed(step);
        let is_chunk = |part: &StepRequest| part.tokens > self.max_decode_tokens;
        let room = if step.iter().any(is_chunk) { self.take_checkpoints(written.len()) } else { 0 };
        let due = written.split_off(room);
        let mut left = tokens;
        for part in step {
            let (tokens, others) = left.split_at(part.tokens as usize);
            left = others;
            self.commit(part, tokens);
        }
        written.into_iter().for_each(|save| self.save(save));
        // After the step a request has only what the last of these positions needs, if it is not too far behind.
        let last = due.chunk_by(|one, next| one.id == next.id).filter_map(<[_]>::last).copied();
        let can_save = |save: &Save| self.live[&save.id].tokens - save.at <= self.max_decode_tokens;
        let mut due: Vec<_> = last.filter(can_save).collect();
        due.truncate(self.take_checkpoints(due.len()));
        due.into_iter().for_each(|save| self.save(save));
    }

    /// Removes and returns the wanted positions that a step passes.
    fn passed(&mut self, step: &[StepRequest]) -> Vec<Save> {
        let mut passed = Vec::new();
        for &StepRequest { id, start, tokens } in step {
            let shares = self.live.get_mut(&id).and_then(|live| live.shares.as_mut());
            let Some(Sharing { wanted, .. }) = shares else { continue };
            let later = wanted.split_off(&(start + tokens + 1));
            let here = std::mem::replace(wanted, later).into_iter();
            passed.extend(here.map(|(at, origin)| Save { id, at, origin }));
        }
        passed
    }

    /// Takes `count` checkpoints, or as many as there are: those that are free, then those that can be evicted, then
    /// the oldest ones of answers.
    fn take_checkpoints(&mut self, count: usize) -> usize {
        self.prefixes.evict_checkpoints(count as i64);
        let free = &mut self.prefixes.free_checkpoints;
        let short = (count as i64 - *free).max(0) as usize;
        *free += self.outputs.drain(..short.min(self.outputs.len())).len() as i64;
        let taken = (count as i64).min(*free).max(0);
        *free -= taken;
        taken as usize
    }

    /// Commits the tokens of a request's step. Blocks that they fill are shared, unless an equal block is in the map
    /// already.
    fn commit(&mut self, part: &StepRequest, tokens: &[u32]) {
        let blocks = self.blocks_of(part.start + part.tokens);
        let Some(live) = self.live.get_mut(&part.id) else { return };
        let held = blocks.max(live.blocks.len());
        live.blocks.resize_with(held, || Held::Own(Rc::new(())));
        live.tokens += part.tokens;
        let Some(shares) = &mut live.shares else { return };
        let mut full = Vec::new();
        for (&token, at) in tokens.iter().zip(part.start + 1..) {
            shares.open = then(shares.open, token);
            full.extend(at.is_multiple_of(BLOCK).then_some(shares.open));
        }
        let added = self.prefixes.extend(&mut shares.at, &full);
        let end = (live.tokens / BLOCK) as usize;
        live.blocks[end - added..end].fill(Held::Shared);
        if self.keeps_outputs {
            shares.want_output(live.tokens, self.context);
        }
    }

    /// Records a checkpoint. For an answer only the last one is kept, aside.
    fn save(&mut self, save: Save) {
        if save.origin != Origin::Output {
            return self.attach(save);
        }
        let others = self.outputs.len();
        self.outputs.retain(|(of, _)| *of != save.id);
        self.prefixes.free_checkpoints += (others - self.outputs.len()) as i64;
        self.outputs.push((save.id, save.at));
    }

    /// Moves the checkpoint of an answer to the map.
    fn keep_output(&mut self, id: RequestId) {
        if let Some(place) = self.outputs.iter().position(|(of, _)| *of == id) {
            let (_, at) = self.outputs.remove(place);
            self.attach(Save { id, at, origin: Origin::Output });
        }
    }

    /// Adds a checkpoint to the map, unless the block has one.
    fn attach(&mut self, Save { id, at, origin }: Save) {
        let path = self.live.get(&id).and_then(|Live { tokens, shares, .. }| {
            self.prefixes.above(shares.as_ref()?.at.end, tokens / BLOCK - at / BLOCK)
        });
        let is_taken = path.is_some_and(|path| self.prefixes.attach(path, origin));
        self.prefixes.free_checkpoints += i64::from(!is_taken);
    }

    /// Ends a request.
    pub fn release(&mut self, id: RequestId) {
        self.keep_output(id);
        let Some(Live { blocks, shares, .. }) = self.live.remove(&id) else { return };
        if let Some(Sharing { at, .. }) = shares {
            self.prefixes.release(&at);
        }
        for held in blocks {
            if let Held::Own(block) = held {
                self.prefixes.free_blocks += i64::from(Rc::into_inner(block).is_some());
            }
        }
    }

    /// Copies a request. A block that is not full is copied too.
    pub fn fork(&mut self, of: RequestId, id: RequestId) {
        let Some(Live { tokens, blocks, shares }) = self.live.get(&of) else { return };
        let tokens = *tokens;
        let (all, full) = (self.blocks_of(tokens), (tokens / BLOCK) as usize);
        let mut blocks = blocks[..all.min(full)].to_vec();
        let place = shares.as_ref().map(|shares| (shares.at.end, shares.open));
        if all > full {
            self.prefixes.take_blocks(1);
            blocks.push(Held::Own(Rc::new(())));
        }
        // All that the copy computes is its answer.
        let shares = place.map(|(end, open)| {
            let at = self.prefixes.refer(end);
            Sharing { at, open, wanted: BTreeMap::new(), next_output: 0 }
        });
        self.enter(id, (tokens, blocks), shares, tokens);
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
}
