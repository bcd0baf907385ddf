//! Where requests share prefixes a step allocates on the host only when the prefix tree grows: with the commit that
//! tells the last token of a block, when a checkpoint is saved, and while a prefix moves to host memory. Counted on a
//! device that does nothing. A log of events adds nothing.

use allocation_counter::measure;
use dsv4_kv::device::{Null, NullDevice, Stream};
use dsv4_kv::events::{Drained, EventBatch, EventSource};
use dsv4_kv::{Accepted, CacheConfig, KvCacheManager, Launches, Prompt, StepRequest};

use super::inputs::Inputs;
use super::no_allocation::run;
use super::setup::{MEMORY, config};

const REQUESTS: u32 = 4;
const BLOCK: u32 = 128;
/// Tokens of each prompt, and of a chunk of it.
const PROMPT: u32 = 1000;
const CHUNK: u32 = 200;
/// Tokens of each answer, one a step: two blocks are closed.
const ANSWER: u32 = 300;

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
        let config = CacheConfig { num_checkpoints: 64, host_bytes: 64 << 20, ..config };
        let config = CacheConfig { event_capacity, ..config };
        let (stream, inputs) = (device.stream().unwrap(), Inputs::new(&device, &config).unwrap());
        let mut cache = KvCacheManager::new(device, config).unwrap();
        let tokens: Vec<u32> = (0..PROMPT + ANSWER).collect();
        let admit = |salt: u8| {
            let tokens = &tokens[..PROMPT as usize];
            let prompt = Prompt { tokens, salt: &[salt], adapter: b"" };
            let id = cache.admit_with(&stream, &prompt).unwrap().id;
            StepRequest { id, start: 0, tokens: CHUNK }
        };
        let parts = (0..REQUESTS as u8).map(admit).collect();
        Self { cache, stream, inputs, parts, tokens }
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

#[test]
fn steps_allocate_only_when_the_prefix_tree_grows() {
    let mut shared = Shared::new(0);
    for _ in 0..PROMPT / CHUNK {
        let (at, counts) = shared.step();
        // The last boundary of the prompt is saved inside the chunk: a list of those that are.
        let saves = (at..at + CHUNK).contains(&(PROMPT / BLOCK * BLOCK - 1));
        assert_eq!(counts.run > 0, saves, "{at}: {counts:?}");
    }
    shared.cache.settle_tier(&shared.stream).unwrap();
    assert!(shared.cache.tier_stats().stored_checkpoints > 0, "prefixes went to host memory");
    let mut grown = 0;
    for _ in 0..ANSWER {
        let (at, counts) = shared.step();
        if !(at + 1).is_multiple_of(BLOCK) {
            assert_eq!(counts, Counts::default(), "{at}");
            continue;
        }
        assert_eq!((counts.run, counts.tier), (0, 0), "{at}: {counts:?}");
        assert!((1..=8 * u64::from(REQUESTS)).contains(&(counts.commit + counts.save)), "{at}");
        grown += 1;
    }
    assert_eq!(grown, 3);
}

#[test]
fn events_are_logged_and_read_without_allocating() {
    let (mut plain, mut logged) = (Shared::new(0), Shared::new(1024));
    let mut batch = EventBatch::with_capacity(logged.cache.event_capacity());
    let (mut stored, mut drained) = (0, Drained::Off);
    for _ in 0..PROMPT / CHUNK + ANSWER {
        let (at, counts) = plain.step();
        assert_eq!(logged.step(), (at, counts));
        let counted = measure(|| drained = logged.cache.drain_events(&mut batch));
        assert_eq!((drained, counted.count_total), (Drained::Events, 0), "{at}");
        stored += batch.blocks();
    }
    assert_eq!(stored, REQUESTS * ((PROMPT + ANSWER) / BLOCK));
}
