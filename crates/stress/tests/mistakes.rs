//! Mistakes that other caches were shipped with, made on purpose. The stress test must find each of them from every
//! seed. Needs the feature `mistakes`.

use std::sync::Arc;

use dsv4_kv::device::{EmuDevice, EmuOptions};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::poison::{PoisonRead, PoisonedRow};
use dsv4_kv::{CacheConfig, KvError};
use dsv4_kv_stress::cache::Cache;
use dsv4_kv_stress::drive::Divergence;
use dsv4_kv_stress::generate::{Manners, kernel_config};
use dsv4_kv_stress::library::Library;
use dsv4_kv_stress::random_run;
use dsv4_kv_tests::fed::{Fed, Padding, Part};
use dsv4_kv_tests::stories::{self, Story};
use kernels_gpu::fault_injection::{Mistake, make};
use kv_layout::geometry::LayerKind;
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rayon::prelude::*;

/// Most operations of a run. A mistake that shows only later is not found.
const OPS: u64 = 1500;
/// Operations of a run without a mistake, which runs to its end.
const CLEAN_OPS: u64 = 120;

/// Four caches whose requests grow beyond a window and a block, and the token histories of these requests.
fn caches() -> Vec<(CacheConfig, Arc<Library>)> {
    (0..4)
        .into_par_iter()
        .map(|seed| CacheConfig {
            model: ModelConfig::preset("tiny").unwrap(),
            max_context: 280,
            max_requests: 3,
            num_blocks: 5,
            max_step_tokens: 260,
            ..kernel_config(seed)
        })
        .map(|config| (config.clone(), Arc::new(Library::new(&config))))
        .collect()
}

/// Runs each of `seeds` seeds with a mistake. Returns the divergence of each, or `None` if nothing was found.
fn runs(
    caches: &[(CacheConfig, Arc<Library>)],
    mistake: Mistake,
    seeds: u64,
    ops: u64,
) -> Vec<Option<Divergence>> {
    make(mistake);
    let run = |seed: u64| {
        let (config, library) = &caches[seed as usize % caches.len()];
        let device = EmuDevice::new(EmuOptions { seed, ..EmuOptions::default() });
        let new = || Cache::new(&device, config, library, seed);
        random_run(seed, ops, Manners::Genuine, config, &new, &mut |_| ()).err()
    };
    let found = (0..seeds).into_par_iter().map(run).collect();
    make(Mistake::Nothing);
    found
}

fn every_mistake_is_found(seeds: u64) {
    let caches = caches();
    let clean = runs(&caches, Mistake::Nothing, seeds.min(8), CLEAN_OPS);
    assert!(clean.iter().all(Option::is_none), "without a mistake nothing is found: {clean:?}");
    for mistake in
        [Mistake::Visibility, Mistake::RingModulus, Mistake::SwappedHalves, Mistake::StaleTable]
    {
        let found = runs(&caches, mistake, seeds, OPS);
        let missed: Vec<_> = (0..).zip(&found).filter(|(_, found)| found.is_none()).collect();
        assert!(missed.is_empty(), "{mistake:?} was missed from seeds {missed:?}");
        let latest = found.iter().flatten().map(|found| found.op).max();
        let first = found[0].as_ref().map(|found| found.what.as_str());
        println!(
            "{mistake:?}: found in {seeds} of {seeds} runs, by operation {latest:?}: {first:?}"
        );
    }
}

/// The poisoned reads found in the scores of all queries of a request's last step, and the expected ones if each query
/// saw one entry too many: the next key, if the step does not write it.
fn scored(seed: u64) -> [Vec<PoisonRead>; 2] {
    let mut random = SmallRng::seed_from_u64(seed);
    let layers = stories::tiny();
    let format = IndexFormat::ALL[seed as usize % IndexFormat::ALL.len()];
    let config = stories::config(&layers, (MainFormat::Ue8m0, format), 2);
    let device = EmuDevice::new(EmuOptions { seed, ..EmuOptions::default() });
    let mut fed = Fed::new(&device, CacheConfig { poison: true, ..config });
    // Not near the end of a block: then the block of the next key exists, though that key was never written.
    let (block, last) = (random.random_range(0..4), random.random_range(8..120));
    let (tokens, chunk) = (128 * block + last, random.random_range(1..5));
    let story = Story::random(&layers, tokens, seed);
    let id = fed.manager.admit().unwrap();
    fed.step(&[Part::new(id, &story, 0..tokens - chunk)], Padding::None);
    let parts = [Part::new(id, &story, tokens - chunk..tokens)];
    let csa = fed.layer_ids().zip(layers).filter(|(_, kind)| *kind == LayerKind::Csa);
    let mut want = Vec::new();
    for (layer, _) in csa {
        let early = |position: &usize| (position + 1) / 4 == tokens / 4;
        want.extend((tokens - chunk..tokens).filter(early).map(|position| PoisonRead {
            layer,
            slot: id.slot(),
            request: Some(id),
            position: position as u32,
            row: PoisonedRow::Key((position as u32 + 1) / 4),
        }));
    }
    let config = fed.manager.config().clone();
    // Does nothing in layers without an indexer.
    fed.run(&parts, Padding::None, &[chunk as u32], &mut |_, updated| {
        updated.score(&config, 0..chunk as u32, 1)
    });
    fed.manager.check_faults(&fed.stream).unwrap();
    match fed.manager.check_poison(&fed.stream) {
        Ok(()) => [Vec::new(), want],
        Err(KvError::PoisonRead { rows, .. }) => [rows, want],
        Err(error) => panic!("{error}"),
    }
}

/// Checks that every run reports the key that is seen too early, and that without the mistake nothing is reported.
fn every_early_score_is_named(seeds: u64) {
    let all = || (0..seeds).into_par_iter().map(scored).collect::<Vec<_>>();
    assert!(all().iter().all(|[found, _]| found.is_empty()), "found without a mistake");
    make(Mistake::Visibility);
    let seen = all();
    make(Mistake::Nothing);
    for (seed, [found, want]) in seen.iter().enumerate() {
        assert_eq!(found, want, "seed {seed}");
    }
    println!("scores of keys seen too early: named in {seeds} of {seeds} runs");
}

/// A sample of [`every_mistake_is_found_in_100_of_100_runs`]. There is only one test at a time, since a mistake is
/// enabled in the whole process.
#[test]
fn every_mistake_is_found_in_some_runs() {
    every_mistake_is_found(4);
    every_early_score_is_named(6);
}

#[test]
#[ignore = "minutes: cargo test -p dsv4-kv-stress --features mistakes --test mistakes -- --ignored"]
fn every_mistake_is_found_in_100_of_100_runs() {
    every_mistake_is_found(100);
    every_early_score_is_named(100);
}
