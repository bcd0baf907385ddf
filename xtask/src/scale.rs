//! The tests of transfers between processes, with NIXL from its wheel, and of events, with Dynamo's indexer from its
//! wheel.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::{counted, workspace};

/// The wheel with NIXL, its C interface and UCX. Its licence does not allow shipping it with other software.
const NIXL: &str = "nixl-cu12==1.5.1";
/// NIXL's C interface in the wheel.
const LIBRARY: &str = ".nixl_cu12.mesonpy.libs/libnixl_capi.so";
/// The wheel with Dynamo's indexer; 200 MB with its dependencies.
const DYNAMO: &str = "ai-dynamo-runtime==1.6.1";

/// The wheel with Dynamo's frontend.
const FRONTEND: &str = "ai-dynamo==1.6.1";
/// The imports of the frontend. The frontend is installed without its declared dependencies: one of them needs
/// `aisimulate`, which is not on PyPI. No code that runs here imports it.
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

/// Installs the wheels into target/ if they are missing, and runs the tests, one at a time since they have deadlines.
/// It also measures how fast a payload is transferred. If a wheel cannot be installed, its tests are ignored and the
/// reason is printed; with `require` that is an error. With `dynamo_worker` the tests of the Dynamo worker run instead,
/// which takes long to build.
///
/// # Errors
/// A test or the measurement failed; the output above shows why. Also if a filter names no test.
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

/// Runs the tests of the example, which is a workspace of its own: Dynamo's conformance kit, and workers of Dynamo's
/// frontend.
fn test_dynamo_worker() -> Result<()> {
    let python = install_frontend(&workspace::target_dir().join("dynamo"))?;
    // With the environment of the outer cargo, `ring` and all that depends on it would be built again.
    let status = workspace::clean_cargo()
        .current_dir(workspace::root().join("examples/dynamo-worker"))
        .args(["test", "--locked", "--", "--include-ignored", "--test-threads=1"])
        .env("DSV4_DYNAMO_PYTHON", python)
        .status()
        .context("cannot run cargo")?;
    ensure!(status.success(), "the tests of examples/dynamo-worker failed");
    Ok(())
}

/// The installed path. If the installation failed, prints the reason, or returns it as an error with `require`.
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
    /// An environment variable: name and value.
    variable: (&'a str, &'a OsStr),
}

impl Cargo<'_> {
    fn run(&self) -> Result<()> {
        let Self { command, package, features, arguments, variable: (name, value) } = *self;
        let mut cargo = workspace::cargo();
        cargo
            .args([command, "--locked", "--package", package, "--features", &features.join(",")])
            .args(arguments)
            .env(name, value);
        if command == "test" {
            let run = counted::run(&mut cargo, "");
            return run.with_context(|| format!("the tests of {package}: {}", arguments.join(" ")));
        }
        let status = cargo.status().context("cannot run cargo")?;
        ensure!(status.success(), "cargo {command} --package {package} failed");
        Ok(())
    }
}

/// Installs NIXL if it is missing, and returns the path of its library.
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

/// Creates a Python environment with Dynamo if it is missing, and returns its interpreter.
fn install_dynamo(directory: &Path) -> Result<PathBuf> {
    let own = directory.join("bin/python");
    if !own.exists() {
        done(Command::new("python3").args(["-m", "venv"]).arg(directory))?;
    }
    // If Dynamo is installed already, pip prints nothing and sends no request.
    done(Command::new(&own).args(["-m", "pip", "install", "--quiet", DYNAMO]))?;
    Ok(own)
}

/// As `install_dynamo`, with the frontend.
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
