//! Random caches and random operations: mostly valid ones, as from a server, and sometimes invalid ones.

pub mod reuse;
pub mod tier;

use std::ops::Range;

use dsv4_kv::{Bucket, CacheConfig, LayerGroup};
use kv_layout::config::ModelConfig;
use kv_layout::geometry::LayerKind;
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use super::cache::buckets;
use super::model::{Model, Progress, Request};
use super::op::{Accept, Launches, Layers, Name, Op, Part, Step};
use super::text::Text;

/// Which operations a generator makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manners {
    /// All operations, also those that are refused.
    Any,
    /// Commits accept only genuine tokens, so that the bytes of every request are known.
    Genuine,
}

/// The range of random numbers in [`Generator::reuse`] that leads to [`Generator::copies`].
const COPIES: Range<u32> = 6..16;

/// Xored into the seed of [`kernel_config`], which would else draw the same random numbers as [`config`], so that one
/// setting would decide another. Tests of mistakes have seeds below 7, chosen by hand. With this value these seeds have
/// the formats for which they were chosen.
const KERNELS: u64 = 0x6b65_726e_0009_0297;

/// Generates the operations of an endless script.
pub struct Generator {
    random: SmallRng,
    manners: Manners,
    names: Name,
    /// Names of the last few released requests.
    gone: Vec<Name>,
    /// The last few prompts.
    said: Vec<Text>,
    /// Requests that compute their prompt at once, and are then released.
    visitors: Vec<Name>,
}

/// A small cache that runs out of slots, blocks and everything else.
#[must_use]
pub fn config(seed: u64) -> CacheConfig {
    let mut random = SmallRng::seed_from_u64(seed);
    let mut model = ModelConfig::preset("tiny").expect("a preset");
    match random.random_range(0..16) {
        0 => model.layers = vec![LayerKind::Swa; 2],
        // The model has no draft layers.
        1 => model.mtp_layers = 0,
        2 => {
            model.layers.push(LayerKind::Swa);
            model.mtp_layers = 2;
        }
        _ => {}
    }
    CacheConfig {
        max_draft: *[0, 1, 3, 8].choose(&mut random).expect("not empty"),
        max_requests: random.random_range(1..=12),
        num_blocks: random.random_range(1..=40),
        max_context: random.random_range(1..=1500),
        max_step_tokens: random.random_range(1..=500),
        max_suspended: random.random_range(0..=3),
        ..CacheConfig::new(model)
    }
}

/// A small cache with layers of every kind, for runs with kernels; its memory is poisoned.
#[must_use]
pub fn kernel_config(seed: u64) -> CacheConfig {
    let mut random = SmallRng::seed_from_u64(seed ^ KERNELS);
    let max_context = random.random_range(1..=300);
    CacheConfig {
        main_format: *MainFormat::ALL.choose(&mut random).expect("not empty"),
        index_format: *IndexFormat::ALL.choose(&mut random).expect("not empty"),
        max_requests: random.random_range(1..=4),
        num_blocks: random.random_range(1..=8),
        max_context,
        max_step_tokens: random.random_range(8..=300),
        poison: true,
        ..config(seed)
    }
}

impl Generator {
    /// The operations of a seed.
    #[must_use]
    pub fn new(seed: u64, manners: Manners) -> Self {
        Self {
            random: SmallRng::seed_from_u64(!seed),
            manners,
            names: 0,
            gone: Vec::new(),
            said: Vec::new(),
            visitors: Vec::new(),
        }
    }

    /// The next operation, which depends on the state after the previous ones.
    pub fn next(&mut self, model: &Model) -> Op {
        if model.has_tier() && self.random.random_ratio(2, 3) {
            return self.tier(model);
        }
        if model.shares() && self.random.random_ratio(1, 4) {
            return self.reuse(model);
        }
        if !model.shares() && self.random.random_ratio(1, 6) {
            let kind = self.random.random_range(COPIES);
            return self.copies(kind, model);
        }
        match self.random.random_range(0..100) {
            0..12 if self.has_prompt(model) => self.admit_with(model),
            0..12 => self.admit(),
            12..32 if model.has_tier() => self.release(model),
            12..22 => self.release(model),
            22..30 => self.rewind(model),
            _ => Op::Step(self.step(model)),
        }
    }

    /// Whether the next request is admitted with its prompt. With a host tier every request is, since the seeds of
    /// those runs were chosen by hand.
    fn has_prompt(&mut self, model: &Model) -> bool {
        model.shares() && (model.has_tier() || !self.random.random_ratio(1, 8))
    }

    fn admit(&mut self) -> Op {
        self.names += 1;
        Op::Admit(self.names)
    }

