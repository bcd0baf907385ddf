//! Where requests share prefixes no step allocates on the host either: not when the prefix tree grows, when a checkpoint is
//! saved, or when something is evicted. A prefix that moves to host memory does, when its transfer begins and ends. Counted on
//! a device that does nothing. A log of events adds nothing.

use allocation_counter::measure;
use dsv4_kv::device::{Null, NullDevice, Stream};
use dsv4_kv::events::{Drained, EventBatch, EventSource};
use dsv4_kv::kv_layout::geometry::BLOCK_TOKENS;
use dsv4_kv::{Accepted, CacheConfig, KvCacheManager, Launches, Prompt, StepRequest};

use super::inputs::Inputs;
use super::no_allocation::run;
use super::setup::{MEMORY, config};

const REQUESTS: u32 = 4;
/// Tokens of each prompt, and of a chunk of it.
const PROMPT: u32 = 1000;
const CHUNK: u32 = 200;
/// Tokens of each answer, one a step: two blocks are closed.
const ANSWER: u32 = 300;
/// Too few for two generations of requests, whatever they share.
const BLOCKS: u32 = 60;
const CHECKPOINTS: u32 = 10;
const HOST: u64 = 64 << 20;
const GENERATIONS: u32 = 4;

/// Allocations of each part of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    /// `begin_step` and all launches.
    run: u64,
    commit: u64,
    /// `save_wanted`.
    save: u64,
    /// `advance_tier`.
    tier: u64,
}

/// Requests with one prompt, each under a salt of its own.
struct Shared {
    cache: KvCacheManager<Null>,
    stream: Stream<Null>,
    inputs: Inputs,
    parts: Vec<StepRequest>,
    tokens: Vec<u32>,
}

impl Shared {
    fn new(event_capacity: u32) -> Self {
        let device = NullDevice::null(MEMORY);
        let config = config(REQUESTS).unwrap();
        let (num_blocks, num_checkpoints, host_bytes) = (BLOCKS, CHECKPOINTS, HOST);
        let config =
            CacheConfig { num_blocks, num_checkpoints, host_bytes, event_capacity, ..config };
        let (stream, inputs) = (device.stream().unwrap(), Inputs::new(&device, &config).unwrap());
        let cache = KvCacheManager::new(device, config).unwrap();
        let tokens: Vec<u32> = (0..PROMPT + ANSWER).collect();
        Self { cache, stream, inputs, parts: Vec::new(), tokens }
    }

    /// Admits requests whose prompts nobody has yet.
    fn admit(&mut self, generation: u32) {
        let tokens = &self.tokens[..PROMPT as usize];
        for request in 0..REQUESTS {
            let salt = (REQUESTS * generation + request).to_le_bytes();
            let prompt = Prompt { tokens, salt: &salt, adapter: b"" };
            let id = self.cache.admit_with(&self.stream, &prompt).unwrap().id;
            self.parts.push(StepRequest { id, start: 0, tokens: CHUNK });
        }
    }

    /// Ends them all.
    fn release(&mut self) {
        self.parts.drain(..).for_each(|part| self.cache.release(part.id).unwrap());
    }

    /// The next step of all requests; where it starts, and what it allocates.
    fn step(&mut self) -> (u32, Counts) {
        let Self { cache, stream, inputs, parts, tokens } = self;
        let at = parts[0].start;
        let accepted = |part: &StepRequest| {
            let told = &tokens[part.start as usize..(part.start + part.tokens) as usize];
            Accepted { id: part.id, accepted: part.tokens, tokens: told }
        };
        let accepted: Vec<_> = parts.iter().map(accepted).collect();
        let mut begun = None;
        let run = measure(|| {
            let mut step = cache.begin_step(stream, Launches::Eager, parts).unwrap();
            run(inputs, &mut step).unwrap();
            begun = Some(step);
        });
        let (run, step) = (run.count_total, begun.unwrap());
        let commit = measure(|| step.commit(&accepted).unwrap()).count_total;
        let save = measure(|| cache.save_wanted(stream).unwrap()).count_total;
        let tier = measure(|| cache.advance_tier(stream).unwrap()).count_total;
        for part in parts {
            part.start += part.tokens;
            part.tokens = if part.start < PROMPT { CHUNK } else { 1 };
        }
        (at, Counts { run, commit, save, tier })
    }
}

/// Every chunk passes boundaries at which checkpoints are saved, decode steps close blocks and are saved, and from the second
/// generation on blocks and checkpoints of earlier ones are evicted for all of it.
#[test]
fn steps_allocate_nothing_where_requests_share() {
    let mut shared = Shared::new(0);
    for generation in 0..GENERATIONS {
        shared.admit(generation);
        for _ in 0..PROMPT / CHUNK + ANSWER {
            let was_moving = shared.cache.is_moving();
            let (at, counts) = shared.step();
            let (tier, none) = (counts.tier, Counts { tier: counts.tier, ..Counts::default() });
            assert_eq!(counts, none, "generation {generation}, token {at}");
            let has_moved = was_moving || shared.cache.is_moving();
            assert!(tier == 0 || has_moved, "nothing moved, and {tier} allocations");
        }
        shared.release();
    }
    let counts = shared.cache.ledger().tree_counts();
    let stats = shared.cache.reuse_stats();
    assert!(stats.evicted_blocks > 0 && stats.evicted_checkpoints > 0, "{stats:?}");
    assert!(counts.checkpoints > 0, "{counts:?}");
    assert!(shared.cache.tier_stats().stored_checkpoints > 0, "prefixes went to host memory");
}

#[test]
fn events_are_logged_and_read_without_allocating() {
    let (mut plain, mut logged) = (Shared::new(0), Shared::new(1024));
    [&mut plain, &mut logged].into_iter().for_each(|shared| shared.admit(0));
    let mut batch = EventBatch::with_capacity(logged.cache.event_capacity());
    let (mut stored, mut drained) = (0, Drained::Off);
    for _ in 0..PROMPT / CHUNK + ANSWER {
        let (at, counts) = plain.step();
        assert_eq!(logged.step(), (at, counts));
        let counted = measure(|| drained = logged.cache.drain_events(&mut batch));
        assert_eq!((drained, counted.count_total), (Drained::Events, 0), "{at}");
        stored += batch.blocks();
    }
    assert_eq!(stored, REQUESTS * ((PROMPT + ANSWER) / BLOCK_TOKENS));
}
