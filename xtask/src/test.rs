//! The test command: sets up what is missing, then checks and tests everything, and stops at the
//! first step that fails.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use crate::ptx::{fresh, lint, verify};
use crate::{circles, process, workspace};

/// Runs every step; `quick` leaves out clippy, the PTX rebuild, ptxas and the mistakes.
///
/// # Errors
/// A step failed: which, and what to do.
pub fn run(quick: bool) -> Result<()> {
    step("rustfmt and clippy are there", components)?;
    step("build-ptx --check", fresh::check)?;
    step("ptx-lint", lint::run)?;
    step("circles", report_circles)?;
    step("fmt", || cargo(&["fmt", "--all", "--check"], "run `cargo fmt --all`"))?;
    if !quick {
        step("PTX rebuilt and compared", verify::rebuild)?;
        step("PTX assembled", verify::assemble)?;
        let clippy = ["clippy", "--locked", "--workspace", "--all-targets", "--", "-D", "warnings"];
        step("clippy", || cargo(&clippy, "fix what clippy names"))?;
    }
    for example in ["embed", "route"] {
        let run = ["run", "--locked", "--example", example, "-p", "dsv4-kv"];
        step(&format!("example {example}"), || cargo(&run, "see what it says above"))?;
    }
    let mut totals = Totals::default();
    let tested = step("tests", || run_tests(&mut totals));
    if !quick && tested.is_ok() {
        let mistakes = [
            "test",
            "--locked",
            "-p",
            "dsv4-kv-stress",
            "--features",
            "mistakes",
            "--test",
            "mistakes",
        ];
        step("mistakes made on purpose", || cargo(&mistakes, "a mistake went unnoticed"))?;
    }
    println!("{} passed, {} failed, {} ignored", totals.passed, totals.failed, totals.ignored);
    tested
}

/// Prints what the check of circles finds, without failing: there still are some.
fn report_circles() -> Result<()> {
    if let Err(faults) = circles::run() {
        println!("{faults:#}");
    }
    Ok(())
}

fn step(name: &str, work: impl FnOnce() -> Result<()>) -> Result<()> {
    println!("== {name}");
    let start = Instant::now();
    work().with_context(|| format!("step `{name}` failed"))?;
    println!("== {name}: ok, {:.1} s\n", start.elapsed().as_secs_f64());
    Ok(())
}

/// Adds rustfmt and clippy to the toolchain in use where they are missing.
fn components() -> Result<()> {
    for component in ["rustfmt", "clippy"] {
        let tool = component.strip_prefix("rust").unwrap_or(component);
        let there = workspace::cargo().args([tool, "--version"]).output();
        if there.is_ok_and(|output| output.status.success()) {
            continue;
        }
        let mut rustup = Command::new("rustup");
        rustup.args(["component", "add", component]).current_dir(workspace::root());
        process::run(&format!("adding {component}"), &mut rustup)
            .with_context(|| format!("install {component} for the Rust toolchain in use"))?;
    }
    Ok(())
}

fn cargo(args: &[&str], remedy: &str) -> Result<()> {
    let status = workspace::cargo().args(args).status().context("cannot run cargo")?;
    ensure!(status.success(), "cargo {} failed: {remedy}", args[0]);
    Ok(())
}

/// Sums of the `test result:` lines.
#[derive(Debug, Default, PartialEq, Eq)]
struct Totals {
    passed: u64,
    failed: u64,
    ignored: u64,
}

impl Totals {
    /// Adds `test result: ok. 3 passed; 0 failed; 1 ignored; ..`; passes over other lines.
    fn add(&mut self, line: &str) {
        let Some(result) = line.strip_prefix("test result:") else { return };
        let words: Vec<&str> =
            result.split([' ', ';', '.']).filter(|word| !word.is_empty()).collect();
        for pair in words.windows(2) {
            let Ok(number) = pair[0].parse::<u64>() else { continue };
            match pair[1] {
                "passed" => self.passed += number,
                "failed" => self.failed += number,
                "ignored" => self.ignored += number,
                _ => {}
            }
        }
    }
}

/// Runs all tests of the workspace, printing what they print.
fn run_tests(totals: &mut Totals) -> Result<()> {
    let mut child = workspace::cargo()
        .args(["test", "--locked", "--workspace", "--no-fail-fast"])
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run cargo test")?;
    let mut out = std::io::stdout();
    for line in BufReader::new(child.stdout.take().expect("piped")).lines() {
        let line = line?;
        totals.add(&line);
        writeln!(out, "{line}")?;
    }
    ensure!(child.wait()?.success(), "cargo test failed: see the tests named above");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_summed() {
        let mut totals = Totals::default();
        totals.add("test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out");
        totals
            .add("test result: FAILED. 4 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out");
        totals.add("running 7 tests");
        assert_eq!(totals, Totals { passed: 7, failed: 2, ignored: 1 });
    }
}