    /// A live request, or sometimes one that does not exist.
    fn anyone(&mut self, model: &Model) -> Name {
        let live: Vec<_> = model.live().map(|(_, request)| request.name).collect();
        let stale = self.random.random_ratio(1, 30);
        match live.choose(&mut self.random) {
            Some(&name) if !stale => name,
            // No request is ever called 0.
            _ if self.random.random_ratio(1, 4) => 0,
            _ => self.gone.choose(&mut self.random).copied().unwrap_or(0),
        }
    }

    /// Releases a request: preferably one that cannot continue, else any.
    fn release(&mut self, model: &Model) -> Op {
        let is_stuck = |request: &Request| {
            let Progress { tokens, .. } = request.group(LayerGroup::Trunk);
            let groups = LayerGroup::ALL.map(|group| request.group(group));
            let whole = |of: Progress| of.is_whole_at(of.tokens, model.max_decode_tokens());
            tokens == model.config().max_context || !groups.into_iter().all(whole)
        };
        let stuck = model.live().map(|(_, request)| request).find(|&request| is_stuck(request));
        let stuck = stuck.filter(|_| self.random.random_ratio(2, 3));
        let name = stuck.map_or_else(|| self.anyone(model), |request| request.name);
        self.gone.truncate(15);
        self.gone.insert(0, name);
        Op::Release(name)
    }

    /// Rewinds the draft layers of a request by a few tokens, sometimes by too many.
    fn rewind(&mut self, model: &Model) -> Op {
        let request = self.anyone(model);
        let draft = model.named(request).map(|of| of.group(LayerGroup::Draft));
        let Progress { tokens, .. } = draft.unwrap_or_default();
        let back = match self.random.random_range(0..10) {
            0 => return Op::RewindDraft { request, committed: tokens + 1 },
            1 => self.random.random_range(0..=tokens),
            _ => self.random.random_range(0..=model.config().max_draft + 1),
        };
        Op::RewindDraft { request, committed: tokens.saturating_sub(back) }
    }

    /// A step, sometimes with a step of the other group while it is open.
    fn step(&mut self, model: &Model) -> Step {
        let group =
            if self.random.random_ratio(1, 4) { LayerGroup::Draft } else { LayerGroup::Trunk };
        let other = if group == LayerGroup::Trunk { LayerGroup::Draft } else { LayerGroup::Trunk };
        let mut step = self.step_of(model, group);
        if self.random.random_ratio(1, 10) {
            step.meanwhile = Some(Box::new(self.step_of(model, other)));
        }
        step
    }

    fn step_of(&mut self, model: &Model, group: LayerGroup) -> Step {
        let mut requests: Vec<_> = model.live().map(|(_, request)| request).collect();
        let wanted = self.random.random_range(1..=requests.len().max(1));
        let mut parts = Vec::new();
        for _ in 0..wanted.min(requests.len()) {
            let request = requests.swap_remove(self.random.random_range(0..requests.len()));
            parts.extend(self.part(model, group, request));
        }
        let commits = self.commits(model, &parts);
        if self.random.random_ratio(1, 12) {
            self.spoil(model, &mut parts);
        }
        let launches = self.launches(model, group, &parts);
        let some = self.random.random_range(0..8);
        let layers = match self.random.random_range(0..24) {
            0 | 1 => Layers::None,
            2 | 3 => Layers::Without(some),
            4 => Layers::Unappended(some),
            _ => Layers::All,
        };
        Step { group, launches, parts, layers, meanwhile: None, commits }
    }

    /// A part that the request could have in a server's step, within the limits of a single request.
    fn part(&mut self, model: &Model, group: LayerGroup, request: &Request) -> Option<Part> {
        let (config, most) = (model.config(), model.max_decode_tokens());
        let progress = request.group(group);
        let whole = progress.is_whole_at(progress.tokens, most);
        if !whole && !self.random.random_ratio(1, 20) {
            return None;
        }
        let room = (config.max_context - progress.tokens).min(config.max_step_tokens);
        let first = if model.shares() { 6 } else { 0 };
        let tokens = match self.random.random_range(first..20) {
            0..9 => 1,
            9..14 => self.random.random_range(1..=most),
            14..17 => self.random.random_range(1..=9),
            17 => self.random.random_range(1..=140),
            // Whole blocks are shared, so with shared prefixes many chunks are long.
            _ if model.shares() && self.random.random() => room,
            18 => *[3, 4, 5, 31, 127, 128, 129, 257].choose(&mut self.random)?,
            _ => room,
        };
        let tokens = tokens.min(room);
        let back = if tokens <= most { tokens } else { most };
        let genuine = tokens - self.random.random_range(0..=back);
        (tokens > 0).then_some(Part { request: request.name, ahead: 0, tokens, genuine })
    }

