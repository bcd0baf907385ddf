//! Replays an hour of a trace through the ledger of a cache, and compares with Dynamo's indexer.

use std::time::Instant;

use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::{Accepted, CacheConfig, KvError, LayerGroup, Ledger, Prompt, RequestId, StepRequest};
use dsv4_kv_events::Publisher;

use crate::dynamo::{Indexer, compare, options};

/// Most requests at the same time.
const REQUESTS: u32 = 64;
/// Tokens of a step.
const STEP: u32 = 8192;
const GROUP: LayerGroup = LayerGroup::Trunk;

/// A request of a trace in the Mooncake format.
#[derive(serde::Deserialize)]
struct Traced {
    input_length: usize,
    output_length: usize,
    hash_ids: Vec<u32>,
}

impl Traced {
    /// Its prompt, from the ids of its blocks of 512 tokens, and an answer that no other request has.
    fn tokens(&self, number: u32) -> Vec<u32> {
        let token =
            |seed: u32, at: u32| (seed.wrapping_mul(2_654_435_761) ^ (at * 40_503)) % 129_280;
        let of_block = |&id: &u32| (0..512).map(move |at| token(id, at));
        let prompt = self.hash_ids.iter().flat_map(of_block).take(self.input_length);
        let answer = (0..self.output_length as u32).map(|at| token(number, at + 512));
        prompt.chain(answer).collect()
    }
}

/// A server's use of a cache, without a device: the ledger makes all decisions of a cache.
struct Replayed {
    ledger: Ledger,
    step_meta: Vec<i32>,
    /// Running requests, oldest first.
    live: Vec<RequestId>,
    reused: u64,
}

impl Replayed {
    fn new(num_blocks: u32) -> Self {
        let model = ModelConfig::preset("flash").expect("a preset");
        let config = CacheConfig {
            num_blocks,
            max_requests: REQUESTS,
            max_context: 1 << 18,
            max_step_tokens: STEP,
            num_checkpoints: 10_000,
            event_capacity: 20_000,
            ..CacheConfig::new(model)
        };
        let ledger = Ledger::new(&config).unwrap();
        let step_meta = vec![0; ledger.largest_layout().elements()];
        Self { ledger, step_meta, live: Vec::new(), reused: 0 }
    }

    fn end_oldest(&mut self) {
        let oldest = self.live.remove(0);
        self.ledger.release(oldest).unwrap();
    }

    /// Admits a request, and computes its prompt and answer. The oldest requests end when slots or blocks are short.
    fn compute(&mut self, tokens: &[u32], prompt: usize, publisher: &mut Publisher) {
        if self.live.len() == REQUESTS as usize {
            self.end_oldest();
        }
        let asked = Prompt { tokens: &tokens[..prompt], salt: b"", adapter: b"" };
        let admission = self.ledger.admit_with(&asked).unwrap();
        let (id, mut start) = (admission.id, admission.reused);
        self.reused += u64::from(start);
        self.live.push(id);
        while start < tokens.len() as u32 {
            let count = STEP.min(tokens.len() as u32 - start);
            let part = StepRequest { id, start, tokens: count };
            match self.ledger.begin_step(GROUP, &[part], &mut self.step_meta) {
                Ok(_) => {}
                Err(KvError::OutOfBlocks { .. }) => {
                    self.end_oldest();
                    continue;
                }
                Err(error) => panic!("{error}"),
            }
            let told = &tokens[start as usize..][..count as usize];
            let accepted = [Accepted { id, accepted: count, tokens: told }];
            self.ledger.commit_step(GROUP, &accepted).unwrap();
            publisher.publish(&mut self.ledger).unwrap();
            start += count;
        }
    }
}

/// Runs without pauses, with room for 100,000 blocks, and 64 requests at the same time. `DSV4_TRACE` names the trace.
#[test]
#[ignore = "needs the Python package ai-dynamo-runtime 1.6.1, named by DSV4_DYNAMO_PYTHON, and a trace; run by hand"]
fn dynamo_follows_a_trace() {
    let trace =
        std::env::var("DSV4_TRACE").expect("DSV4_TRACE names a trace in the Mooncake format");
    let trace = std::fs::read_to_string(trace).expect("the trace");
    let indexer = Indexer::start();
    let mut replayed = Replayed::new(100_000);
    let mut publisher = Publisher::start(&mut replayed.ledger, options()).unwrap();
    indexer.register(&publisher);
    let (start, mut requests, mut compared) = (Instant::now(), 0, 0);
    for line in trace.lines() {
        let traced = serde_json::from_str::<Traced>(line).expect("a request");
        let tokens = traced.tokens(requests);
        replayed.compute(&tokens, traced.input_length, &mut publisher);
        requests += 1;
        if requests.is_multiple_of(1000) {
            compare(&indexer, &mut replayed.ledger, &mut publisher).unwrap();
            compared += 1;
        }
    }
    compare(&indexer, &mut replayed.ledger, &mut publisher).unwrap();
    let (reused, took) = (replayed.reused, start.elapsed());
    println!("{requests} requests, {reused} tokens reused, {} comparisons, {took:?}", compared + 1);
    println!("{:?}", publisher.stats());
}
