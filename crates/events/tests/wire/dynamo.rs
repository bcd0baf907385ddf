//! Dynamo's own indexer is the judge: what it has is what the cache has, whatever it misses.
//!
//! It is a program of the Python package `ai-dynamo-runtime`, version 1.6.1, of 200 MB: `cargo xtask scale-test` installs it into
//! target/ and runs these tests. By hand, with a trace:
//!
//! ```bash
//! python3 -m venv target/dynamo && target/dynamo/bin/pip install ai-dynamo-runtime==1.6.1
//! export DSV4_DYNAMO_PYTHON=$PWD/target/dynamo/bin/python DSV4_TRACE=FILE
//! cargo test --release -p dsv4-kv-events --test wire -- --ignored
//! ```

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use dsv4_kv_events::{Published, Publisher, PublisherOptions};
use dsv4_kv_prefix::RootKey;
use serde_json::{Value, json};

use crate::at_same_endpoints;
use crate::cache::Cache;
use crate::http::ask;

const PATIENCE: Duration = Duration::from_secs(20);

/// The indexer, which ends with this.
struct Indexer {
    program: Child,
    port: u16,
}

impl Drop for Indexer {
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}

impl Indexer {
    fn start() -> Self {
        let python = std::env::var("DSV4_DYNAMO_PYTHON");
        let python = python.expect("DSV4_DYNAMO_PYTHON names a python that has ai-dynamo-runtime");
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut command = Command::new(python);
        command.args(["-m", "dynamo.indexer", "--port", &free.to_string()]);
        let program = command.stderr(Stdio::inherit()).spawn().expect("the indexer starts");
        let indexer = Self { program, port: free };
        wait_for("the indexer", || ask(free, "GET", "/workers", None).is_ok());
        indexer
    }

    /// Connects it to a publisher.
    fn register(&self, publisher: &Publisher) {
        let body = json!({
            "instance_id": 1,
            "endpoint": publisher.endpoint(),
            "replay_endpoint": publisher.replay_endpoint(),
            "model_name": "model",
            "block_size": 128,
        });
        ask(self.port, "POST", "/register", Some(&body)).expect("registers");
        // It says so before it has subscribed.
        std::thread::sleep(Duration::from_millis(300));
    }

    /// The blocks that it has, each with the one above it.
    fn dump(&self) -> BTreeMap<u64, Option<u64>> {
        let dump = ask(self.port, "GET", "/dump", None).expect("dumps");
        let mut blocks = BTreeMap::new();
        for event in dump["model:default"]["events"].as_array().into_iter().flatten() {
            let stored = &event["event"]["data"]["stored"];
            let mut parent = stored["parent_hash"].as_u64();
            for block in stored["blocks"].as_array().into_iter().flatten() {
                let hash = block["block_hash"].as_u64().expect("a hash");
                assert_eq!(blocks.insert(hash, parent), None, "{hash} is there twice");
                parent = Some(hash);
            }
        }
        blocks
    }

    /// What it would reuse of a prompt.
    fn query(&self, tokens: &[u32]) -> Value {
        let body = json!({"model_name": "model", "token_ids": tokens});
        ask(self.port, "POST", "/query", Some(&body)).expect("answers")
    }
}

fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let since = Instant::now();
    while !is_so() {
        assert!(since.elapsed() < PATIENCE, "{what} is not there in time");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn options() -> PublisherOptions {
    let any_port = "tcp://127.0.0.1:0".to_owned();
    let replay_endpoint = any_port.clone();
    let heartbeat = Duration::from_millis(100);
    PublisherOptions {
        endpoint: any_port,
        replay_endpoint,
        heartbeat,
        ..PublisherOptions::default()
    }
}

/// Compares until nothing differs. Nothing happens meanwhile; by the publisher's next message the indexer learns that it
/// has missed others.
fn compare(indexer: &Indexer, cache: &mut Cache, publisher: &mut Publisher) -> Result<(), String> {
    wait_for("the publisher", || {
        publisher.publish(&mut cache.tree).unwrap() == Published::Nothing
            && publisher.stats().resident == u64::from(cache.tree.counts().blocks)
    });
    let dump = cache.dump().0;
    let want: BTreeMap<_, _> = dump.iter().map(|(&hash, block)| (hash, block.parent)).collect();
    let since = Instant::now();
    loop {
        let got = indexer.dump();
        if got == want {
            return Ok(());
        }
        if since.elapsed() > Duration::from_secs(10) {
            let missing = want.keys().filter(|hash| !got.contains_key(hash)).count();
            let (has, should, stats) = (got.len(), want.len(), publisher.stats());
            return Err(format!("{has} of {should} blocks, {missing} are missing: {stats:?}"));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn traffic(cache: &mut Cache, publisher: &mut Publisher, steps: u32) {
    for _ in 0..steps {
        cache.operation();
        publisher.publish(&mut cache.tree).unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Dynamo knows a block by its tokens and its adapter, not by its salt: one salt each.
const ROOTS: [&[(&str, &str)]; 3] = [&[("", "")], &[("", ""), ("", "adapter")], &[("tenant", "")]];

#[test]
#[ignore = "needs the Python package ai-dynamo-runtime 1.6.1, named by DSV4_DYNAMO_PYTHON; run by hand"]
fn dynamos_index_is_the_caches() {
    for roots in ROOTS {
        let indexer = Indexer::start();
        let mut cache = Cache::new(1, (300, 4000), roots);
        (0..20).for_each(|_| cache.operation());
        let mut publisher = Publisher::start(&mut cache.tree, options()).unwrap();
        // It comes late.
        traffic(&mut cache, &mut publisher, 50);
        indexer.register(&publisher);
        for _ in 0..10 {
            traffic(&mut cache, &mut publisher, 50);
            compare(&indexer, &mut cache, &mut publisher).unwrap();
        }
        // A prompt of one block that is there, in its terms: an instance, a rank, and tokens.
        let dump = cache.dump().0;
        let mut at_root = dump.values().filter(|block| block.parent.is_none());
        let tokens = at_root.find(|block| block.keys.as_deref() != Some(&["adapter".to_owned()]));
        let score = indexer.query(&tokens.expect("a first block").tokens);
        assert_eq!(score["scores"]["1"]["0"], json!(128), "{score}");
    }
}

/// The log overflows, and little is kept for who comes late.
#[test]
#[ignore = "needs the Python package ai-dynamo-runtime 1.6.1, named by DSV4_DYNAMO_PYTHON; run by hand"]
fn dynamo_starts_anew_with_a_snapshot() {
    let indexer = Indexer::start();
    let mut cache = Cache::new(2, (300, 16), ROOTS[1]);
    let options =
        PublisherOptions { replay_bytes: 30_000, snapshot_interval: Duration::ZERO, ..options() };
    let mut publisher = Publisher::start(&mut cache.tree, options).unwrap();
    traffic(&mut cache, &mut publisher, 200);
    indexer.register(&publisher);
    for _ in 0..10 {
        traffic(&mut cache, &mut publisher, 50);
        compare(&indexer, &mut cache, &mut publisher).unwrap();
    }
    assert!(publisher.stats().snapshots > 10, "{:?}", publisher.stats());
}

/// A publisher ends and another begins at the same ports, 100 times.
#[test]
#[ignore = "needs the Python package ai-dynamo-runtime 1.6.1, named by DSV4_DYNAMO_PYTHON; run by hand"]
fn dynamo_notices_restarts() {
    let indexer = Indexer::start();
    let mut cache = Cache::new(3, (300, 4000), ROOTS[1]);
    let mut publisher = Publisher::start(&mut cache.tree, options()).unwrap();
    indexer.register(&publisher);
    for _ in 0..100 {
        traffic(&mut cache, &mut publisher, 20);
        let again = at_same_endpoints(&publisher, options());
        drop(publisher);
        (0..5).for_each(|_| cache.operation());
        publisher = Publisher::start(&mut cache.tree, again).unwrap();
        // It connects again by itself.
        compare(&indexer, &mut cache, &mut publisher).unwrap();
    }
}

/// The same with numbers that begin at 0 again: it takes all that comes for what it has.
#[test]
#[ignore = "needs the Python package ai-dynamo-runtime 1.6.1, named by DSV4_DYNAMO_PYTHON; run by hand"]
fn dynamo_would_be_frozen_by_numbers_from_zero() {
    let indexer = Indexer::start();
    let mut cache = Cache::new(4, (300, 4000), ROOTS[0]);
    let options = PublisherOptions { first_sequence: Some(0), ..options() };
    let mut publisher = Publisher::start(&mut cache.tree, options.clone()).unwrap();
    indexer.register(&publisher);
    traffic(&mut cache, &mut publisher, 200);
    compare(&indexer, &mut cache, &mut publisher).unwrap();
    let again = at_same_endpoints(&publisher, options);
    drop(publisher);
    publisher = Publisher::start(&mut cache.tree, again).unwrap();
    traffic(&mut cache, &mut publisher, 20);
    let compared = compare(&indexer, &mut cache, &mut publisher);
    assert!(compared.is_err_and(|difference| !difference.contains(", 0 are missing")));
}

/// What this indexer cannot do: were it to learn, the documentation would say so.
#[test]
#[ignore = "needs the Python package ai-dynamo-runtime 1.6.1, named by DSV4_DYNAMO_PYTHON; run by hand"]
fn dynamo_takes_blocks_of_two_salts_for_one() {
    let indexer = Indexer::start();
    let mut cache = Cache::new(1, (300, 4000), &[("", ""), ("tenant", "")]);
    let mut publisher = Publisher::start(&mut cache.tree, options()).unwrap();
    indexer.register(&publisher);
    traffic(&mut cache, &mut publisher, 120);
    let compared = compare(&indexer, &mut cache, &mut publisher);
    println!("{compared:?}");
    assert!(compared.is_err_and(|difference| !difference.contains(", 0 are missing")));
}

/// A request of a trace in the Mooncake format.
#[derive(serde::Deserialize)]
struct Traced {
    input_length: usize,
    output_length: usize,
    hash_ids: Vec<u32>,
}

impl Traced {
    /// Its prompt, by the ids of its blocks of 512 tokens, and an answer of its own.
    fn tokens(&self, number: u32) -> Vec<u32> {
        let token =
            |seed: u32, at: u32| (seed.wrapping_mul(2_654_435_761) ^ (at * 40_503)) % 129_280;
        let of_block = |&id: &u32| (0..512).map(move |at| token(id, at));
        let prompt = self.hash_ids.iter().flat_map(of_block).take(self.input_length);
        let answer = (0..self.output_length as u32).map(|at| token(number, at + 512));
        prompt.chain(answer).collect()
    }
}

/// As fast as it goes, with room for 100,000 blocks, and 64 requests at once. `DSV4_TRACE` names the trace.
#[test]
#[ignore = "needs the Python package ai-dynamo-runtime 1.6.1, named by DSV4_DYNAMO_PYTHON, and a trace; run by hand"]
fn dynamo_follows_a_trace() {
    let trace =
        std::env::var("DSV4_TRACE").expect("DSV4_TRACE names a trace in the Mooncake format");
    let trace = std::fs::read_to_string(trace).expect("the trace");
    let indexer = Indexer::start();
    let mut cache = Cache::new(1, (100_000, 20_000), ROOTS[0]);
    let mut publisher = Publisher::start(&mut cache.tree, options()).unwrap();
    indexer.register(&publisher);
    let root = RootKey::new(b"", b"", b"model");
    let start = Instant::now();
    for (number, line) in trace.lines().enumerate() {
        let tokens = serde_json::from_str::<Traced>(line).expect("a request").tokens(number as u32);
        cache.end_all_but(63);
        cache.compute(&root, &tokens, Some((tokens.len() / 128) as u32));
        publisher.publish(&mut cache.tree).unwrap();
        if number % 1000 == 999 {
            compare(&indexer, &mut cache, &mut publisher).unwrap();
        }
    }
    compare(&indexer, &mut cache, &mut publisher).unwrap();
    println!("{:?} in {:?}", publisher.stats(), start.elapsed());
}
