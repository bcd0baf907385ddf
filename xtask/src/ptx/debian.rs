//! Fetches Debian's `rustc-web`, the source of its `core`, and the libraries that this machine lacks into
//! `target/ptx-toolchain/`. It needs no root: apt gets a state folder of its own, and the packages are unpacked, not
//! installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::{process, workspace};
use dsv4_kv_device_compiler::Compiler;

/// `rustc-web` is the rustc that Debian keeps recent for its browsers.
const PACKAGES: [&str; 2] = ["rustc-web", "rust-web-src"];

/// The copy that was fetched earlier.
///
/// # Errors
/// There is no copy, or it does not work.
pub fn fetched() -> Result<Compiler> {
    let unpacked = folder().join("root");
    let rustc = unpacked.join("usr/bin/rustc");
    ensure!(rustc.exists(), "{} is missing", rustc.display());
    Compiler::probe(&rustc, library_folders(&unpacked)?)
}

/// Fetches a copy and returns it.
///
/// # Errors
/// This system is not Debian, its archive cannot be reached, or the fetched compiler does not work here.
pub fn fetch() -> Result<Compiler> {
    let folder = folder();
    let archives = folder.join("cache/archives");
    // Unpacked into another folder and renamed at the end, so that an interrupted fetch leaves no partial copy.
    let unpacking = folder.join("unpacking");
    for unfinished in [&unpacking, &folder.join("root")] {
        if unfinished.exists() {
            fs::remove_dir_all(unfinished)?;
        }
    }
    for needed in ["lists/partial", "cache/archives/partial", "unpacking"] {
        fs::create_dir_all(folder.join(needed))?;
    }
    // A package source that is not needed here may be unreachable. Only a failed download below is an error.
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

/// An `apt-get` with its lists, cache and locks in `folder`. The list of installed packages is the system's, so that
/// only missing packages are fetched.
fn apt(folder: &Path) -> Command {
    let mut command = Command::new("apt-get");
    for (option, path) in [("Dir::State::Lists", "lists"), ("Dir::Cache", "cache")] {
        command.arg("-o").arg(format!("{option}={}", folder.join(path).display()));
    }
    // Without its own state file, apt would write to that of the system.
    command.arg("-o").arg(format!("Dir::State={}", folder.display()));
    command.args(["-o", "Debug::NoLocking=1", "-o", "APT::Sandbox::User=root"]);
    command
}

/// The folders `lib/<architecture>` and `usr/lib/<architecture>`, as far as the packages contain them.
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
