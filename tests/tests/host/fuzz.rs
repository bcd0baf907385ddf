//! The fuzz targets without a fuzzer: every file of the corpus, and mutations of these files.

use std::time::{Duration, Instant};

use dsv4_kv_tests::fuzz::{TARGETS, kernel_counts, launches, refuses_misplaced_arguments};
use include_dir::{Dir, include_dir};
use kernels_gpu::table::KERNELS;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

/// Number of mutations per target.
const MUTATIONS: u64 = 600;

/// The corpus, with one folder per target.
static CORPUS: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/corpus");

fn corpus(target: &str) -> Vec<Vec<u8>> {
    let folder = CORPUS.get_dir(target).unwrap_or_else(|| panic!("no corpus of {target}"));
    let files: Vec<_> = folder.files().map(|file| file.contents().to_vec()).collect();
    assert!(!files.is_empty(), "the corpus of {target} is empty");
    files
}

/// Changes, removes or doubles some bytes, or replaces them by those of another file.
fn mutate(bytes: &mut Vec<u8>, other: &[u8], random: &mut SmallRng) {
    for _ in 0..random.random_range(1..6) {
        let at = random.random_range(0..=bytes.len());
        let end = random.random_range(at..=bytes.len().min(at + 8));
        match random.random_range(0..5) {
            0 if at < bytes.len() => bytes[at] = random.random(),
            1 => drop(bytes.drain(at..end)),
            2 => {
                let again = bytes[at..end].to_vec();
                bytes.splice(at..at, again);
            }
            3 if !other.is_empty() => {
                let from = random.random_range(0..other.len());
                let part = &other[from..other.len().min(from + 16)];
                bytes.splice(at..end, part.iter().copied());
            }
            _ => bytes.insert(at, random.random()),
        }
    }
}

#[test]
fn the_corpus_and_mutations_of_it_find_nothing() {
    run_targets(|name| name != "kernels", MUTATIONS);
}

/// Runs every kernel of the table once with garbage in all its memory; then the corpus and mutations of it.
#[test]
fn kernels_keep_to_their_memory() {
    let mut launched = 0;
    for (operation, kernels) in (0..).zip(kernel_counts()) {
        for kernel in 0..kernels as u8 {
            // With some scalars the grid has no blocks, and the kernel is not launched.
            let is_launched = (0..64).any(|seed| launches(&[operation, kernel, seed]));
            assert!(is_launched, "operation {operation}, kernel {kernel}");
            launched += 1;
        }
    }
    assert_eq!(launched, KERNELS.len());
    run_targets(|name| name == "kernels", MUTATIONS);
}

/// Runs for `DSV4_FUZZ_SECONDS` (120) seconds, with the seed `DSV4_FUZZ_SEED` (91).
#[test]
#[ignore = "minutes: cargo test -p dsv4-kv-tests --test host -- --ignored kernels_keep"]
fn kernels_keep_to_their_memory_for_long() {
    let setting = |name, default: u64| match std::env::var(name) {
        Ok(value) => value.parse().unwrap_or_else(|_| panic!("{name}={value} is no number")),
        Err(_) => default,
    };
    let end = Instant::now() + Duration::from_secs(setting("DSV4_FUZZ_SECONDS", 120));
    let (mut seed, mut cases) = (setting("DSV4_FUZZ_SEED", 91), 0);
    while Instant::now() < end {
        run_target("kernels", seed, MUTATIONS);
        (seed, cases) = (seed + 1_000_000, cases + MUTATIONS);
    }
    println!("{cases} cases");
}

/// Every argument of every kernel: misaligned by one element, and one element short.
#[test]
fn no_kernel_takes_a_misplaced_argument() {
    let refused = refuses_misplaced_arguments();
    assert!(refused > 63 * 3, "{refused} refused");
}

fn run_targets(chosen: impl Fn(&str) -> bool, mutations: u64) {
    let names = TARGETS.iter().map(|(name, _)| name);
    names.filter(|name| chosen(name)).for_each(|name| run_target(name, 90, mutations));
}

/// Runs a target on its corpus, and on mutations of it.
fn run_target(name: &str, seed: u64, mutations: u64) {
    let (_, run) = TARGETS.iter().find(|(found, _)| *found == name).expect("a target");
    let corpus = corpus(name);
    corpus.iter().for_each(|bytes| run(bytes));
    run(&[]);
    let mut random = SmallRng::seed_from_u64(seed);
    for _ in 0..mutations {
        let mut bytes = corpus.choose(&mut random).unwrap().clone();
        let other = corpus.choose(&mut random).unwrap();
        mutate(&mut bytes, other, &mut random);
        run(&bytes);
    }
}
