//! Runs the stress test in an optimised build.

use std::fmt;

use anyhow::{Context, Result, ensure};

use crate::workspace;

/// The program refused its options, and tested nothing. `cargo xtask` then exits with code 2, as the program does.
#[derive(Debug)]
pub struct Refused;

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the stress test was not run: see above")
    }
}

impl std::error::Error for Refused {}

/// Passes `arguments` to the program `stress` of the crate dsv4-kv-stress.
///
/// # Errors
/// [`Refused`]; also if it cannot be built, or found a divergence.
pub fn run(arguments: &[String]) -> Result<()> {
    let status = workspace::cargo()
        .args([
            "run",
            "--quiet",
            "--release",
            "--package",
            "dsv4-kv-stress",
            "--bin",
            "stress",
            "--features",
            "program",
            "--",
        ])
        .args(arguments)
        .status()
        .context("cannot run cargo")?;
    ensure!(status.code() != Some(2), Refused);
    ensure!(status.success(), "the stress test failed: see above");
    Ok(())
}
