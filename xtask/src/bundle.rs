//! Puts the tests that run kernels and the CLI with a `run.sh` into `target/gpu-bundle/`, to be copied to a
//! machine with a GPU and no Rust.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use comfy_table::Table;
use comfy_table::presets::ASCII_MARKDOWN;
use serde::Deserialize;

use crate::{process, workspace};

/// The most the bundle may weigh.
const LIMIT_MB: f64 = 60.0;

/// The calls of cargo: a name, and what to build.
const BUILDS: [(&str, &[&str]); 3] = [
    ("the tests that run kernels", &["--package", "dsv4-kv-tests", "--test", "devices"]),
    ("the stress test", &["--package", "dsv4-kv-stress", "--bin", "stress"]),
    ("the CLI", &["--package", "dsv4-kv-cli", "--bins"]),
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
        for program in build(name, what)? {
            let folder = bundle.join(program.folder());
            fs::create_dir_all(&folder)?;
            let copy = folder.join(&program.target.name);
            fs::copy(&program.executable, &copy)?;
            process::run("stripping", Command::new("strip").arg(&copy))?;
        }
    }
    copy_folder(&workspace::root().join("tests/golden"), &bundle.join("golden"))?;
    let script = bundle.join("run.sh");
    fs::write(&script, include_str!("run.sh"))?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    report(&bundle)
}

/// A program that cargo built: a line of its JSON messages. Other lines lack these fields.
#[derive(Debug, PartialEq, Eq, Deserialize)]
struct Program {
    executable: PathBuf,
    target: Target,
}

/// The cargo target it was built from.
#[derive(Debug, PartialEq, Eq, Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

impl Program {
    /// The bundle's folder that it goes to. A library's program is its unit tests.
    fn folder(&self) -> &'static str {
        match self.target.kind.first().map(String::as_str) {
            Some("bin") => "bin",
            _ => "tests",
        }
    }
}

fn build(name: &str, what: &[&str]) -> Result<Vec<Program>> {
    let mut cargo = workspace::cargo();
    cargo.args(["build", "--locked", "--release", "--message-format=json-render-diagnostics"]);
    let printed = process::run(&format!("building {name}"), cargo.args(what))?;
    let programs = parse_programs(&printed);
    ensure!(!programs.is_empty(), "cargo built no program of {name}");
    Ok(programs)
}

fn parse_programs(printed: &str) -> Vec<Program> {
    printed.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
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

/// Prints what each folder of the bundle weighs.
fn report(bundle: &Path) -> Result<()> {
    let mut table = Table::new();
    table.load_preset(ASCII_MARKDOWN).set_header(["folder", "files", "MB"]);
    let mut total = 0.0;
    for folder in ["bin", "tests", "golden"] {
        let (files, bytes) = weigh(&bundle.join(folder))?;
        let megabytes = bytes as f64 / 1e6;
        total += megabytes;
        table.add_row([folder.to_owned(), files.to_string(), format!("{megabytes:.1}")]);
    }
    println!("{table}\n{}: {total:.1} MB", bundle.display());
    ensure!(total <= LIMIT_MB, "the bundle is over {LIMIT_MB} MB");
    Ok(())
}

/// Files in a folder, and their bytes.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_in_cargos_messages() {
        let printed = r#"   Compiling x
{"reason":"compiler-artifact","target":{"kind":["lib"],"name":"half"},"executable":null}
{"reason":"compiler-artifact","target":{"kind":["lib"],"name":"x"},"executable":"/t/x-1"}
{"reason":"compiler-artifact","target":{"kind":["test"],"name":"suite"},"executable":"/t/suite-2"}
{"reason":"compiler-artifact","target":{"kind":["bin"],"name":"cli"},"executable":"/t/cli"}
{"reason":"build-finished","success":true}
"#;
        let found: Vec<_> = parse_programs(printed)
            .into_iter()
            .map(|program| (program.folder(), program.target.name.clone(), program.executable))
            .collect();
        let expected =
            [("tests", "x", "/t/x-1"), ("tests", "suite", "/t/suite-2"), ("bin", "cli", "/t/cli")];
        let expected = expected.map(|(folder, name, path)| (folder, name.to_owned(), path.into()));
        assert_eq!(found, expected);
    }
}
