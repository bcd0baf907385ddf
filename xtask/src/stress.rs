//! Runs the stress test, built for speed.

use anyhow::{Context, Result, ensure};

use crate::workspace;

/// Hands `arguments` to the program `stress` of the crate dsv4-kv-stress.
///
/// # Errors
/// It cannot be built, or it found a divergence.
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
            "--",
        ])
        .args(arguments)
        .status()
        .context("cannot run cargo")?;
    // 2: an option was refused, and nothing was tested.
    ensure!(status.code() != Some(2), "the stress test was not run: see above");
    ensure!(status.success(), "the stress test failed: see above");
    Ok(())
}
