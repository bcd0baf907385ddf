//! The tests of what moves between processes, with NIXL from its wheel, and of events, with Dynamo's indexer from its own.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::workspace;

/// The wheel: NIXL, its C interface and UCX. Its licence does not let it be shipped with anything.
const NIXL: &str = "nixl-cu12==1.5.1";
/// The C interface in it.
const LIBRARY: &str = ".nixl_cu12.mesonpy.libs/libnixl_capi.so";
/// The wheel with Dynamo's indexer, 200 MB with what it needs.
const DYNAMO: &str = "ai-dynamo-runtime==1.6.1";

/// Installs the wheels into target/ if they are not there, runs the tests, one at a time since they have deadlines, and measures
/// how fast a payload comes. Where a wheel cannot be installed its tests are ignored, with the reason.
///
/// # Errors
/// A test failed, or the measurement: it is printed above.
pub fn run() -> Result<()> {
    let installed = install_nixl(&workspace::target_dir().join("nixl"));
    if let Some(library) = or_say(NIXL, installed) {
        let with_nixl = ("DSV4_NIXL", library.as_os_str());
        let transfers =
            ["test", "dsv4-kv-transfer", "--test", "protocol", "--", "--test-threads=1"];
        for group in ["nixl::", "gpu::"] {
            cargo(&[&transfers[..], &[group]].concat(), &["--features", "nixl"], with_nixl)?;
        }
        let replays = ["test", "dsv4-kv-cli", "--test", "peers", "--", "--ignored", "by_nixl"];
        cargo(&replays, &["--features", "nixl"], with_nixl)?;
        let rate = ["run", "dsv4-kv-transfer", "--example", "nixl_rate"];
        cargo(&rate, &["--features", "nixl"], with_nixl)?;
    }
    let installed = install_dynamo(&workspace::target_dir().join("dynamo"));
    if let Some(python) = or_say(DYNAMO, installed) {
        let wire = ["test", "dsv4-kv-events", "--test", "wire", "--"];
        let mut chosen = vec!["--ignored", "dynamo", "--test-threads=1"];
        if std::env::var_os("DSV4_TRACE").is_none() {
            println!("ignored: dynamo_follows_a_trace: DSV4_TRACE names no trace");
            chosen.extend(["--skip", "dynamo_follows_a_trace"]);
        }
        let with_dynamo = ("DSV4_DYNAMO_PYTHON", python.as_os_str());
        cargo(&[&wire[..], &chosen].concat(), &[], with_dynamo)?;
    }
    Ok(())
}

/// What was installed; else the reason is printed.
fn or_say(wheel: &str, installed: Result<PathBuf>) -> Option<PathBuf> {
    installed
        .inspect_err(|reason| println!("ignored: {wheel} cannot be installed: {reason:#}"))
        .ok()
}

/// Runs a command of cargo on a package, both first in `arguments`, with an environment variable.
fn cargo(arguments: &[&str], features: &[&str], (name, value): (&str, &OsStr)) -> Result<()> {
    let (command, package, rest) = (arguments[0], arguments[1], &arguments[2..]);
    let status = workspace::cargo()
        .args([command, "--locked"])
        .args(features)
        .args(["--package", package])
        .args(rest)
        .env(name, value)
        .status()
        .context("cannot run cargo")?;
    ensure!(status.success(), "cargo {command} --package {package} failed");
    Ok(())
}

/// Where NIXL's library is, once it is there.
fn install_nixl(directory: &Path) -> Result<PathBuf> {
    let library = directory.join(LIBRARY);
    if !library.exists() {
        let mut python3 = Command::new("python3");
        python3.args(["-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target"]);
        done(python3.arg(directory).arg(NIXL))?;
        ensure!(library.exists(), "the wheel has no {LIBRARY}");
    }
    Ok(library)
}

/// The Python of an environment that has Dynamo, once it is there.
fn install_dynamo(directory: &Path) -> Result<PathBuf> {
    let own = directory.join("bin/python");
    if !own.exists() {
        done(Command::new("python3").args(["-m", "venv"]).arg(directory))?;
    }
    // Says nothing, and asks nobody, where it is there.
    done(Command::new(&own).args(["-m", "pip", "install", "--quiet", DYNAMO]))?;
    Ok(own)
}

fn done(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {}", said.trim());
    Ok(())
}
