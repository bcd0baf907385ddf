//! A cache on an emulated device that runs requests, with their kernels.

use dsv4_kv::device::{Device, EmuOptions, Emulator};
use dsv4_kv::kv_layout::index_row::IndexFormat;
use dsv4_kv::kv_layout::main_row::MainFormat;
use dsv4_kv::{Accepted, CacheConfig, KvError, Prompt, RequestId};
use dsv4_kv_tests::fed::{Fed, Padding, Part, begin};
use dsv4_kv_tests::stories::{Story, config, tiny};
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

/// Most tokens of a request.
const LONGEST: usize = 640;
/// Most tokens of a prompt in a step.
const CHUNK: usize = 128;

/// A request: its prompt and its answer, and the number of computed tokens.
struct Live {
    id: RequestId,
    tokens: Vec<u32>,
    prompt: usize,
    done: usize,
}

/// A cache of the model `tiny`. Requests arrive, most with the same beginning as an earlier one; they are computed in
/// chunks, decode, and end.
pub struct Requests {
    pub fed: Fed<Emulator>,
    story: Story,
    random: SmallRng,
    prompts: Vec<Vec<u32>>,
    live: Vec<Live>,
    /// Reused tokens, and requests that ended.
    pub reused: u32,
    pub ended: u32,
}

impl Requests {
    /// Creates a cache with so few blocks that some are evicted.
    pub fn new(seed: u64) -> Self {
        let formats = (MainFormat::Ue8m0, IndexFormat::Mxfp4);
        let config = CacheConfig {
            num_blocks: 24,
            num_checkpoints: 10,
            checkpoint_interval: 128,
            event_capacity: 200,
            ..config(&tiny(), formats, 3)
        };
        let device = Device::from_backend(Emulator::new(EmuOptions::default()));
        let (fed, story) = (Fed::new(&device, config), Story::random(&tiny(), LONGEST, 1));
        let random = SmallRng::seed_from_u64(seed);
        let (prompts, live) = (vec![vec![7; 300]], Vec::new());
        Self { fed, story, random, prompts, live, reused: 0, ended: 0 }
    }

    /// Runs a step of all requests, before which a request may arrive.
    pub fn operation(&mut self) {
        if self.live.len() < 3 && self.random.random_bool(0.5) {
            self.admit();
        }
        self.step();
        self.end_done();
    }

    fn admit(&mut self) {
        let random = &mut self.random;
        let mut tokens = self.prompts.choose(random).unwrap().clone();
        tokens.truncate(random.random_range(0..=tokens.len()));
        let step = random.random_range(1..5);
        tokens.extend((0..random.random_range(1..300)).map(|at| at * step));
        tokens.truncate(LONGEST - 20);
        if self.prompts.len() == 8 {
            self.prompts.swap_remove(random.random_range(0..8));
        }
        self.prompts.push(tokens.clone());
        let prompt = tokens.len();
        tokens.extend((0..random.random_range(1..6)).map(|at| 1000 + at));
        let stream = self.fed.stream.clone();
        let asked = Prompt { tokens: &tokens[..prompt], salt: b"", adapter: b"" };
        let admission = self.fed.manager.admit_with(&stream, &asked).unwrap();
        let (id, done) = (admission.id, admission.reused as usize);
        self.reused += admission.reused;
        self.live.push(Live { id, tokens, prompt, done });
    }

    /// Runs a chunk of each prompt, or a token; without the last request if blocks are short.
    fn step(&mut self) {
        let Self { fed, story, live, .. } = self;
        if live.is_empty() {
            return;
        }
        let end = |live: &Live| live.done + live.prompt.saturating_sub(live.done).clamp(1, CHUNK);
        let parts: Vec<_> =
            live.iter().map(|live| Part::new(live.id, story, live.done..end(live))).collect();
        let stream = fed.stream.clone();
        fed.inputs.load(&stream, &parts, parts.iter().map(|part| part.request().tokens).sum());
        let begun = begin(&mut fed.manager, &stream, &parts, Padding::None);
        if matches!(begun, Err(KvError::OutOfBlocks { .. })) {
            drop(begun);
            let last = live.pop().unwrap();
            return fed.manager.release(last.id).unwrap();
        }
        let mut steps = begun.unwrap();
        for step in &mut steps {
            fed.inputs.run(step, &mut |_, _| Ok(())).unwrap();
        }
        let told = live.iter().map(|live| {
            let tokens = &live.tokens[live.done..end(live)];
            Accepted { id: live.id, accepted: tokens.len() as u32, tokens }
        });
        let told: Vec<_> = told.collect();
        steps.into_iter().for_each(|step| step.commit(&told).unwrap());
        fed.manager.save_wanted(&stream).unwrap();
        live.iter_mut().for_each(|live| live.done = end(live));
    }

    fn end_done(&mut self) {
        let Self { fed, live, ended, .. } = self;
        for done in live.extract_if(.., |live| live.done == live.tokens.len()) {
            fed.manager.release(done.id).unwrap();
            *ended += 1;
        }
    }
}
