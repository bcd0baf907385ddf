//! Mistakes in what moves between the device and host memory, made on purpose: the stress test finds each of them.
//! Needs the feature `mistakes`.

use std::num::NonZero;
use std::sync::{Arc, Mutex};
use std::thread;

use dsv4_kv::CacheConfig;
use dsv4_kv::device::EmuOptions;
use dsv4_kv::tier_mistake::{Mistake, make};
use dsv4_kv_stress::cache::{Cache, skipping};
use dsv4_kv_stress::drive::{Counts, Divergence};
use dsv4_kv_stress::generate::Manners;
use dsv4_kv_stress::generate::tier::{lean_tier_config, tier_config};
use dsv4_kv_stress::library::Library;
use dsv4_kv_stress::random_run;
use dsv4_kv_tests::lazy::Lazy;

/// What blocks, units and names alone show.
const COUNTED: [Mistake; 7] = [
    Mistake::CancelLeaks,
    Mistake::CancelIgnored,
    Mistake::CancelForgotten,
    Mistake::RefusalKeeps,
    Mistake::SourceNotHeld,
    Mistake::EvictedUnitsLost,
    Mistake::CheckpointTooHigh,
];

/// What only bytes show, and from which seeds it is looked for: what the device evicts while it leaves is rarely evicted
/// just then.
const WRITTEN: [(Mistake, &[u64]); 6] = [
    (Mistake::FreedInFlight, &[0, 1]),
    (Mistake::EnteredEarly, &[0, 1]),
    (Mistake::ReadNotHeld, &[1]),
    (Mistake::ArrivesUnordered, &[0, 1]),
    (Mistake::PoisonedAfter, &[0, 1]),
    (Mistake::BlocksSwapped, &[0, 1]),
];

/// Runs with a mistake, which is made in this thread only. The thread must not be one of rayon's: one of those that waits
/// for a launch of the emulator may run another case meanwhile, which would end this one's mistake.
fn with<T>(mistake: Mistake, run: impl FnOnce() -> T) -> T {
    make(mistake);
    let done = run();
    make(Mistake::Nothing);
    done
}

/// A run without kernels.
fn counted(mistake: Mistake, seed: u64) -> Result<Counts, Divergence> {
    // Small enough that everything runs out, host memory too.
    let config = CacheConfig {
        num_blocks: 8,
        num_checkpoints: 3,
        max_requests: 4,
        max_context: 700,
        max_step_tokens: 500,
        checkpoint_interval: 128,
        host_bytes: 1_400_000,
        ..tier_config(seed)
    };
    let library = Arc::new(Library::new(&config));
    let new = || skipping(&config, &library, seed);
    with(mistake, || random_run(seed, 100_000, Manners::Any, &config, &new, &mut |_| ()))
}

/// A run with kernels.
fn written(mistake: Mistake, seed: u64) -> Result<Counts, Divergence> {
    let config = lean_tier_config(seed);
    let library = Arc::new(Library::new(&config));
    let device = Lazy::emulated(EmuOptions { seed, ..EmuOptions::default() });
    let new = || Cache::new(&device, &config, &library, seed);
    with(mistake, || random_run(seed, 3_000, Manners::Genuine, &config, &new, &mut |_| ()))
}

fn all_are_found(
    mistakes: impl IntoIterator<Item = (Mistake, &'static [u64])>,
    run: impl Fn(Mistake, u64) -> Result<Counts, Divergence> + Sync,
) {
    let cases = mistakes.into_iter().flat_map(|(of, seeds)| seeds.iter().map(move |&at| (of, at)));
    let cases: Vec<_> = cases.collect();
    let is_missed = |&(mistake, seed): &(Mistake, u64)| match run(mistake, seed) {
        Ok(_) => true,
        Err(found) => {
            println!("{mistake:?}, seed {seed}: operation {}, {}", found.op, found.what);
            false
        }
    };
    let (cases, missed) = (Mutex::new(cases.into_iter()), Mutex::new(Vec::new()));
    let next = || cases.lock().expect("no thread panicked").next();
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, NonZero::get) {
            scope.spawn(|| {
                while let Some(case) = next() {
                    if is_missed(&case) {
                        missed.lock().expect("no thread panicked").push(case);
                    }
                }
            });
        }
    });
    let missed = missed.into_inner().expect("no thread panicked");
    assert!(missed.is_empty(), "missed: {missed:?}");
}

#[test]
fn mistakes_in_what_is_held_are_found() {
    let clean = counted(Mistake::Nothing, 0);
    clean.unwrap_or_else(|found| panic!("without a mistake: {found:?}"));
    all_are_found(COUNTED.map(|mistake| (mistake, &[0, 1, 2, 3][..])), counted);
}

#[test]
fn mistakes_in_what_is_written_are_found() {
    all_are_found(WRITTEN, written);
}
