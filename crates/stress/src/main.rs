//! Random operations on a cache, compared with a model after every operation: `cargo xtask stress`.

mod progress;

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use dsv4_kv::CacheConfig;
use dsv4_kv::device::{Backend, CudaOptions};
use dsv4_kv_stress::cache::{Cache, late, skipping};
use dsv4_kv_stress::drive::Counts;
use dsv4_kv_stress::generate::Manners;
use dsv4_kv_stress::generate::reuse::ledger_config;
use dsv4_kv_stress::generate::tier::{any_kernel_config, tier_config};
use dsv4_kv_stress::library::Library;
use dsv4_kv_stress::op::Script;
use dsv4_kv_stress::subject::LedgerOnly;
use dsv4_kv_stress::{Failure, try_on_cpu, try_script, try_skipping, watched_stress};
use progress::Progress;
use rayon::prelude::*;
use serde::Serialize;

/// Random admissions, steps, rollbacks and releases against a model, seed by seed. A failure comes
/// as a short script that `--script` runs again.
#[derive(Parser)]
#[command(name = "stress")]
struct Options {
    /// Operations of each seed.
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(1..))]
    ops: u64,
    /// Seeds.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// Go on with further seeds, as many at a time, until so many seconds have passed.
    #[arg(long, default_value_t = 0)]
    seconds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    first_seed: u64,
    /// What runs the kernels; without it only the ledger is kept.
    #[arg(long)]
    device: Option<DeviceChoice>,
    /// Run this script instead, once, on the device of the run that has printed it.
    #[arg(long, conflicts_with_all = ["ops", "seeds", "seconds", "first_seed", "json"])]
    script: Option<PathBuf>,
    /// Print the outcome as JSON.
    #[arg(long)]
    json: bool,
}

/// What runs the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DeviceChoice {
    /// The CPU.
    Cpu,
    /// The first NVIDIA GPU.
    Cuda,
    /// None: caches with a host tier on a device that is late and skips kernels. What is compared is the host's work.
    Late,
}

impl DeviceChoice {
    fn label(self) -> &'static str {
        match self {
            Self::Cpu => "the CPU",
            Self::Cuda => "a GPU",
            Self::Late => "caches with a host tier, on a device that is late and skips kernels",
        }
    }
}

/// The result of one seed.
type Ran = Result<Counts, Box<Failure>>;

