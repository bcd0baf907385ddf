//! Runs tests under AddressSanitizer, with the compiler in use. The sanitizer is part of the compiler; on a stable
//! compiler, `RUSTC_BOOTSTRAP` enables the flag for it.

use anyhow::{Context, Result};

use crate::steps::Steps;
use crate::{counted, workspace};

/// Packages, and filters of test names: all tests of the layers below the kernels, and a sample of the tests of
/// kernels. AddressSanitizer works with the emulator's fibers, which switch stacks.
const RUNS: [(&[&str], &[&str]); 4] = [
    (&["--package", "kv-layout", "--package", "simt", "--package", "cuda-loader"], &[]),
    (&["--package", "dsv4-kv", "--lib"], &[]),
    (&["--package", "dsv4-kv-tests", "--test", "host"], &[]),
    (&["--package", "dsv4-kv-stress", "--test", "stress"], &["engine::"]),
];
/// From the device suite, tests are run whose name contains one of these.
const DEVICE_TESTS: [&str; 4] =
    ["cpu::step::poison", "cpu::step::histories", "cpu::device::memory", "cpu::device::capture"];

/// Runs the tests.
///
/// # Errors
/// A test failed, or AddressSanitizer found a fault; the output above shows which. Also if a filter names no test.
pub fn run() -> Result<()> {
    let mut steps = Steps::new("sanitize");
    for (run, filter) in RUNS {
        steps.run(&run.join(" "), || cargo_test(run, filter))?;
    }
    let devices = ["--package", "dsv4-kv-tests", "--test", "devices"];
    for name in DEVICE_TESTS {
        steps.run(name, || cargo_test(&devices, &[name]))?;
    }
    steps.keep();
    Ok(())
}

fn cargo_test(what: &[&str], filter: &[&str]) -> Result<()> {
    let target = "x86_64-unknown-linux-gnu";
    let leaks = workspace::root().join("tests/sanitizers/leaks.txt");
    let mut command = workspace::cargo();
    command
        .args(["test", "--locked", "--target", target, "--target-dir"])
        .arg(workspace::target_dir().join("sanitize"))
        .args(what)
        .arg("--")
        .args(filter)
        .env("RUSTC_BOOTSTRAP", "1")
        .env("RUSTFLAGS", "-Zsanitizer=address")
        .env("LSAN_OPTIONS", format!("print_suppressions=0:suppressions={}", leaks.display()));
    let run = counted::run(&mut command, "");
    run.with_context(|| format!("{} {} under AddressSanitizer", what.join(" "), filter.join(" ")))
}
