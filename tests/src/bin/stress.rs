//! Random operations on a cache, compared with a model after every one: `cargo xtask stress`.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use dsv4_kv_tests::stress::drive::Counts;
use dsv4_kv_tests::stress::generate::{Manners, config};
use dsv4_kv_tests::stress::op::Script;
use dsv4_kv_tests::stress::subject::Books;
use dsv4_kv_tests::stress::{Failure, stress, try_script};
use rayon::prelude::*;
use serde::Serialize;

/// Random admissions, steps, rollbacks and releases against a model, seed by seed. A failure comes
/// as a short script that `--script` runs again.
#[derive(Parser)]
#[command(name = "stress")]
struct Options {
    /// Operations of each seed.
    #[arg(long, default_value_t = 100_000)]
    ops: u64,
    /// Seeds.
    #[arg(long, default_value_t = 16)]
    seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    first_seed: u64,
    /// What runs the kernels; without it only the books are kept.
    #[arg(long)]
    device: Option<DeviceChoice>,
    /// Run this script instead.
    #[arg(long)]
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
}

/// What came of it.
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

/// Whether everything agreed.
fn run(options: &Options) -> Result<bool> {
    if let Some(path) = &options.script {
        return run_script(path);
    }
    let start = Instant::now();
    let seeds = options.first_seed..options.first_seed + options.seeds;
    let results: Vec<_> = seeds.into_par_iter().map(|seed| run_seed(options, seed)).collect();
    let mut outcome = Outcome {
        device: "books",
        ops: options.ops,
        seeds: options.seeds,
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

fn run_seed(options: &Options, seed: u64) -> Result<Counts, Box<Failure>> {
    let config = config(seed);
    let new = || Books::new(&config).expect("a valid configuration");
    stress(seed, options.ops, Manners::Any, &config, new)
}

fn run_script(path: &PathBuf) -> Result<bool> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let script: Script = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
    let new = || Books::new(&script.config).expect("checked below");
    script.config.validate()?;
    match try_script(new, &script) {
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
