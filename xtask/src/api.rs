//! The public API of the libraries as text, committed in `docs/api`, so that each change of the API shows in a diff.
//!
//! `cargo public-api` makes the text from rustdoc's JSON, which stable compilers write with `RUSTC_BOOTSTRAP=1`.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::process;
use crate::workspace::{cargo, root, target_dir};

/// The version of cargo-public-api that made the committed text. Another version may format it differently.
const VERSION: &str = "0.52.0";

/// Libraries on which programs depend, and their public features.
const LIBRARIES: [(&str, &str); 16] = [
    ("cuda-loader", ""),
    ("dsv4-kv", "metrics,tracing"),
    ("dsv4-kv-cold-tier", ""),
    ("dsv4-kv-model-files", ""),
    ("dsv4-kv-device", ""),
    ("dsv4-kv-events", ""),
    ("dsv4-kv-linear", ""),
    ("dsv4-kv-model", "tokenizers"),
    ("dsv4-kv-prefix", ""),
    ("dsv4-kv-router", ""),
    ("dsv4-kv-server", ""),
    ("dsv4-kv-trace", ""),
    ("dsv4-kv-transfer", ""),
    ("kernels-gpu", "launch"),
    ("kv-layout", "config"),
    ("simt", ""),
];

/// Writes the texts, or with `check` compares them with the sources.
///
/// # Errors
/// `cargo public-api` is missing or of another version; a library does not compile; with `check`, a text differs.
pub fn run(check: bool) -> Result<()> {
    check_version()?;
    let mut stale = Vec::new();
    for (library, features) in LIBRARIES {
        let text = text(library, features)?;
        let path = path(library);
        if check {
            let committed = fs::read_to_string(&path).unwrap_or_default();
            stale.extend(difference(&committed, &text).map(|line| format!("{library}: {line}")));
        } else {
            fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        }
    }
    ensure!(
        stale.is_empty(),
        "docs/api is of other sources; run `cargo xtask public-api`, and say in CHANGELOG.md what has changed:\n{}",
        stale.join("\n")
    );
    Ok(())
}

fn check_version() -> Result<()> {
    let install = format!("run `cargo install --locked cargo-public-api@{VERSION}`");
    let mut command = cargo();
    let found = process::run("public-api", command.args(["public-api", "--version"]));
    let found = found.with_context(|| format!("cargo-public-api is not there; {install}"))?;
    match found.trim().ends_with(VERSION) {
        true => Ok(()),
        false => bail!("{} is there, and the texts are of {VERSION}; {install}", found.trim()),
    }
}

fn path(library: &str) -> PathBuf {
    root().join("docs/api").join(format!("{library}.txt"))
}

/// The API of a library, one item per line, without auto traits and derived implementations.
fn text(library: &str, features: &str) -> Result<String> {
    let mut command: Command = cargo();
    command
        .args([
            "public-api",
            "--package",
            library,
            "-sss",
            "--color",
            "never",
            "--features",
            features,
        ])
        .arg("--target-dir")
        .arg(target_dir().join("api"))
        .env("RUSTC_BOOTSTRAP", "1")
        .env_remove("CARGO_TARGET_DIR");
    let output =
        command.output().with_context(|| format!("running cargo public-api for {library}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "cargo public-api failed for {library}:\n{said}");
    String::from_utf8(output.stdout).context("its output is UTF-8")
}

/// The first line in which two texts differ, in the form of a diff.
fn difference(committed: &str, now: &str) -> Option<String> {
    let (mut before, mut after) = (committed.lines(), now.lines());
    loop {
        match (before.next(), after.next()) {
            (None, None) => return None,
            (before, after) if before == after => {}
            (Some(before), Some(after)) => return Some(format!("-{before}\n+{after}")),
            (before, after) => {
                return before
                    .map(|line| format!("-{line}"))
                    .or(after.map(|line| format!("+{line}")));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::difference;

    #[test]
    fn the_first_line_that_differs_is_found() {
        assert_eq!(difference("a\nb\n", "a\nb\n"), None);
        assert_eq!(difference("a\nb\n", "a\nc\n").as_deref(), Some("-b\n+c"));
        assert_eq!(difference("a\nb\n", "a\n").as_deref(), Some("-b"));
        assert_eq!(difference("", "a\n").as_deref(), Some("+a"));
    }
}
