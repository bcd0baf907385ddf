//! The same tokens under different salts or adapters: nothing is shared through host memory or through files. Kernels
//! do not run; all lookups, transfers, stores and reads do.

use std::collections::{HashMap, HashSet};
use std::time::Instant;

use dsv4_kv::device::{Null, NullDevice};
use dsv4_kv::{Accepted, CacheConfig, Launches, Prompt, StepRequest};
use dsv4_kv_cold_tier::{ColdOptions, ColdTier};
use dsv4_kv_tests::fed::Fed;
use dsv4_kv_tests::stories::config;
use kv_layout::geometry::LayerKind::{Csa, Hca, Swa};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

const BLOCK: usize = 128;
/// Tokens of a prompt: two blocks, and one token to compute.
const TOKENS: usize = 2 * BLOCK + 1;
/// Number of pairs after which all prompts are replaced by new ones.
const EPOCH: u32 = 256;
/// Prompts of an epoch; every fourth has the same beginning.
const PROMPTS: u32 = 8;

/// Salts and adapters, some of which are equal when they are concatenated.
fn keys() -> Vec<(Vec<u8>, Vec<u8>)> {
    let parts: [&[u8]; 6] = [b"", b"a", b"b", b"ab", b"\0", b"\0\0\0\0\0\0\0\x01a"];
    let pairs =
        parts.iter().flat_map(|salt| parts.map(|adapter| (salt.to_vec(), adapter.to_vec())));
    pairs.collect()
}

fn prompt(epoch: u32, number: u32) -> Vec<u32> {
    let mut tokens = vec![epoch * PROMPTS + number % 4; BLOCK];
    tokens.resize(TOKENS, epoch * PROMPTS + number);
    tokens
}

