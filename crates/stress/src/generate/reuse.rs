//! Generates operations on shared prefixes, copies and leases.

use dsv4_kv::CacheConfig;
use dsv4_kv::kv_layout::config::ModelConfig;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use super::{COPIES, Generator, config, kernel_config};
use crate::model::Model;
use crate::op::{Name, Op};
use crate::text::Text;

/// Xored into the seed of [`kernel_reuse_config`], as `KERNELS` into that of [`kernel_config`]; likewise chosen.
const KERNEL_REUSE: u64 = 0x7265_7573_0000_1ff3;
/// Xored into the seed of [`event_capacity`].
const EVENTS: u64 = 0xe7e7;

/// A small cache with checkpoints, in which requests share prefixes; it runs out of slots, blocks and everything else.
#[must_use]
pub fn reuse_config(seed: u64) -> CacheConfig {
    let mut random = SmallRng::seed_from_u64(seed);
    CacheConfig {
        max_draft: *[0, 1, 3].choose(&mut random).expect("not empty"),
        max_requests: random.random_range(1..=8),
        num_blocks: random.random_range(2..=40),
        max_context: random.random_range(200..=1200),
        max_step_tokens: random.random_range(100..=700),
        num_checkpoints: random.random_range(1..=12),
        checkpoint_interval: *[0, 128, 256].choose(&mut random).expect("not empty"),
        max_suspended: random.random_range(0..=3),
        lease_bytes: if random.random() { u64::MAX } else { 1 << 20 },
        event_capacity: event_capacity(seed),
        ..CacheConfig::new(ModelConfig::preset("tiny").expect("a preset"))
    }
}

/// As `reuse_config`, for runs with kernels; the memory is poisoned.
#[must_use]
pub fn kernel_reuse_config(seed: u64) -> CacheConfig {
    let mut random = SmallRng::seed_from_u64(seed ^ KERNEL_REUSE);
    CacheConfig {
        max_requests: random.random_range(2..=4),
        num_blocks: random.random_range(3..=12),
        max_context: random.random_range(260..=400),
        max_step_tokens: random.random_range(100..=300),
        num_checkpoints: random.random_range(1..=6),
        checkpoint_interval: *[0, 128].choose(&mut random).expect("not empty"),
        max_suspended: random.random_range(0..=2),
        lease_bytes: u64::MAX,
        event_capacity: event_capacity(seed),
        ..kernel_config(seed)
    }
}

/// Capacity of the event log: none, so few events that the log overflows, or enough for all. It has its own generator
/// of random numbers, since the seeds that find mistakes were chosen by hand and must not change.
fn event_capacity(seed: u64) -> u32 {
    let mut random = SmallRng::seed_from_u64(seed ^ EVENTS);
    *[0, 4, 4096].choose(&mut random).expect("not empty")
}

/// A small cache for the ledger alone. In one of four seeds requests share prefixes.
#[must_use]
pub fn ledger_config(seed: u64) -> CacheConfig {
    if seed % 4 == 3 { reuse_config(seed) } else { config(seed) }
}

impl Generator {
    /// An operation on shared prefixes, in a cache that shares them.
    pub(super) fn reuse(&mut self, model: &Model) -> Op {
        let leases: Vec<_> = model.leases().collect();
        match self.random.random_range(0..20) {
            0..6 => self.admit_with(model),
            kind if COPIES.contains(&kind) => self.copies(kind, model),
            16 | 17 => {
                self.names += 1;
                let (lease, text) = (self.names, self.text());
                Op::Pin { lease, text, until: self.random.random_range(0..4) }
            }
            18 => Op::Unpin(self.one_of(&leases)),
            _ => Op::Expire(self.random.random_range(0..4)),
        }
    }

    /// A fork, or an operation on a suspended request; also in a cache that shares no prefixes.
    pub(super) fn copies(&mut self, kind: u32, model: &Model) -> Op {
        let suspended: Vec<_> = model.suspended().collect();
        match kind {
            6..9 => {
                let of = self.anyone(model);
                self.names += 1;
                Op::Fork { of, request: self.names, answer: self.random.random_range(0..3) }
            }
            9..12 => Op::Suspend(self.anyone(model)),
            12..15 => Op::Resume(self.one_of(&suspended)),
            _ => Op::Discard(self.one_of(&suspended)),
        }
    }

    /// An admission with a prompt.
    pub(super) fn admit_with(&mut self, model: &Model) -> Op {
        self.names += 1;
        let again = model.has_tier() && self.random.random_ratio(3, 4);
        let text = if again { self.known_text() } else { self.text() };
        self.said(&text);
        Op::AdmitWith { request: self.names, text }
    }

    /// One of `names`, or sometimes a name that is not in use.
    pub(super) fn one_of(&mut self, names: &[Name]) -> Name {
        let name = names.choose(&mut self.random).copied();
        name.filter(|_| !self.random.random_ratio(1, 20)).unwrap_or(0)
    }

    /// A prompt from a small alphabet, with few lengths and salts, so that many prompts have a common prefix.
    pub(super) fn text(&mut self) -> Text {
        let random = &mut self.random;
        let lengths = [1, 60, 127, 128, 129, 256, 256, 384, 500];
        let mut run =
            || (random.random_range(0..2), *lengths.choose(&mut *random).expect("not empty"));
        let runs = vec![run(), run(), run()];
        let kept = random.random_range(0..=3);
        let runs = runs.into_iter().take(kept).collect();
        let (salt, answer) = (random.random_range(0..2), random.random_range(0..2));
        Text { salt, runs, answer }
    }
}
