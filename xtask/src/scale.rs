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

/// The wheel with Dynamo's frontend.
const FRONTEND: &str = "ai-dynamo==1.6.1";
/// What the frontend imports. It is installed without what it asks for, of which `aisimulate` is not on PyPI itself;
/// nothing that is used here imports that.
const FRONTEND_IMPORTS: [&str; 10] = [
    "aiohttp<4.0",
    "certifi",
    "kubernetes>=32.0.1,<33.0.0",
    "msgspec>=0.19.0",
    "prometheus-client>=0.23.1,<1.0",
    "pyzmq>=26.0.0",
    "redis>=6.2.0,<9.0.0",
    "tqdm>=4.0.0",
    "transformers>=4.56.0",
    "zstandard>=0.23.0,<1.0",
];

/// Installs the wheels into target/ if they are not there, runs the tests, one at a time since they have deadlines,
/// and measures how fast a payload comes. Where a wheel cannot be installed its tests are ignored, with the reason, or with `require`
/// fail.
/// The worker of Dynamo, which takes long to build, is tested instead if that is asked for.
///
/// # Errors
/// A test failed, or the measurement: it is printed above.
pub fn run(dynamo_worker: bool, require: bool) -> Result<()> {
    if dynamo_worker {
        return test_dynamo_worker();
    }
    let installed = install_nixl(&workspace::target_dir().join("nixl"));
    if let Some(library) = or_say(NIXL, installed, require)? {
        test_transfers(&library)?;
    }
    let installed = install_dynamo(&workspace::target_dir().join("dynamo"));
    if let Some(python) = or_say(DYNAMO, installed, require)? {
        test_events(&python)?;
    }
    Ok(())
}

fn test_transfers(library: &Path) -> Result<()> {
    let tests = Cargo {
        command: "test",
        package: "dsv4-kv-transfer",
        features: &["nixl"],
        arguments: &[],
        variable: ("DSV4_NIXL", library.as_os_str()),
    };
    for group in ["nixl::", "gpu::"] {
        let arguments = &["--test", "protocol", "--", "--test-threads=1", group];
        Cargo { arguments, ..tests }.run()?;
    }
    let arguments = &["--test", "peers", "--", "--ignored", "by_nixl"];
    Cargo { package: "dsv4-kv-cli", arguments, ..tests }.run()?;
    Cargo { command: "run", arguments: &["--example", "nixl_rate"], ..tests }.run()
}

fn test_events(python: &Path) -> Result<()> {
    let mut arguments = vec!["--test", "wire", "--", "--ignored", "dynamo", "--test-threads=1"];
    if std::env::var_os("DSV4_TRACE").is_none() {
        println!("ignored: dynamo_follows_a_trace: DSV4_TRACE names no trace");
        arguments.extend(["--skip", "dynamo_follows_a_trace"]);
    }
    let wire = Cargo {
        command: "test",
        package: "dsv4-kv-events",
        features: &[],
        arguments: &arguments,
        variable: ("DSV4_DYNAMO_PYTHON", python.as_os_str()),
    };
    wire.run()
}

/// Tests of the example, which is a workspace of its own: Dynamo's conformance kit, and workers behind Dynamo's frontend.
fn test_dynamo_worker() -> Result<()> {
    let python = install_frontend(&workspace::target_dir().join("dynamo"))?;
    // `ring` is built again, and all that needs it, where the outer cargo's variables are others.
    let status = workspace::clean_cargo()
        .current_dir(workspace::root().join("examples/dynamo-worker"))
        .args(["test", "--locked", "--", "--include-ignored", "--test-threads=1"])
        .env("DSV4_DYNAMO_PYTHON", python)
        .status()
        .context("cannot run cargo")?;
    ensure!(status.success(), "the tests of examples/dynamo-worker failed");
    Ok(())
}

/// What was installed; else the reason is printed, or with `require` an error.
fn or_say(wheel: &str, installed: Result<PathBuf>, require: bool) -> Result<Option<PathBuf>> {
    match installed {
        Ok(path) => Ok(Some(path)),
        Err(reason) if require => Err(reason.context(format!("{wheel} cannot be installed"))),
        Err(reason) => {
            println!("ignored: {wheel} cannot be installed: {reason:#}");
            Ok(None)
        }
    }
}

/// A command of cargo on a package.
#[derive(Clone, Copy)]
struct Cargo<'a> {
    command: &'a str,
    package: &'a str,
    features: &'a [&'a str],
    arguments: &'a [&'a str],
    /// Of its environment.
    variable: (&'a str, &'a OsStr),
}

impl Cargo<'_> {
    fn run(&self) -> Result<()> {
        let Self { command, package, features, arguments, variable: (name, value) } = *self;
        let status = workspace::cargo()
            .args([command, "--locked", "--package", package, "--features", &features.join(",")])
            .args(arguments)
            .env(name, value)
            .status()
            .context("cannot run cargo")?;
        ensure!(status.success(), "cargo {command} --package {package} failed");
        Ok(())
    }
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

/// The same with the frontend.
fn install_frontend(directory: &Path) -> Result<PathBuf> {
    let own = install_dynamo(directory)?;
    let pip = ["-m", "pip", "install", "--quiet"];
    done(Command::new(&own).args(pip).args(["--no-deps", FRONTEND]))?;
    done(Command::new(&own).args(pip).args(FRONTEND_IMPORTS))?;
    Ok(own)
}

fn done(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {}", said.trim());
    Ok(())
}
