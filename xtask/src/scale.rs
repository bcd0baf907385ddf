//! The tests of what moves between processes, with NIXL from its wheel.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::workspace;

/// The wheel: NIXL, its C interface and UCX. Its licence does not let it be shipped with anything.
const WHEEL: &str = "nixl-cu12==1.5.1";
/// The C interface in it.
const LIBRARY: &str = ".nixl_cu12.mesonpy.libs/libnixl_capi.so";

/// Installs the wheel into target/ if it is not there, runs the tests, one at a time since they have deadlines, and measures how
/// fast a payload comes. Where the wheel cannot be installed they are ignored, with the reason.
///
/// # Errors
/// A test failed, or the measurement: it is printed above.
pub fn run() -> Result<()> {
    let directory = workspace::target_dir().join("nixl");
    let library = match install(&directory) {
        Ok(library) => library,
        Err(reason) => {
            println!(
                "ignored: {WHEEL} cannot be installed into {}: {reason:#}",
                directory.display()
            );
            return Ok(());
        }
    };
    let transfers = ["dsv4-kv-transfer", "--test", "protocol", "--", "--test-threads=1", "nixl::"];
    let replays = ["dsv4-kv-cli", "--test", "peers", "--", "--ignored", "by_nixl"];
    for arguments in [transfers, replays] {
        let status = workspace::cargo()
            .args(["test", "--locked", "--features", "nixl", "--package"])
            .args(arguments)
            .env("DSV4_NIXL", &library)
            .status()
            .context("cannot run cargo")?;
        ensure!(status.success(), "a test failed");
    }
    let rate = ["dsv4-kv-transfer", "--example", "nixl_rate"];
    let status = workspace::cargo()
        .args(["run", "--locked", "--features", "nixl", "--package"])
        .args(rate)
        .env("DSV4_NIXL", &library)
        .status()
        .context("cannot run cargo")?;
    ensure!(status.success(), "the rate could not be measured");
    Ok(())
}

/// Where the library is, once it is there.
fn install(directory: &Path) -> Result<PathBuf> {
    let library = directory.join(LIBRARY);
    if !library.exists() {
        let output = Command::new("python3")
            .args(["-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target"])
            .arg(directory)
            .arg(WHEEL)
            .output()
            .context("cannot run python3")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "pip: {}", said.trim());
        ensure!(library.exists(), "the wheel has no {LIBRARY}");
    }
    Ok(library)
}
