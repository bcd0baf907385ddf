//! Random operations on a tree and on a plain model of it, compared after each.

mod index;
mod model;
mod run;

use run::{Run, Settings};

/// Runs random operations.
fn run(seed: u64, operations: u64, settings: Settings) -> Result<Run, String> {
    let mut run = Run::new(seed, settings);
    for number in 0..operations {
        run.step().map_err(|wrong| format!("seed {seed}, operation {number}: {wrong}"))?;
    }
    run.end().map_err(|wrong| format!("seed {seed}, at the end: {wrong}"))?;
    Ok(run)
}

/// Few blocks, so that much is evicted, and many blocks.
const SETTINGS: [Settings; 3] = [
    Settings { blocks: 24, checkpoints: 6, interval: None },
    Settings { blocks: 60, checkpoints: 40, interval: Some(8) },
    Settings { blocks: 400, checkpoints: 300, interval: Some(16) },
];

fn all(seeds: u64, operations: u64) {
    let mut total = dsv4_kv_prefix::ReuseStats::default();
    let (mut drains, mut overflows) = (0, 0);
    for settings in SETTINGS {
        for seed in 0..seeds {
            let run = run(seed, operations, settings).unwrap();
            let stats = run.tree.stats();
            drains += run.index.drains;
            overflows += run.index.overflows;
            for (sum, part) in [
                (&mut total.reused, stats.reused),
                (&mut total.no_checkpoint, stats.no_checkpoint),
                (&mut total.missed_by_eviction, stats.missed_by_eviction),
                (&mut total.other_root, stats.other_root),
                (&mut total.never_seen, stats.never_seen),
                (&mut total.tail, stats.tail),
            ] {
                *sum += part;
            }
        }
    }
    // The load has covered all cases.
    let met = [total.reused, total.no_checkpoint, total.missed_by_eviction, total.never_seen];
    assert!(met.iter().all(|&tokens| tokens > 1000), "{total:?}");
    // Prompts that another root has: only their first block counts.
    assert!(total.other_root > 300, "{total:?}");
    assert!(overflows > 10 && drains > 2 * overflows, "{overflows} of {drains} drains");
}

#[test]
fn tree_and_model_agree() {
    all(4, 2_000);
}

#[test]
#[ignore = "minutes: cargo test --release -p dsv4-kv-prefix --test stress -- --ignored"]
fn tree_and_model_agree_for_long() {
    all(16, 100_000);
}

#[cfg(feature = "mistakes")]
#[test]
fn every_mistake_is_found() {
    use dsv4_kv_prefix::mistake::{Mistake, make};
    for mistake in Mistake::ALL {
        make(mistake);
        let caught = |seed| {
            // A panic of a debug assertion or an overflow check also counts as found.
            let ran = std::panic::catch_unwind(|| run(seed, 2_000, SETTINGS[1]).map(drop));
            ran.unwrap_or_else(|_| Err("panicked".to_owned())).err()
        };
        let found: Vec<_> = (0..8).map(caught).collect();
        make(Mistake::Nothing);
        println!("{mistake:?}: {:?}", found[0]);
        assert!(found.iter().all(Option::is_some), "{mistake:?} was missed: {found:?}");
    }
}
