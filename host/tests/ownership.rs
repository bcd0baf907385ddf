//! Misuse that the types forbid: the programs in `compile_fail/` do not compile, each for the reason that it names.
//!
//! A line that must be refused ends with `//~ E0382`, the compiler's code for the reason. Every error of a program must
//! be named in this way, and there may be no others.
//!
//! Programs are compiled by `rustc` against the library that this test was linked with, which takes a
//! fraction of a second each. A cargo project of their own would build every dependency again.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use serde_json::Value;

/// An error: its line, counted from 1, and its code.
type Refusal = (u64, String);

#[test]
fn what_must_not_compile_does_not() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/compile_fail");
    let mut programs: Vec<PathBuf> = fs::read_dir(folder)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    programs.sort();
    let wrong: Vec<String> = programs.iter().filter_map(|program| check(program)).collect();
    assert!(programs.len() > 4, "{programs:?}");
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// A control: a program without misuse compiles.
#[test]
fn what_may_compile_does() {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/compile_pass/blocks.rs");
    let (refused, said) = compile(&program);
    assert!(refused.is_empty(), "{said}");
}

/// Describes how a program of `compile_fail/` differs from what it should do, if it does.
fn check(program: &Path) -> Option<String> {
    let named = named(&fs::read_to_string(program).expect("a readable program"));
    let (refused, said) = compile(program);
    let name = program.file_name().expect("a name").to_string_lossy();
    if named.is_empty() {
        Some(format!("{name} names no error, as in `//~ E0382`; it gives {refused:?}:\n{said}"))
    } else if named != refused {
        Some(format!("{name} should give {named:?}, and gives {refused:?}:\n{said}"))
    } else {
        None
    }
}

/// The errors that a program names.
fn named(text: &str) -> BTreeSet<Refusal> {
    (1..)
        .zip(text.lines())
        .filter_map(|(line, text)| Some((line, text.split_once("//~")?.1)))
        .flat_map(|(line, codes)| codes.split_whitespace().map(move |code| (line, code.to_owned())))
        .collect()
}

/// Compiles a program. Returns its errors, and the compiler's messages as text.
fn compile(program: &Path) -> (BTreeSet<Refusal>, String) {
    let deps = std::env::current_exe().expect("this program").with_file_name("");
    let output = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
        .args(["--edition", "2024", "--emit", "metadata", "--error-format", "json"])
        .args(["--cap-lints", "allow", "--out-dir", env!("CARGO_TARGET_TMPDIR")])
        .arg("-L")
        .arg(format!("dependency={}", deps.display()))
        .arg("--extern")
        .arg(format!("dsv4_kv={}", library(&deps).display()))
        .arg(program)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("rustc runs");
    let text = String::from_utf8(output.stderr).expect("rustc writes UTF-8");
    let messages: Vec<Value> =
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let errors = messages.iter().filter(|message| message["level"] == "error");
    let refused = errors.flat_map(refusals).collect();
    let said = messages.iter().filter_map(|message| message["rendered"].as_str()).collect();
    assert!(output.status.success() || !messages.is_empty(), "rustc failed:\n{text}");
    (refused, said)
}

/// The primary lines of an error message, with its code. The closing message has no line.
fn refusals(message: &Value) -> Vec<Refusal> {
    let code = message["code"]["code"].as_str().unwrap_or("no code");
    let spans = message["spans"].as_array().into_iter().flatten();
    spans
        .filter(|span| span["is_primary"] == true)
        .filter_map(|span| Some((span["line_start"].as_u64()?, code.to_owned())))
        .collect()
}

/// The library that this test was linked with: cargo has just built it, so it is the newest.
fn library(deps: &Path) -> PathBuf {
    let built = |path: &PathBuf| fs::metadata(path).and_then(|data| data.modified()).ok();
    fs::read_dir(deps)
        .expect("the folder of this program")
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("libdsv4_kv-") && name.ends_with(".rlib")
        })
        // An interrupted build may have left an empty file.
        .filter(|path| fs::metadata(path).is_ok_and(|data| data.len() > 0))
        .max_by_key(|path| built(path).unwrap_or(SystemTime::UNIX_EPOCH))
        .expect("the library, which this test is linked with")
}
