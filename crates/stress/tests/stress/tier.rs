//! The stress test with a host tier: a cache must pass, on a device that runs work late.

use std::sync::Arc;

use dsv4_kv::device::EmuOptions;
use dsv4_kv_stress::cache::{Cache, skipping};
use dsv4_kv_stress::drive::Counts;
use dsv4_kv_stress::generate::Manners;
use dsv4_kv_stress::generate::tier::{lean_tier_config, tier_config};
use dsv4_kv_stress::library::Library;
use dsv4_kv_stress::{random_run, stress};
use dsv4_kv_tests::lazy::Lazy;
use rayon::prelude::*;

/// The sums of all counts.
fn sum(runs: impl IntoIterator<Item = Counts>) -> Counts {
    let mut counts = Counts::new();
    for (what, count) in runs.into_iter().flatten() {
        *counts.entry(what).or_default() += count;
    }
    counts
}

/// A short run of what `cargo xtask stress --device late` does for longer. Every kind of answer must occur.
#[test]
fn the_host_never_leaves_the_model() {
    let run = |seed| {
        let config = tier_config(seed);
        let library = Arc::new(Library::new(&config));
        let new = || skipping(&config, &library, seed);
        let done = stress(seed, 8_000, Manners::Any, &config, new);
        done.unwrap_or_else(|failure| panic!("{failure:#?}"))
    };
    let counts = sum((0..16).into_par_iter().map(run).collect::<Vec<_>>());
    println!("{counts:#?}");
    for what in [
        "admit and wait",
        "admit and wait refused: NoFreeSlot",
        "advance",
        "blocks evicted",
        "blocks restored",
        "blocks stored",
        "cancel",
        "cancel of nothing",
        "catch up",
        "checkpoints restored",
        "checkpoints stored",
        "not moved: Cancelled",
        "not moved: NoRoomOnDevice",
        "not moved: NoRoomOnHost",
        "not moved: NotThere",
        "prefetch",
        "prefetch of nothing",
        "prefetch refused: OutOfBlocks",
        "prefetch refused: OutOfCheckpoints",
        "settle",
    ] {
        assert!(counts.get(what).is_some_and(|&count| count > 5), "{what}: {counts:#?}");
    }
}

/// As `the_host_never_leaves_the_model`, with kernels: every byte that came back from host memory is compared.
#[test]
fn a_cache_never_leaves_the_model() {
    let run = |seed| {
        let config = lean_tier_config(seed);
        let library = Arc::new(Library::new(&config));
        let device = Lazy::emulated(EmuOptions { seed, ..EmuOptions::default() });
        let new = || Cache::new(&device, &config, &library, seed);
        let done = random_run(seed, 400, Manners::Genuine, &config, &new, &mut |_| ());
        done.unwrap_or_else(|found| panic!("seed {seed}: {found:?}"))
    };
    let counts = sum((0..2).into_par_iter().map(run).collect::<Vec<_>>());
    for what in ["blocks restored", "blocks stored", "checkpoints restored", "tokens reused"] {
        assert!(counts.get(what).is_some_and(|&count| count > 0), "{what}: {counts:#?}");
    }
}
