//! Mistakes in transfers between the device and host memory, made on purpose. The stress test must find each of them.
//! Needs the feature `mistakes`.

use std::num::NonZero;
use std::sync::{Arc, Mutex};
use std::thread;

use dsv4_kv::CacheConfig;
use dsv4_kv::device::{Device, EmuDevice, EmuOptions, Emulator};
use dsv4_kv::tier_mistake::{Mistake, make};
use dsv4_kv_stress::cache::{Cache, late, skipping};
use dsv4_kv_stress::drive::{Counts, Divergence};
use dsv4_kv_stress::generate::Manners;
use dsv4_kv_stress::generate::tier::{lean_tier_config, tier_config};
use dsv4_kv_stress::library::Library;
use dsv4_kv_stress::op::{Op, Script};
use dsv4_kv_stress::{random_run, try_on_cpu, try_script};
use dsv4_kv_tests::lazy::{Lazy, Order};

/// Mistakes that show in counts of blocks and units and in names.
const COUNTED: [Mistake; 7] = [
    Mistake::CancelLeaks,
    Mistake::CancelIgnored,
    Mistake::CancelForgotten,
    Mistake::RefusalKeeps,
    Mistake::SourceNotHeld,
    Mistake::EvictedUnitsLost,
    Mistake::CheckpointTooHigh,
];

/// Mistakes that show only in bytes, and the seeds from which they are found.
const WRITTEN: [(Mistake, &[u64]); 6] = [
    (Mistake::FreedInFlight, &[0]),
    (Mistake::EnteredEarly, &[0]),
    (Mistake::ReadNotHeld, &[1]),
    (Mistake::ArrivesUnordered, &[1]),
    (Mistake::PoisonedAfter, &[1]),
    (Mistake::BlocksSwapped, &[1]),
];
/// The same mistakes from other seeds, run by hand. Eviction of a prefix during its transfer to the host is rare.
const WRITTEN_ELSEWHERE: [(Mistake, &[u64]); 5] = [
    (Mistake::FreedInFlight, &[1]),
    (Mistake::EnteredEarly, &[1]),
    (Mistake::ArrivesUnordered, &[0]),
    (Mistake::PoisonedAfter, &[0]),
    (Mistake::BlocksSwapped, &[0]),
];

/// Mistakes that show only if one stream of a transfer runs before the other, and the seeds from which they are found.
/// `LATE`: a stream that runs late shows them. `EARLY`: a stream that runs early shows it.
const LATE: [(Mistake, &[u64]); 4] = [
    (Mistake::CopiedTooEarly, &[1]),
    (Mistake::OverwrittenTooEarly, &[1]),
    (Mistake::UnpackedTooEarly, &[5]),
    (Mistake::EndedTooEarly, &[1]),
];
const EARLY: [(Mistake, &[u64]); 1] = [(Mistake::PackedTooEarly, &[6])];

/// Runs with a mistake, which is enabled in this thread only. The thread must not be one of rayon's: while a rayon
/// thread waits, it may run another case, which would disable this one's mistake.
fn with<T>(mistake: Mistake, run: impl FnOnce() -> T) -> T {
    make(mistake);
    let done = run();
    make(Mistake::Nothing);
    done
}

/// A run without kernels.
fn counted(mistake: Mistake, seed: u64) -> Result<Counts, Divergence> {
    // Small enough that everything runs out, including host memory.
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

/// Operations of a run with kernels. The mistakes are found within 1,200.
const OPERATIONS: u64 = 3_000;
/// Runs without a mistake: the orders and seeds of [`LATE`] and [`EARLY`], each with the number of operations within
/// which the mistakes are found.
const CLEAN: [(Order, u64, u64); 3] =
    [(Order::Late, 1, 450), (Order::OthersFirst, 1, 450), (Order::Late, 5, 100)];

/// A run with kernels.
fn written(mistake: Mistake, seed: u64) -> Result<Counts, Divergence> {
    run_on_device((mistake, OPERATIONS), &lean_tier_config(seed), seed, Order::Late)
}

/// As `written`, with transfers of three blocks, so that the staging memory is used twice.
fn ordered(
    mistake: Mistake,
    operations: u64,
    seed: u64,
    order: Order,
) -> Result<Counts, Divergence> {
    run_on_device((mistake, operations), &ordered_config(seed), seed, order)
}

fn ordered_config(seed: u64) -> CacheConfig {
    CacheConfig {
        num_blocks: 6,
        max_context: 410,
        max_step_tokens: 400,
        checkpoint_interval: 0,
        ..lean_tier_config(seed)
    }
}

fn run_on_device(
    (mistake, operations): (Mistake, u64),
    config: &CacheConfig,
    seed: u64,
    order: Order,
) -> Result<Counts, Divergence> {
    let library = Arc::new(Library::new(config));
    let emulator = Emulator::new(EmuOptions { seed, ..EmuOptions::default() });
    let device = Device::from_backend(Lazy::new(emulator).with_order(order));
    let new = || Cache::new(&device, config, &library, seed);
    with(mistake, || random_run(seed, operations, Manners::Genuine, config, &new, &mut |_| ()))
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
    all_are_found(COUNTED.map(|mistake| (mistake, &[0, 1][..])), counted);
}

#[test]
fn mistakes_in_what_is_written_are_found() {
    all_are_found(WRITTEN, written);
}

#[test]
#[ignore = "half a minute: cargo test --release -p dsv4-kv-stress --features mistakes --test stress -- --ignored from_other_seeds"]
fn mistakes_are_found_from_other_seeds() {
    all_are_found(COUNTED.map(|mistake| (mistake, &[2, 3][..])), counted);
    all_are_found(WRITTEN_ELSEWHERE, written);
}

#[test]
fn mistakes_in_the_order_of_streams_are_found() {
    thread::scope(|scope| {
        for (order, seed, operations) in CLEAN {
            scope.spawn(move || {
                let clean = ordered(Mistake::Nothing, operations, seed, order);
                clean.unwrap_or_else(|found| panic!("without a mistake, {order:?}: {found:?}"));
            });
        }
    });
    let in_order = |order| move |mistake, seed| ordered(mistake, OPERATIONS, seed, order);
    all_are_found(LATE, in_order(Order::Late));
    all_are_found(EARLY, in_order(Order::OthersFirst));
}

/// A run that fails only on a late device fails in the same way as a script.
#[test]
#[ignore = "a minute: cargo test -p dsv4-kv-stress --features mistakes --test stress -- --ignored late_device"]
fn a_mistake_that_only_a_late_device_shows_is_found_by_its_script() {
    let (mistake, seed) = LATE[0];
    let seed = seed[0];
    let config = ordered_config(seed);
    let library = Arc::new(Library::new(&config));
    let mut script = Script { config: config.clone(), seed, ops: Vec::new() };
    let new = || late(&config, &library, seed);
    let mut record = |op: &Op| script.ops.push(op.clone());
    let run = || random_run(seed, OPERATIONS, Manners::Genuine, &config, &new, &mut record);
    let found = with(mistake, run).expect_err("a divergence");

    let text = serde_json::to_string(&script).expect("JSON");
    let script: Script = serde_json::from_str(&text).expect("a script");
    assert_eq!(with(mistake, || try_on_cpu(&script)).expect_err("a divergence"), found);
    let device = EmuDevice::new(EmuOptions { seed, ..EmuOptions::default() });
    let at_once = || try_script(|| Cache::new(&device, &config, &library, seed), &script);
    with(mistake, at_once).unwrap_or_else(|found| panic!("without delay: {found:?}"));
}
