//! Mistakes that other caches were shipped with, made on purpose: the stress test finds each of them,
//! from every seed. Needs the feature `mistakes`.

use std::sync::Arc;

use dsv4_kv::CacheConfig;
use dsv4_kv::device::{EmuDevice, EmuOptions};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv_tests::stress::cache::Cache;
use dsv4_kv_tests::stress::drive::Divergence;
use dsv4_kv_tests::stress::generate::{Manners, kernel_config};
use dsv4_kv_tests::stress::library::Library;
use dsv4_kv_tests::stress::random_run;
use kernels_gpu::mistake::{Mistake, make};
use rayon::prelude::*;

/// Most operations of a run; a mistake that would show later is not found.
const OPS: u64 = 1500;
/// Operations of a run without a mistake, which goes on to its end.
const CLEAN_OPS: u64 = 120;

/// Runs of `seeds` seeds with a mistake; where each was found, if it was.
fn runs(mistake: Mistake, seeds: u64, ops: u64) -> Vec<Option<Divergence>> {
    let configs: Vec<_> = (0..4)
        .map(|seed| CacheConfig {
            model: ModelConfig::preset("tiny").unwrap(),
            max_context: 280,
            max_requests: 3,
            num_blocks: 5,
            max_step_tokens: 260,
            ..kernel_config(seed)
        })
        .map(|config| (Arc::new(Library::new(&config)), config))
        .collect();
    make(mistake);
    let run = |seed: u64| {
        let (library, config) = &configs[seed as usize % configs.len()];
        let device = EmuDevice::new(EmuOptions { seed, ..EmuOptions::default() });
        let new = || Cache::new(&device, config, library, seed);
        random_run(seed, ops, Manners::Genuine, config, &new, &mut |_| ()).err()
    };
    let found = (0..seeds).into_par_iter().map(run).collect();
    make(Mistake::Nothing);
    found
}

fn every_mistake_is_found(seeds: u64) {
    let clean = runs(Mistake::Nothing, seeds.min(8), CLEAN_OPS);
    assert!(clean.iter().all(Option::is_none), "without a mistake nothing is found: {clean:?}");
    for mistake in
        [Mistake::Visibility, Mistake::RingModulus, Mistake::SwappedHalves, Mistake::StaleTable]
    {
        let found = runs(mistake, seeds, OPS);
        let missed: Vec<_> = (0..).zip(&found).filter(|(_, found)| found.is_none()).collect();
        assert!(missed.is_empty(), "{mistake:?} was missed from seeds {missed:?}");
        let latest = found.iter().flatten().map(|found| found.op).max();
        let first = found[0].as_ref().map(|found| found.what.as_str());
        println!(
            "{mistake:?}: found in {seeds} of {seeds} runs, by operation {latest:?}: {first:?}"
        );
    }
}

/// A sample of [`every_mistake_is_found_in_100_of_100_runs`]. One test at a time: a mistake is made
/// in the whole process.
#[test]
fn every_mistake_is_found_in_some_runs() {
    every_mistake_is_found(4);
}

/// Run by hand: `cargo test -p dsv4-kv-tests --features mistakes --test mistakes -- --ignored`.
#[test]
#[ignore = "minutes; run by hand"]
fn every_mistake_is_found_in_100_of_100_runs() {
    every_mistake_is_found(100);
}