/// A cache with room for few prompts on the device, and the prefixes that each key has computed in this epoch.
struct Run {
    fed: Fed<Null>,
    cold: Option<ColdTier<Null>>,
    computed: HashMap<usize, HashSet<Vec<u32>>>,
    keys: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Run {
    fn new(host_bytes: u64, store: Option<(&str, &ColdOptions)>) -> Self {
        let base = config(&[Swa, Csa, Hca], (MainFormat::Ue8m0, IndexFormat::Mxfp4), 2);
        let settings =
            CacheConfig { num_checkpoints: 3, checkpoint_interval: 128, host_bytes, ..base };
        let mut fed = Fed::new(&NullDevice::null(1 << 34), settings);
        let open = |(url, options): (&str, &ColdOptions)| {
            ColdTier::open(&mut fed.manager, url, b"weights", options).unwrap()
        };
        let cold = store.map(open);
        Self { fed, cold, computed: HashMap::new(), keys: keys() }
    }

    /// Checks that a key has computed a prefix itself.
    fn check(&self, key: usize, prefix: &[u32]) -> Result<(), String> {
        let own = self.computed.get(&key).is_some_and(|computed| computed.contains(prefix));
        let (len, keys) = (prefix.len(), &self.keys[key]);
        if own || len == 0 { Ok(()) } else { Err(format!("{len} tokens are not of {keys:?}")) }
    }

    /// Fetches a prompt under a key from files and host memory, continues from there, computes the rest, and ends.
    /// Checks that the key has computed everything that it reused.
    fn ask(&mut self, key: usize, tokens: &[u32]) -> Result<(), String> {
        let (salt, adapter) = self.keys[key].clone();
        let asked = Prompt { tokens, salt: &salt, adapter: &adapter };
        if let Some(cold) = &mut self.cold {
            cold.fetch(&self.fed.manager, &asked).unwrap();
            cold.settle(&mut self.fed.manager);
        }
        let there = self.fed.manager.host_prompt(&asked).expect("there is a host tier");
        self.check(key, &tokens[..there.in_host as usize])?;
        self.check(key, &tokens[..there.reusable as usize])?;
        let Fed { manager, stream, .. } = &mut self.fed;
        let admission = manager.admit_waiting(stream, &asked).unwrap();
        let (id, start) = (admission.id, admission.reused);
        let count = tokens.len() as u32 - start;
        let mut step = manager
            .begin_step(stream, Launches::Eager, &[StepRequest { id, start, tokens: count }])
            .unwrap();
        step.skip_kernels();
        let told = Accepted { id, accepted: count, tokens: &tokens[start as usize..] };
        step.commit(&[told]).unwrap();
        manager.settle_tier(stream).unwrap();
        manager.release(id).unwrap();
        if let Some(cold) = &mut self.cold {
            cold.settle(manager);
        }
        self.check(key, &tokens[..start as usize])?;
        let computed = self.computed.entry(key).or_default();
        computed.extend((1..=2).map(|blocks| tokens[..blocks * BLOCK].to_vec()));
        Ok(())
    }

    /// Runs `count` pairs: requests a prompt under one key, then under another.
    fn pairs(&mut self, count: u32) -> Result<(), String> {
        let (mut random, begun) = (SmallRng::seed_from_u64(23), Instant::now());
        for number in 0..count {
            if number.is_multiple_of(EPOCH) {
                self.computed.clear();
            }
            let tokens = prompt(number / EPOCH, random.random_range(0..PROMPTS));
            let one = random.random_range(0..self.keys.len());
            let two = (one + random.random_range(1..self.keys.len())) % self.keys.len();
            for key in [one, two] {
                self.ask(key, &tokens).map_err(|wrong| format!("pair {number}: {wrong}"))?;
            }
        }
        self.fed.manager.audit_tier()?;
        let (stats, reused) = (self.fed.manager.tier_stats(), self.fed.manager.reuse_stats());
        println!("{count} pairs in {:.1?}, none shared: {stats:?}, {reused:?}", begun.elapsed());
        assert!(reused.hits > u64::from(count) / 5, "{reused:?}");
        assert!(stats.restored_checkpoints > u64::from(count) / 5, "{stats:?}");
        Ok(())
    }
}

/// Bytes of host memory for the prompts of an epoch.
const EPOCHS_HOST: u64 = 64 << 20;
/// Bytes of host memory for a few prompts.
const FEW: u64 = 2 << 20;

#[test]
fn another_salt_shares_nothing_through_host_memory() {
    Run::new(EPOCHS_HOST, None).pairs(3_000).unwrap();
}

#[test]
#[ignore = "a million pairs: docs/reliability.md"]
fn another_salt_shares_nothing_through_host_memory_a_million_times() {
    Run::new(EPOCHS_HOST, None).pairs(1_000_000).unwrap();
}

fn through_files(count: u32) {
    let directory = tempfile::tempdir().unwrap();
    through_store(count, directory.path().to_str().unwrap(), &ColdOptions::default());
}

fn through_store(count: u32, url: &str, options: &ColdOptions) {
    let mut run = Run::new(FEW, Some((url, options)));
    run.pairs(count).unwrap();
    let stats = run.cold.as_ref().unwrap().stats();
    println!("{stats:?}");
    // No object of another owner was even opened.
    assert_eq!((stats.foreign, stats.damaged, stats.failed), (0, 0, 0), "{stats:?}");
    assert!(stats.restored > u64::from(count) / 5, "{stats:?}");
}

#[test]
fn another_salt_shares_nothing_through_files() {
    through_files(300);
}

#[test]
#[ignore = "thousands of files: docs/reliability.md"]
fn another_salt_shares_nothing_through_thousands_of_files() {
    through_files(3_000);
}

/// A bucket of an S3 server. It must be empty at the start, since objects in it would be found.
#[cfg(feature = "aws")]
#[test]
#[ignore = "needs a server: docs/reliability.md"]
fn another_salt_shares_nothing_through_s3() {
    let set = |name| std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"));
    let option = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    let store = vec![
        option("aws_endpoint", &set("DSV4_S3_ENDPOINT")),
        option("aws_allow_http", "true"),
        option("aws_region", "us-east-1"),
        option("aws_access_key_id", "test"),
        option("aws_secret_access_key", "test"),
    ];
    let begun = Instant::now();
    through_store(300, &set("DSV4_S3_URL"), &ColdOptions { store });
    println!("300 pairs in {:.1?}", begun.elapsed());
}

#[cfg(feature = "mistakes")]
#[test]
fn a_salt_that_is_ignored_is_found() {
    use dsv4_kv_prefix::mistake::{Mistake, make};
    make(Mistake::SaltIgnored);
    let found = Run::new(EPOCHS_HOST, None).pairs(100);
    make(Mistake::Nothing);
    println!("{}", found.unwrap_err());
}
