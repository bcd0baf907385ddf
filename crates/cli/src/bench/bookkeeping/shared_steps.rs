//! A step does not allocate on the host where requests share prefixes either: not when the prefix tree grows, when a
//! checkpoint is saved, or when a prefix is evicted. Only a transfer to host memory allocates, at its begin and end.
//! Allocations are counted on a device that does nothing. The event log adds none.

use allocation_counter::measure;
use dsv4_kv::device::{Null, NullDevice, Stream};
use dsv4_kv::events::{Drained, EventBatch, EventSource};
use dsv4_kv::kv_layout::geometry::BLOCK_TOKENS;
use dsv4_kv::{Accepted, CacheConfig, KvCacheManager, Launches, Prompt, StepRequest};

use super::inputs::Inputs;
use super::no_allocation::run;
use super::setup::{MEMORY, config};

const REQUESTS: u32 = 4;
/// Tokens of each prompt, and of each of its chunks.
const PROMPT: u32 = 1000;
const CHUNK: u32 = 200;
/// Tokens of each answer, one per step: two blocks close.
const ANSWER: u32 = 300;
/// Too few blocks and checkpoints for two generations of requests, whatever they share.
const BLOCKS: u32 = 60;
const CHECKPOINTS: u32 = 10;
const HOST: u64 = 64 << 20;
const GENERATIONS: u32 = 4;

/// Allocations in each part of a step.
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

/// Requests with the same prompt, each with its own salt.
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

    /// Admits requests whose prompts are not in the prefix tree.
    fn admit(&mut self, generation: u32) {
        let tokens = &self.tokens[..PROMPT as usize];
        for request in 0..REQUESTS {
            let salt = (REQUESTS * generation + request).to_le_bytes();
            let prompt = Prompt { tokens, salt: &salt, adapter: b"" };
            let id = self.cache.admit_with(&self.stream, &prompt).unwrap().id;
            self.parts.push(StepRequest { id, start: 0, tokens: CHUNK });
        }
    }

    /// Ends all requests.
    fn release(&mut self) {
        self.parts.drain(..).for_each(|part| self.cache.release(part.id).unwrap());
    }

    /// Runs the next step of all requests. Returns the position at which it starts, and its allocations.
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

/// Every chunk passes boundaries at which checkpoints are saved. Decode steps close blocks and are saved. From the
/// second generation on, all of this evicts blocks and checkpoints of earlier generations.
#[test]
fn steps_allocate_nothing_where_requests_share() {
    let mut shared = Shared::new(0);
    for generation in 0..GENERATIONS {
        shared.admit(generation);
        for _ in 0..PROMPT / CHUNK + ANSWER {
            let was_moving = shared.cache.has_tier_transfers();
            let (at, counts) = shared.step();
            let (tier, none) = (counts.tier, Counts { tier: counts.tier, ..Counts::default() });
            assert_eq!(counts, none, "generation {generation}, token {at}");
            let has_moved = was_moving || shared.cache.has_tier_transfers();
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
