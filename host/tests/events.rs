//! Under a random load, an index made of a ledger's events names exactly the blocks that the ledger has.

use std::collections::BTreeMap;

use dsv4_kv::events::{Drained, Event, EventBatch, EventSource, Serial};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::{Accepted, CacheConfig, KvError, LayerGroup, Ledger, Prompt, RequestId, StepRequest};
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

const GROUP: LayerGroup = LayerGroup::Trunk;
const SALTS: [&[u8]; 2] = [b"", b"tenant"];

/// The blocks in the cache according to its events: for each block the salt, and all tokens up to the block's end.
#[derive(Debug, Default)]
struct Index(BTreeMap<Serial, (Vec<u8>, Vec<u32>)>);

impl Index {
    fn apply(&mut self, batch: &EventBatch) {
        for event in batch.iter() {
            match event {
                Event::Stored(run) => {
                    let root = (run.root.salt().to_vec(), Vec::new());
                    let mut path = run.parent.map_or(root, |parent| self.0[&parent].clone());
                    for (&serial, tokens) in run.serials.iter().zip(run.tokens) {
                        path.1.extend_from_slice(tokens);
                        assert!(self.0.insert(serial, path.clone()).is_none(), "{serial:?} twice");
                    }
                }
                Event::Removed(serials) => {
                    let gone = serials.iter().filter(|serial| self.0.remove(serial).is_some());
                    assert_eq!(gone.count(), serials.len());
                }
            }
        }
    }

    /// The index of a snapshot of `ledger`.
    fn of(ledger: &mut Ledger) -> Self {
        let mut index = Self::default();
        index.apply(&ledger.snapshot_events());
        index
    }
}

struct Live {
    id: RequestId,
    tokens: Vec<u32>,
    /// Tokens, those of its output included, after which the request ends.
    end: usize,
}

struct Load {
    ledger: Ledger,
    random: SmallRng,
    live: Vec<Live>,
    prompts: Vec<Vec<u32>>,
    array: Vec<i32>,
}

impl Load {
    fn new(seed: u64) -> Self {
        let smallest = CacheConfig::new(ModelConfig::preset("tiny").expect("a preset"));
        let config = CacheConfig {
            max_requests: 4,
            num_blocks: 40,
            max_context: 3000,
            max_step_tokens: 700,
            max_draft: 3,
            num_checkpoints: 12,
            checkpoint_interval: 512,
            event_capacity: 10,
            ..smallest
        };
        let ledger = Ledger::new(&config).unwrap();
        let array = vec![0; ledger.largest_layout().elements()];
        let random = SmallRng::seed_from_u64(seed);
        Self { ledger, random, live: Vec::new(), prompts: vec![vec![7; 600]], array }
    }

    fn admit(&mut self) {
        let mut tokens = self.prompts.choose(&mut self.random).unwrap().clone();
        tokens.truncate(self.random.random_range(1..=tokens.len()));
        let step = self.random.random_range(1..4);
        tokens.extend((0..self.random.random_range(0..400)).map(|at| at * step));
        let salt = SALTS.choose(&mut self.random).unwrap();
        let prompt = Prompt { tokens: &tokens, salt, adapter: b"" };
        match self.ledger.admit_with(&prompt) {
            Ok(admission) => {
                let end = tokens.len() + self.random.random_range(0..300);
                self.prompts.push(tokens.clone());
                self.live.push(Live { id: admission.id, tokens, end });
            }
            Err(error) => assert!(matches!(error, KvError::NoFreeSlot { .. }), "{error}"),
        }
    }

