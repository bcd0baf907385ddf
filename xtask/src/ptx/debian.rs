//! Fetches Debian's `rustc-web`, its `core` source and the libraries this machine lacks into
//! `target/ptx-toolchain/`, without root: apt gets a state folder of its own, and the packages are
//! unpacked, not installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::{process, workspace};
use dsv4_kv_device_compiler::Compiler;

/// `rustc-web` is the rustc that Debian keeps recent for its browsers.
const PACKAGES: [&str; 2] = ["rustc-web", "rust-web-src"];

/// The copy fetched earlier.
///
/// # Errors
/// There is none, or it does not work.
pub fn fetched() -> Result<Compiler> {
    let unpacked = folder().join("root");
    let rustc = unpacked.join("usr/bin/rustc");
    ensure!(rustc.exists(), "{} is missing", rustc.display());
    Compiler::probe(&rustc, library_folders(&unpacked)?)
}

/// Fetches a copy and returns it.
///
/// # Errors
/// This is no Debian, its archive cannot be reached, or what came does not work here.
pub fn fetch() -> Result<Compiler> {
    let folder = folder();
    let archives = folder.join("cache/archives");
    // Unpacked elsewhere and renamed at the end, so that an interrupted fetch leaves no half copy.
    let unpacking = folder.join("unpacking");
    for unfinished in [&unpacking, &folder.join("root")] {
        if unfinished.exists() {
            fs::remove_dir_all(unfinished)?;
        }
    }
    for needed in ["lists/partial", "cache/archives/partial", "unpacking"] {
        fs::create_dir_all(folder.join(needed))?;
    }
    // A source that this task does not need may be out of reach: the download below decides.
    if let Err(error) = process::run("reading Debian's package lists", apt(&folder).arg("update")) {
        eprintln!("warning: {error:#}");
    }
    process::run(
        "fetching rustc-web (up to 154 MB)",
        apt(&folder)
            .args(["install", "--download-only", "--yes", "--no-install-recommends"])
            .args(PACKAGES),
    )?;
    for package in fs::read_dir(&archives)? {
        let package = package?.path();
        if package.extension().is_some_and(|extension| extension == "deb") {
            let mut unpack = Command::new("dpkg");
            unpack.arg("-x").arg(&package).arg(&unpacking);
            process::run("unpacking the compiler", &mut unpack)?;
            fs::remove_file(&package)?;
        }
    }
    fs::rename(unpacking, folder.join("root"))?;
    fetched()
}

fn folder() -> PathBuf {
    workspace::target_dir().join("ptx-toolchain")
}

/// `apt-get` with lists, cache and locks in `folder`. The list of installed packages stays the
/// system's, so that only what is missing is fetched.
fn apt(folder: &Path) -> Command {
    let mut command = Command::new("apt-get");
    for (option, path) in [("Dir::State::Lists", "lists"), ("Dir::Cache", "cache")] {
        command.arg("-o").arg(format!("{option}={}", folder.join(path).display()));
    }
    // Without a state file of its own, apt would write the system's.
    command.arg("-o").arg(format!("Dir::State={}", folder.display()));
    command.args(["-o", "Debug::NoLocking=1", "-o", "APT::Sandbox::User=root"]);
    command
}

/// `lib/<architecture>` and `usr/lib/<architecture>`, those that came.
fn library_folders(unpacked: &Path) -> Result<Vec<PathBuf>> {
    let mut folders = Vec::new();
    for lib in ["lib", "usr/lib"] {
        let Ok(entries) = fs::read_dir(unpacked.join(lib)) else { continue };
        for entry in entries {
            let path = entry.context("reading the unpacked compiler")?.path();
            if path.to_string_lossy().ends_with("-linux-gnu") {
                folders.push(path);
            }
        }
    }
    Ok(folders)
}
