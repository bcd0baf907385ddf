//! Runs the fuzz targets under libFuzzer and AddressSanitizer, with the compiler in use: the sanitizer
//! comes with it, and `RUSTC_BOOTSTRAP` lets it be asked for.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::steps::Steps;
use crate::{process, workspace};

/// Every target, as `dsv4_kv_tests::fuzz::TARGETS` has them.
const TARGETS: [&str; 6] = ["config", "trace", "manifest", "arguments", "kernels", "formats"];
/// The cargo-fuzz that is fetched where none is installed.
const CARGO_FUZZ: &str = "0.13.2";

/// Runs each target, or the one named, for so many seconds.
///
/// # Errors
/// There is no such target, cargo-fuzz cannot be had, a target does not build, or one found something: then libFuzzer
/// says where it stored the input.
pub fn run(seconds: u32, only: Option<&str>) -> Result<()> {
    if let Some(only) = only {
        let all = TARGETS.join(", ");
        ensure!(TARGETS.contains(&only), "there is no fuzz target `{only}`: give one of {all}");
    }
    let path = with_cargo_fuzz()?;
    let mut steps = Steps::new(&format!("fuzz-{}-{seconds}", only.unwrap_or("all")));
    for target in TARGETS.into_iter().filter(|target| only.is_none_or(|only| only == *target)) {
        steps.run(target, || run_target(target, seconds, &path))?;
    }
    steps.keep();
    Ok(())
}

fn run_target(target: &str, seconds: u32, path: &OsStr) -> Result<()> {
    // libFuzzer keeps what it finds new in the first folder; the second is only read.
    let found = workspace::target_dir().join("fuzz/corpus").join(target);
    fs::create_dir_all(&found)?;
    let status = workspace::cargo()
        .args(["fuzz", "run", "--fuzz-dir", "fuzz", "--target-dir"])
        .arg(workspace::target_dir().join("fuzz"))
        .arg(target)
        .arg(found)
        .arg(workspace::root().join("tests/corpus").join(target))
        .args([
            "--",
            &format!("-max_total_time={seconds}"),
            "-max_len=4096",
            "-print_final_stats=1",
        ])
        .env("RUSTC_BOOTSTRAP", "1")
        .env("PATH", path)
        .status()
        .context("cannot run cargo fuzz")?;
    ensure!(status.success(), "the fuzz target {target} failed; its input is named above");
    Ok(())
}

/// A search path on which cargo finds cargo-fuzz, which is installed into the target folder if it is
/// nowhere else.
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
