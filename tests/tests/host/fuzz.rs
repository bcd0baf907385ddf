//! The fuzz targets without a fuzzer: every file of the corpus, and mutations of these files.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use dsv4_kv_tests::fuzz::{
    Array, TARGETS, kernel_names, launch, ran, readings, refuses_misplaced_arguments,
};
use include_dir::{Dir, include_dir};
use kernels_gpu::params::DigestParams;
use kernels_gpu::table::KERNELS;
use kv_layout::xxh3::SHORT;
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
    run_targets(|name| !["arguments", "kernels"].contains(&name));
}

/// Runs the target `arguments`, of which all examples must run, and so must many mutations of those of each operation.
#[test]
fn operations_run_with_some_arguments_and_refuse_others() {
    for bytes in corpus("arguments") {
        assert!(ran(&bytes).is_some(), "{bytes:?}");
    }
    let mut runs: BTreeMap<&str, u64> = BTreeMap::new();
    run_cases("arguments", 90, MUTATIONS, |bytes| {
        ran(bytes).into_iter().for_each(|name| *runs.entry(name).or_default() += 1);
    });
    println!("{runs:?}");
    assert!(runs.len() == 6 && runs.values().all(|&count| count >= 20));
    // The others are refused.
    assert!(runs.values().sum::<u64>() < MUTATIONS);
}

/// Traces that can be read as nothing, as arrivals only, also as requests, and also as prompts.
#[test]
fn the_corpus_has_traces_for_each_way_to_read_them() {
    let found: BTreeSet<_> = corpus("trace").iter().map(|bytes| readings(bytes)).collect();
    assert_eq!(found, BTreeSet::from([0, 1, 2, 3]));
}

/// Runs every kernel of the table once with garbage in all its memory; then the corpus and mutations of it.
#[test]
fn kernels_keep_to_their_memory() {
    let mut launched = 0;
    for (operation, names) in (0..).zip(kernel_names()) {
        for (kernel, name) in (0..).zip(names) {
            // With some scalars the grid has no blocks, and the kernel is not launched.
            let is_launched = (0..64).any(|seed| launch(&[operation, kernel, seed]).is_some());
            assert!(is_launched, "{name}");
            launched += 1;
        }
    }
    assert_eq!(launched, KERNELS.len());
    run_target("kernels", 90, MUTATIONS);
}

/// Whether the kernel has written more than its count of faults.
fn has_written(arrays: &[Array]) -> bool {
    arrays.iter().any(|array| array.name != "faults" && array.before != array.after)
}

/// The launches of 1,000 cases of an operation with one kernel.
fn launches(kernel: &str) -> Vec<Vec<Array>> {
    let operation = kernel_names().position(|names| names == [kernel]).expect("a kernel") as u8;
    let cases = (0..1000_u16).map(u16::to_be_bytes);
    cases.filter_map(|[high, low]| launch(&[operation, high, low])).collect()
}

fn array<'a>(arrays: &'a [Array], name: &str) -> &'a Array {
    arrays.iter().find(|array| array.name == name).expect("an array of the kernel")
}

/// Whether a section got accumulators: it lies in the payload, and is too long for its bytes to be copied.
fn has_accumulators(arrays: &[Array]) -> bool {
    let [payload, sections, records] =
        ["payload", "sections", "records"].map(|name| array(arrays, name));
    let all = payload.before.len() as u64 / 8;
    let extents: Vec<u32> = bytemuck::pod_collect_to_vec(&sections.before);
    extents.chunks_exact(2).enumerate().any(|(section, extent)| {
        let [start, words] = [0, 1].map(|i| u64::from(extent[i]));
        let record = section * 4 * DigestParams::RECORD as usize;
        let [before, after] = [&records.before, &records.after].map(|of| &of[record..][..64]);
        words * 8 > SHORT && start + words <= all && before != after
    })
}

/// Garbage gets through the checks of the kernels that read places and lengths from an array.
#[test]
fn kernels_digest_and_copy_some_garbage() {
    let digested = launches("digest_sections").iter().filter(|of| has_accumulators(of)).count();
    let copied = launches("copy_state").iter().filter(|of| has_written(of)).count();
    println!("digested {digested}, copied {copied}");
    assert!(digested >= 20 && copied >= 20);
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

fn run_targets(chosen: impl Fn(&str) -> bool) {
    let names = TARGETS.iter().map(|(name, _)| name);
    names.filter(|name| chosen(name)).for_each(|name| run_target(name, 90, MUTATIONS));
}

/// Runs a target on its corpus, and on mutations of it.
fn run_target(name: &str, seed: u64, mutations: u64) {
    let (_, run) = TARGETS.iter().find(|(found, _)| *found == name).expect("a target");
    run_cases(name, seed, mutations, run);
}

/// Calls `run` with the corpus of a target, and with mutations of it.
fn run_cases(name: &str, seed: u64, mutations: u64, mut run: impl FnMut(&[u8])) {
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