    /// How a step of these parts is launched: eagerly, in a bucket that fits, or in one that does not.
    fn launches(&mut self, model: &Model, group: LayerGroup, parts: &[Part]) -> Launches {
        let end = |part: &Part| {
            let start = model.named(part.request).map_or(0, |of| of.group(group).tokens);
            start.saturating_add(part.tokens)
        };
        let tight = Bucket {
            tokens: parts.iter().fold(0, |sum, part| part.tokens.saturating_add(sum)),
            tokens_per_request: parts.iter().map(|part| part.tokens).max().unwrap_or(0),
            requests: parts.len() as u32,
            context: parts.iter().map(end).max().unwrap_or(0),
        };
        let [decode, verify] = buckets(model.config());
        let fits = |bucket: &Bucket| {
            tight.tokens <= bucket.tokens
                && tight.tokens_per_request <= bucket.tokens_per_request
                && tight.requests <= bucket.requests
        };
        let captured = [decode, verify].into_iter().find(fits);
        match (self.random.random_range(0..12), captured) {
            (0..4, Some(bucket)) => Launches::Replay(bucket),
            (0..4, None) | (4, _) => Launches::Bucket(tight),
            (5, Some(bucket)) => Launches::Bucket(bucket),
            (6, _) => Launches::Replay(*[decode, verify].choose(&mut self.random).expect("two")),
            (7, _) => {
                let mut bucket = tight;
                self.shrunk_or_grown(&mut bucket);
                Launches::Bucket(bucket)
            }
            _ => Launches::Eager,
        }
    }

    /// Changes a bucket: makes it larger in some way, or too small.
    fn shrunk_or_grown(&mut self, bucket: &mut Bucket) {
        let Bucket { tokens, tokens_per_request, requests, context } = bucket;
        let fields = [tokens, tokens_per_request, requests, context];
        for field in fields {
            *field = match self.random.random_range(0..8) {
                0 => field.saturating_sub(1),
                1..4 => field.saturating_add(self.random.random_range(1..9)),
                4 => field.saturating_mul(2),
                _ => continue,
            };
        }
    }

    /// The commits to try: mostly a valid one, sometimes an invalid one before it, sometimes none.
    fn commits(&mut self, model: &Model, parts: &[Part]) -> Vec<Vec<Accept>> {
        let mut commits = Vec::new();
        if self.random.random_ratio(1, 9) {
            commits.push(self.wrong_commit(model, parts));
        }
        if self.random.random_ratio(7, 8) {
            commits.push(parts.iter().map(|part| self.accept(model, part)).collect());
        }
        commits
    }

    /// Accepts all tokens or a part of them; with `Manners::Genuine` exactly the genuine ones.
    fn accept(&mut self, model: &Model, part: &Part) -> Accept {
        let Part { request, tokens, genuine, .. } = *part;
        let back = self.random.random_range(0..=model.max_decode_tokens().min(tokens));
        let accepted = match self.manners {
            Manners::Genuine => genuine,
            Manners::Any if self.random.random_ratio(1, 3) => tokens - back,
            Manners::Any => tokens,
        };
        let (of, all) = if model.shares() { (31, 32) } else { (1, 4) };
        let told = if self.random.random_ratio(of, all) { accepted } else { 0 };
        Accept { request, accepted, told }
    }

    /// A commit that is likely to be refused.
    fn wrong_commit(&mut self, model: &Model, parts: &[Part]) -> Vec<Accept> {
        let mut commit: Vec<_> = parts.iter().map(|part| self.accept(model, part)).collect();
        let at = self.random.random_range(0..commit.len().max(1));
        let someone = self.anyone(model);
        // No request is ever called 0.
        let gone = self.gone.choose(&mut self.random).copied().unwrap_or(0);
        let gone = if self.random.random() { gone } else { 0 };
        let first = commit.first().map(|accept| accept.request);
        let Some(accept) = commit.get_mut(at) else { return commit };
        match self.random.random_range(0..8) {
            0 => accept.accepted = parts[at].tokens + 1,
            1 => accept.told = accept.accepted + 1,
            2 => accept.accepted = 0,
            3 => accept.request = someone,
            7 => accept.request = gone,
            4 => accept.request = first.unwrap_or(someone),
            5 => drop(commit.remove(at)),
            _ => commit.push(Accept { request: someone, accepted: 1, told: 0 }),
        }
        commit
    }

    /// Changes the parts so that the step is likely to be refused.
    fn spoil(&mut self, model: &Model, parts: &mut Vec<Part>) {
        let request = self.anyone(model);
        let part = Part { request, ahead: 0, tokens: 1, genuine: 1 };
        let at = self.random.random_range(0..=parts.len());
        match self.random.random_range(0..7) {
            0 => parts.insert(at, Part { ahead: self.random.random_range(1..3), ..part }),
            1 => parts.insert(at, Part { ahead: u32::MAX, ..part }),
            2 => parts.insert(at, Part { tokens: 0, ..part }),
            3 => parts.insert(at, Part { tokens: u32::MAX, genuine: u32::MAX, ..part }),
            4 => parts.extend(vec![part; model.config().max_requests as usize]),
            5 => parts.extend(parts.first().cloned()),
            _ => parts.insert(at, part),
        }
    }
}
