//! Copies the tests that run kernels, the CLI and a `run.sh` into `target/gpu-bundle/`, to be copied to a machine with
//! a GPU and without Rust.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use comfy_table::Table;
use comfy_table::presets::ASCII_MARKDOWN;

use crate::{process, programs, workspace};

/// Largest size of the bundle.
const LIMIT_MB: f64 = 80.0;

/// The calls of cargo: a name, and the arguments that select the packages.
const BUILDS: [(&str, &[&str]); 4] = [
    ("the tests that run kernels", &["--package", "dsv4-kv-tests", "--test", "devices"]),
    ("the end-to-end tests", &["--package", "dsv4-kv-tests", "--test", "end_to_end"]),
    (
        "the stress test",
        &["--package", "dsv4-kv-stress", "--bin", "stress", "--features", "program"],
    ),
    ("the CLI", &["--package", "dsv4-kv-cli", "--bins", "--features", "generate"]),
];

/// Builds the bundle and prints its sizes.
///
/// # Errors
/// A build failed, or the bundle is too large.
pub fn run() -> Result<()> {
    let bundle = workspace::target_dir().join("gpu-bundle");
    if bundle.exists() {
        fs::remove_dir_all(&bundle)?;
    }
    for (name, what) in BUILDS {
        let arguments = [&["build", "--locked", "--release"], what].concat();
        for program in programs::build(&format!("building {name}"), &arguments)? {
            let folder = bundle.join(if program.is("bin") { "bin" } else { "tests" });
            fs::create_dir_all(&folder)?;
            let copy = folder.join(&program.target.name);
            fs::copy(&program.executable, &copy)?;
            process::run("stripping", Command::new("strip").arg(&copy))?;
        }
    }
    copy_folder(&workspace::root().join("tests/golden"), &bundle.join("golden"))?;
    copy_folder(&workspace::root().join("tests/e2e"), &bundle.join("e2e"))?;
    let script = bundle.join("run.sh");
    fs::write(&script, include_str!("run.sh"))?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    report(&bundle)
}

fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from).with_context(|| format!("reading {}", from.display()))? {
        let entry = entry?;
        let copy = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_folder(&entry.path(), &copy)?;
        } else {
            fs::copy(entry.path(), &copy)?;
        }
    }
    Ok(())
}

/// Prints the size of each folder of the bundle.
fn report(bundle: &Path) -> Result<()> {
    let mut table = Table::new();
    table.load_preset(ASCII_MARKDOWN).set_header(["folder", "files", "MB"]);
    let mut total = 0.0;
    for folder in ["bin", "tests", "golden", "e2e"] {
        let (files, bytes) = weigh(&bundle.join(folder))?;
        let megabytes = bytes as f64 / 1e6;
        total += megabytes;
        table.add_row([folder.to_owned(), files.to_string(), format!("{megabytes:.1}")]);
    }
    println!("{table}\n{}: {total:.1} MB", bundle.display());
    ensure!(total <= LIMIT_MB, "the bundle is over {LIMIT_MB} MB");
    Ok(())
}

/// Number of files in a folder, and their bytes.
fn weigh(folder: &Path) -> Result<(u64, u64)> {
    let (mut files, mut bytes) = (0, 0);
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let (inner_files, inner_bytes) = match entry.file_type()?.is_dir() {
            true => weigh(&entry.path())?,
            false => (1, entry.metadata()?.len()),
        };
        files += inner_files;
        bytes += inner_bytes;
    }
    Ok((files, bytes))
}