/// The result of the program.
#[derive(Serialize)]
struct Outcome {
    device: &'static str,
    ops: u64,
    seeds: u64,
    seconds: f64,
    counts: Counts,
    failures: Vec<Failure>,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// Returns whether no divergence was found.
fn run(options: &Options) -> Result<bool> {
    if let Some(path) = &options.script {
        return run_script(options, path);
    }
    let start = Instant::now();
    let mut results = Vec::new();
    let progress = Progress::new(options.seconds);
    loop {
        let first = options.first_seed + results.len() as u64;
        progress.expect(options.seeds * options.ops);
        results.extend(run_seeds(options, &progress, first..first + options.seeds)?);
        if start.elapsed().as_secs() >= options.seconds || results.iter().any(Result::is_err) {
            break;
        }
    }
    progress.end();
    let mut outcome = Outcome {
        device: options.device.map_or("the ledger alone", DeviceChoice::label),
        ops: options.ops,
        seeds: results.len() as u64,
        seconds: start.elapsed().as_secs_f64(),
        counts: BTreeMap::new(),
        failures: Vec::new(),
    };
    for result in results {
        match result {
            Ok(counts) => counts
                .into_iter()
                .for_each(|(what, count)| *outcome.counts.entry(what).or_default() += count),
            Err(failure) => outcome.failures.push(*failure),
        }
    }
    report(&outcome, options.json)?;
    Ok(outcome.failures.is_empty())
}

fn run_seeds(options: &Options, progress: &Progress, seeds: Range<u64>) -> Result<Vec<Ran>> {
    Ok(match options.device {
        // Seeds run one after the other, since a capture forbids other threads to allocate.
        Some(DeviceChoice::Cuda) => {
            let device = dsv4_kv::open_cuda(CudaOptions::default())?;
            let new = |config: &CacheConfig, library: &Arc<Library>, seed| {
                Cache::new(&device, config, library, seed)
            };
            seeds.map(|seed| with_kernels((options, progress), new, seed)).collect()
        }
        Some(DeviceChoice::Cpu) => {
            let run = |seed| with_kernels((options, progress), late, seed);
            seeds.into_par_iter().map(run).collect()
        }
        Some(DeviceChoice::Late) => {
            seeds.into_par_iter().map(|seed| without_kernels(options, progress, seed)).collect()
        }
        None => seeds.into_par_iter().map(|seed| ledger_alone(options, progress, seed)).collect(),
    })
}

fn ledger_alone(options: &Options, progress: &Progress, seed: u64) -> Ran {
    let config = ledger_config(seed);
    let new = || LedgerOnly::new(&config).expect("a valid configuration");
    watched_stress(seed, options.ops, Manners::Any, &config, new, || progress.done())
}

fn with_kernels<B: Backend>(
    (options, progress): (&Options, &Progress),
    new: impl Fn(&CacheConfig, &Arc<Library>, u64) -> Cache<B>,
    seed: u64,
) -> Ran {
    let config = any_kernel_config(seed);
    let library = Arc::new(Library::new(&config));
    let new = || new(&config, &library, seed);
    watched_stress(seed, options.ops, Manners::Genuine, &config, new, || progress.done())
}

fn without_kernels(options: &Options, progress: &Progress, seed: u64) -> Ran {
    let config = tier_config(seed);
    let library = Arc::new(Library::new(&config));
    let new = || skipping(&config, &library, seed);
    watched_stress(seed, options.ops, Manners::Any, &config, new, || progress.done())
}

fn run_script(options: &Options, path: &Path) -> Result<bool> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let script: Script = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
    script.config.validate()?;
    let outcome = match options.device {
        Some(DeviceChoice::Cuda) => {
            let device = dsv4_kv::open_cuda(CudaOptions::default())?;
            let library = Arc::new(Library::new(&script.config));
            try_script(|| Cache::new(&device, &script.config, &library, script.seed), &script)
        }
        Some(DeviceChoice::Cpu) => try_on_cpu(&script),
        Some(DeviceChoice::Late) => try_skipping(&script),
        None => try_script(|| LedgerOnly::new(&script.config).expect("validated"), &script),
    };
    match outcome {
        Ok(_) => println!("{}: no divergence", path.display()),
        Err(divergence) => {
            println!("{}: operation {}: {}", path.display(), divergence.op, divergence.what);
            return Ok(false);
        }
    }
    Ok(true)
}

fn report(outcome: &Outcome, json: bool) -> Result<()> {
    if json {
        println!("{}", serde_json::to_string_pretty(outcome)?);
        return Ok(());
    }
    let Outcome { device, ops, seeds, seconds, counts, failures } = outcome;
    println!("{seeds} seeds of {ops} operations on {device}: {seconds:.1} s");
    counts.iter().for_each(|(what, count)| println!("{count:>12} {what}"));
    println!("{} divergences", failures.len());
    for Failure { seed, found, shrunk, script } in failures {
        println!("seed {seed}, operation {}: {}", found.op, found.what);
        println!("in short, operation {}: {}", shrunk.op, shrunk.what);
        println!("{}", serde_json::to_string(script)?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_tests_nothing_is_refused() {
        for option in ["--ops=0", "--seeds=0"] {
            assert!(Options::try_parse_from(["stress", option]).is_err(), "{option}");
        }
        assert!(Options::try_parse_from(["stress", "--ops=1", "--seeds=1"]).is_ok());
    }

    #[test]
    fn a_script_refuses_options_that_it_would_ignore() {
        let parse = |option| Options::try_parse_from(["stress", "--script=f", option]);
        for option in ["--ops=9", "--seeds=9", "--seconds=9", "--first-seed=9", "--json"] {
            let refused = parse(option).err().map(|error| error.kind());
            assert_eq!(refused, Some(clap::error::ErrorKind::ArgumentConflict), "{option}");
        }
        assert!(parse("--device=cpu").is_ok());
    }
}