    /// A step of all requests: a chunk of the prompt, or drafts of which some are accepted.
    fn step(&mut self) {
        let Self { ledger, random, live, array, .. } = self;
        let (mut parts, mut are_drafts) = (Vec::new(), Vec::new());
        for live in live.iter_mut() {
            let start = ledger.committed(live.id).unwrap();
            let left = live.tokens.len() as u32 - start;
            let tokens = if left > 0 { left.min(random.random_range(1..170)) } else { 4 };
            live.tokens.resize((start + tokens).max(live.tokens.len() as u32) as usize, tokens);
            parts.push(StepRequest { id: live.id, start, tokens });
            are_drafts.push(left == 0);
        }
        match ledger.begin_step(GROUP, &parts, array) {
            Ok(_) => {}
            Err(KvError::OutOfBlocks { .. }) => return self.end_one(),
            Err(error) => panic!("{error}"),
        }
        if random.random_bool(0.1) {
            return ledger.reject_step(GROUP, dsv4_kv::ledger::Written::Nothing);
        }
        let accepted = parts.iter().zip(are_drafts).zip(live).map(|((part, are_drafts), live)| {
            let most = part.tokens;
            let accepted = if are_drafts { random.random_range(1..=most) } else { most };
            live.tokens.truncate(live.tokens.len() - (most - accepted) as usize);
            let at = part.start as usize;
            Accepted { id: part.id, accepted, tokens: &live.tokens[at..at + accepted as usize] }
        });
        ledger.commit_step(GROUP, &accepted.collect::<Vec<_>>()).unwrap();
        let over = |live: &Live| live.tokens.len() >= live.end;
        let done: Vec<_> = self.live.extract_if(.., |live| over(live)).collect();
        done.into_iter().for_each(|done| self.ledger.release(done.id).unwrap());
    }

    fn end_one(&mut self) {
        if !self.live.is_empty() {
            let live = self.live.swap_remove(self.random.random_range(0..self.live.len()));
            self.ledger.release(live.id).unwrap();
        }
    }

    fn operation(&mut self) {
        match self.random.random_range(0..20) {
            0..5 => self.admit(),
            5..7 => self.end_one(),
            _ => self.step(),
        }
    }
}

#[test]
fn events_tell_what_is_there() {
    let (mut overflows, mut removed, mut most) = (0, 0, 0);
    for seed in 0..20 {
        let mut load = Load::new(seed);
        let mut batch = EventBatch::with_capacity(load.ledger.event_capacity());
        let mut index = Index::default();
        for _ in 0..400 {
            load.operation();
            if load.random.random_bool(0.5) {
                continue;
            }
            match load.ledger.drain_events(&mut batch) {
                Drained::Events => index.apply(&batch),
                Drained::Overflowed => {
                    overflows += 1;
                    index = Index::of(&mut load.ledger);
                }
                Drained::Off => panic!("events are logged"),
            }
            removed += batch.iter().filter(|event| matches!(event, Event::Removed(_))).count();
            most = most.max(index.0.len());
            assert_eq!(index.0.len(), load.ledger.tree_counts().blocks as usize);
            assert_eq!(index.0, Index::of(&mut load.ledger).0, "seed {seed}");
            load.ledger.audit().unwrap();
        }
    }
    // The load has produced overflows, removals and enough live blocks.
    assert!(overflows > 5 && removed > 200 && most > 20, "{overflows}, {removed}, {most}");
}

#[test]
fn a_cache_that_shares_nothing_has_no_events() {
    let smallest = CacheConfig::new(ModelConfig::preset("tiny").expect("a preset"));
    for num_checkpoints in [0, 1] {
        let event_capacity = 8 * (1 - num_checkpoints);
        let config = CacheConfig { num_checkpoints, event_capacity, ..smallest.clone() };
        let mut ledger = Ledger::new(&config).unwrap();
        let mut batch = EventBatch::with_capacity(8);
        assert_eq!(ledger.event_capacity(), 0);
        assert_eq!(ledger.drain_events(&mut batch), Drained::Off);
        assert!(ledger.snapshot_events().is_empty());
    }
    let config = CacheConfig { event_capacity: (1 << 20) + 1, ..smallest };
    assert!(matches!(
        Ledger::new(&config),
        Err(KvError::Config { setting: "event_capacity", value: 1_048_577, .. })
    ));
}
