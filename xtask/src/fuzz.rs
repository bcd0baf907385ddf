//! Runs the fuzz targets under libFuzzer and AddressSanitizer, with the compiler in use. The sanitizer is part of the
//! compiler; on a stable compiler, `RUSTC_BOOTSTRAP` enables the flag for it.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::num::NonZero;
use std::process::Command;
use std::thread;

use anyhow::{Context, Result, ensure};

use crate::steps::Steps;
use crate::{process, workspace};

/// All targets, as in `dsv4_kv_tests::fuzz::TARGETS`.
const TARGETS: [&str; 6] = ["config", "trace", "manifest", "arguments", "kernels", "formats"];
/// The text that libFuzzer prints before the number of inputs that it ran.
const EXECUTED: &str = "stat::number_of_executed_units:";
/// The version of cargo-fuzz that is installed if there is none.
const CARGO_FUZZ: &str = "0.13.2";

/// Runs each target, or only the one named, for `seconds`. As many targets run at once as there are cores.
///
/// # Errors
/// There is no such target; cargo-fuzz cannot be installed; a target does not build; or a target found a fault. In the
/// last case the error contains libFuzzer's output, which names the file of the input.
pub fn run(seconds: u32, only: Option<&str>) -> Result<()> {
    if let Some(only) = only {
        let all = TARGETS.join(", ");
        ensure!(TARGETS.contains(&only), "there is no fuzz target `{only}`: give one of {all}");
    }
    let path = with_cargo_fuzz()?;
    let mut steps = Steps::new(&format!("fuzz-{}-{seconds}", only.unwrap_or("all")));
    let is_wanted = |target: &&str| only.is_none_or(|only| only == *target);
    let targets: Vec<&str> = TARGETS.into_iter().filter(is_wanted).collect();
    steps.run("build", || {
        process::run("building the targets", cargo_fuzz("build", &path).args(only))
    })?;
    let at_once = thread::available_parallelism().map_or(1, NonZero::get);
    for some in targets.chunks(at_once) {
        steps.run(&some.join(", "), || run_some(some, seconds, &path))?;
    }
    steps.keep();
    Ok(())
}

/// Runs these targets in parallel.
fn run_some(targets: &[&str], seconds: u32, path: &OsStr) -> Result<()> {
    thread::scope(|scope| {
        let runs: Vec<_> = targets
            .iter()
            .map(|target| scope.spawn(move || run_target(target, seconds, path)))
            .collect();
        runs.into_iter().try_for_each(|run| run.join().expect("a run of a target does not panic"))
    })
}

/// A `cargo fuzz` command, with `path` as the search path.
fn cargo_fuzz(command: &str, path: &OsStr) -> Command {
    let mut cargo = workspace::cargo();
    cargo.args(["fuzz", command, "--fuzz-dir", "fuzz", "--target-dir"]);
    cargo.arg(workspace::target_dir().join("fuzz")).env("RUSTC_BOOTSTRAP", "1").env("PATH", path);
    cargo
}

/// Runs a target, and prints the number of inputs that it ran.
fn run_target(target: &str, seconds: u32, path: &OsStr) -> Result<()> {
    // libFuzzer writes new inputs to the first folder, and only reads the second.
    let found = workspace::target_dir().join("fuzz/corpus").join(target);
    fs::create_dir_all(&found)?;
    let mut run = cargo_fuzz("run", path);
    run.arg(target).arg(found).arg(workspace::root().join("tests/corpus").join(target)).args([
        "--",
        &format!("-max_total_time={seconds}"),
        "-max_len=4096",
        "-print_final_stats=1",
    ]);
    let printed = process::run(target, &mut run)?;
    let executed = printed.lines().find_map(|line| line.strip_prefix(EXECUTED));
    let executed = executed.with_context(|| format!("{target}: no statistics in {printed}"))?;
    println!("{target}: {} inputs", executed.trim());
    Ok(())
}

/// A search path that includes cargo-fuzz. If cargo-fuzz is not installed, it is installed into the target folder.
fn with_cargo_fuzz() -> Result<std::ffi::OsString> {
    let tools = workspace::target_dir().join("tools");
    let own = env::var_os("PATH").unwrap_or_default();
    let path = env::join_paths(std::iter::once(tools.join("bin")).chain(env::split_paths(&own)))?;
    let there = workspace::cargo().args(["fuzz", "--version"]).env("PATH", &path).output();
    if !there.is_ok_and(|output| output.status.success()) {
        let mut install: Command = workspace::clean_cargo();
        install.args(["install", "cargo-fuzz", "--locked", "--version", CARGO_FUZZ, "--root"]);
        process::run("installing cargo-fuzz", install.arg(tools))?;
    }
    Ok(path)
}
