//! Random caches and random operations: mostly what a server does, sometimes what it must not.

use dsv4_kv::CacheConfig;
use kv_layout::config::ModelConfig;
use kv_layout::geometry::LayerKind;
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use super::model::{Model, Request};
use super::op::{Name, Op, Part};

/// What is asked of a generator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manners {
    /// Everything, refusals of every kind included.
    Any,
    /// No more tokens are accepted than are right, so that every request's bytes are known.
    Genuine,
}

/// An endless script.
pub struct Generator {
    random: SmallRng,
    manners: Manners,
    names: Name,
    /// Names of requests that are gone, the last few.
    gone: Vec<Name>,
}

/// A small cache in which everything runs out.
#[must_use]
pub fn config(seed: u64) -> CacheConfig {
    let mut random = SmallRng::seed_from_u64(seed);
    let mut model = ModelConfig::preset("tiny").expect("a preset");
    if random.random_ratio(1, 16) {
        model.layers = vec![LayerKind::Swa; 2];
    }
    CacheConfig {
        max_draft: *[0, 1, 3, 8].choose(&mut random).expect("not empty"),
        max_requests: random.random_range(1..=12),
        num_blocks: random.random_range(1..=40),
        max_context: random.random_range(1..=1500),
        max_step_tokens: random.random_range(1..=500),
        ..CacheConfig::smallest(model)
    }
}

/// A small cache of layers of every kind, for runs with kernels; its memory is poisoned.
#[must_use]
pub fn kernel_config(seed: u64) -> CacheConfig {
    let mut random = SmallRng::seed_from_u64(seed);
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
    /// The script of a seed.
    #[must_use]
    pub fn new(seed: u64, manners: Manners) -> Self {
        Self { random: SmallRng::seed_from_u64(!seed), manners, names: 0, gone: Vec::new() }
    }

    /// The next operation, given where the last ones led.
    pub fn next(&mut self, model: &Model) -> Op {
        let open: Vec<_> = model
            .live()
            .map(|(_, request)| request)
            .filter(|request| request.written > 0)
            .collect();
        let open = open.choose(&mut self.random).copied();
        match self.random.random_range(0..100) {
            0..70 if open.is_some() => self.commit(open),
            70..77 if self.manners == Manners::Any => self.commit(None),
            77..83 => self.release(model),
            83..90 => self.admit(),
            _ => self.prepare(model),
        }
    }

    fn admit(&mut self) -> Op {
        self.names += 1;
        Op::Admit(self.names)
    }

    /// A live request, or now and then one that is not.
    fn anyone(&mut self, model: &Model) -> Name {
        let live: Vec<_> = model.live().map(|(_, request)| request.name).collect();
        let stale = self.random.random_ratio(1, 30);
        match live.choose(&mut self.random) {
            Some(&name) if !stale => name,
            _ => self.gone.choose(&mut self.random).copied().unwrap_or(0),
        }
    }

    fn release(&mut self, model: &Model) -> Op {
        let name = self.anyone(model);
        self.gone.truncate(15);
        self.gone.insert(0, name);
        Op::Release(name)
    }

    /// Accepts a part of a step, or anything of anyone.
    fn commit(&mut self, of: Option<&Request>) -> Op {
        let Some(&Request { name, written, genuine, .. }) = of else {
            let request = self.gone.choose(&mut self.random).copied().unwrap_or(self.names);
            return Op::Commit { request, accepted: self.random.random_range(0..4) };
        };
        let accepted = match self.manners {
            Manners::Genuine => genuine,
            Manners::Any if self.random.random_ratio(1, 20) => written + 1,
            Manners::Any if self.random.random_ratio(1, 3) => self.random.random_range(0..=written),
            Manners::Any => written,
        };
        Op::Commit { request: name, accepted }
    }

    fn prepare(&mut self, model: &Model) -> Op {
        let mut requests: Vec<_> = model.live().map(|(_, request)| request).collect();
        let most = requests.len().max(1);
        let wanted = self.random.random_range(1..=most);
        let mut parts = Vec::new();
        for _ in 0..wanted.min(requests.len()) {
            let request = requests.swap_remove(self.random.random_range(0..requests.len()));
            parts.extend(self.part(model, request));
        }
        if self.random.random_ratio(1, 12) {
            self.spoil(model, &mut parts);
        }
        Op::Prepare(parts)
    }

    /// What a server would let the request do, within the limits of a request alone.
    fn part(&mut self, model: &Model, request: &Request) -> Option<Part> {
        let config = model.config();
        let most = config.max_draft + 1;
        if request.written > most {
            return None;
        }
        let room = (config.max_context - request.tokens).min(config.max_step_tokens);
        let tokens = match self.random.random_range(0..20) {
            0..9 => 1,
            9..14 => self.random.random_range(1..=most),
            14..17 => self.random.random_range(1..=9),
            17 => self.random.random_range(1..=140),
            18 => *[3, 4, 5, 31, 127, 128, 129, 257].choose(&mut self.random)?,
            _ => room,
        };
        let tokens = tokens.min(room);
        let genuine = if tokens <= most { self.random.random_range(0..=tokens) } else { tokens };
        (tokens > 0).then_some(Part { request: request.name, ahead: 0, tokens, genuine })
    }

    /// Makes a step that is likely to be refused.
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
