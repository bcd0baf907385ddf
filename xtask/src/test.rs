//! The test command: installs missing tools, then checks and tests everything. It stops at the first step that fails.

use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::programs::{self, Program};
use crate::ptx::{fresh, lint, verify};
use crate::steps::Steps;
use crate::{counted, module_cycles, process, workspace};

/// All tests, in one build: with all commands of the CLI, and with the feature by which tests make mistakes on purpose.
/// That feature changes nothing unless a mistake is enabled. A build without it would compile every kernel a second
/// time.
const ALL: [&str; 5] = [
    "test",
    "--locked",
    "--workspace",
    "--features",
    "dsv4-kv-stress/mistakes,dsv4-kv-cold-tier/mistakes,dsv4-kv-cli/serve,dsv4-kv-transfer/nixl",
];

/// The quick tests: those of the libraries, without the stress test. The features are those of `ALL`, so that a quick
/// run after a full run builds nothing.
const QUICK: [&str; 13] = [
    "test",
    "--locked",
    "--workspace",
    "--exclude",
    "dsv4-kv-cli",
    "--exclude",
    "dsv4-kv-stress",
    "--exclude",
    "xtask",
    "--lib",
    "--tests",
    "--features",
    "dsv4-kv/mistakes,dsv4-kv-cold-tier/mistakes,dsv4-kv-model/tokenizers",
];

/// Tests that the quick run leaves out. Each takes seconds, and they are the largest cases of things that other tests
/// cover too.
const NOT_QUICK: [&str; 17] = [
    "device_failures",
    "all_or_nothing",
    "no_number_of_slots_admits_more_than_the_planned",
    "each_layer::",
    "same_bits::",
    "mutations::",
    "step::million",
    "step::pro_step",
    "step::poison",
    "step::histories",
    "gather_equals_the_oracle_in_prefill",
    "select::lists_equal_the_oracle",
    "decode::early",
    "interleaved_requests_do_not_mix",
    "drafts_run_ahead_of_an_open_step",
    "kernels_keep_to_their_memory",
    "requests_with_preemption",
];

/// The longest test program. It runs beside all others, since each of the others keeps few cores busy at its end.
const LONGEST: &str = "devices";

/// The examples that this command runs.
const EXAMPLES: [&str; 2] = ["decode", "route"];

/// Runs every step. `quick` leaves out the long ones: clippy, the PTX rebuild, examples, the tests of the
/// programs, the stress test, and the largest cases of other tests.
///
/// # Errors
/// A step failed; the error names the step, and often what to do.
pub fn run(quick: bool) -> Result<()> {
    let mut steps = Steps::new(if quick { "test-quick" } else { "test" });
    let done = run_steps(quick, &mut steps);
    println!("{}", steps.table());
    done.inspect(|()| steps.keep())
}

fn run_steps(quick: bool, steps: &mut Steps) -> Result<()> {
    steps.run("rustfmt and clippy are there", components)?;
    steps.run("build-ptx --check", fresh::check)?;
    steps.run("ptx-lint", lint::run)?;
    steps.run("module-cycles", module_cycles::run)?;
    steps.run("fmt", || cargo(&["fmt", "--all", "--check"], "run `cargo fmt --all`"))?;
    if quick {
        let arguments: Vec<&str> = ["--"]
            .into_iter()
            .chain(NOT_QUICK.into_iter().flat_map(|name| ["--skip", name]))
            .collect();
        let arguments = [&QUICK[..], &arguments].concat();
        return steps.run("tests", || counted::run(workspace::cargo().args(&arguments), ""));
    }
    let mut built = Vec::new();
    steps.beside("PTX rebuilt and compared", verify::rebuild, |steps| {
        built = run_builds(steps)?;
        Ok(())
    })?;
    let (longest, others) = divided(&built)?;
    let run_only = |only: &[&str], name: &str| {
        let arguments = [&ALL[..], only, &["--no-fail-fast"]].concat();
        counted::run(workspace::cargo().args(arguments), name)
    };
    steps.beside(
        LONGEST,
        || run_only(&longest, LONGEST),
        |steps| steps.run("other tests", || run_only(&others, "")),
    )?;
    steps.run("tests of documentation", || run_only(&["--doc"], ""))?;
    for example in EXAMPLES {
        steps.run(&format!("example {example}"), || run_example(&built, example))?;
    }
    Ok(())
}

/// Runs clippy, rustdoc and the build of the tests, one after the other since all write to the same folder. Returns the
/// test programs.
fn run_builds(steps: &mut Steps) -> Result<Vec<Program>> {
    let clippy = ["clippy", "--locked", "--workspace", "--all-targets"];
    // Tests do not build the program of `cargo xtask stress`.
    let program = ["--features", "dsv4-kv-stress/program", "--", "-D", "warnings"];
    let lints = [&clippy[..], &ALL[3..], &program].concat();
    steps.run("clippy", || cargo(&lints, "fix what clippy names"))?;
    // A build of the workspace enables the features of all packages together. A user's build of the library has fewer.
    let alone = ["clippy", "--locked", "--package", "dsv4-kv", "--lib", "--", "-D", "warnings"];
    steps.run("clippy of the library alone", || cargo(&alone, "fix what clippy names"))?;
    // As `cargo kv` builds it where there is no GPU.
    let small = ["--package", "dsv4-kv-cli", "--no-default-features", "--", "-D", "warnings"];
    let small = [&alone[..2], &small[..]].concat();
    steps.run("clippy of the small program", || cargo(&small, "fix what clippy names"))?;
    steps.run("rustdoc", documentation)?;
    steps.run("tests built", || {
        programs::build("building all tests", &[&ALL[..], &["--no-run"]].concat())
    })
}

/// Arguments of `cargo test` that select the longest test program, and those that select all others.
///
/// # Errors
/// The longest program was not built. Without a name, cargo would run all tests.
fn divided(built: &[Program]) -> Result<(Vec<&str>, Vec<&str>)> {
    let mut longest = Vec::new();
    let mut others = vec!["--lib", "--bins"];
    for program in built.iter().filter(|program| program.profile.test) {
        let name = program.target.name.as_str();
        match ["test", "example"].into_iter().find(|kind| program.is(kind)) {
            Some("test") if name == LONGEST => longest.extend(["--test", name]),
            Some("test") => others.extend(["--test", name]),
            Some(_) => others.extend(["--example", name]),
            None => {}
        }
    }
    ensure!(!longest.is_empty(), "there is no program of tests `{LONGEST}`: name the longest");
    Ok((longest, others))
}

/// Builds the documentation of all libraries; a warning is an error.
fn documentation() -> Result<()> {
    let mut cargo = workspace::cargo();
    cargo.args(["doc", "--locked", "--workspace", "--lib", "--no-deps"]).args(&ALL[3..]);
    cargo.env("RUSTDOCFLAGS", "-D warnings");
    process::run("documenting", &mut cargo).map(drop)
}

/// Adds rustfmt and clippy to the toolchain in use if they are missing.
fn components() -> Result<()> {
    for component in ["rustfmt", "clippy"] {
        let tool = component.strip_prefix("rust").unwrap_or(component);
        let there = workspace::cargo().args([tool, "--version"]).output();
        if there.is_ok_and(|output| output.status.success()) {
            continue;
        }
        let mut rustup = Command::new("rustup");
        rustup.args(["component", "add", component]).current_dir(workspace::root());
        process::run(&format!("adding {component}"), &mut rustup)
            .with_context(|| format!("install {component} for the Rust toolchain in use"))?;
    }
    Ok(())
}

fn cargo(args: &[&str], remedy: &str) -> Result<()> {
    process::run(args[0], workspace::cargo().args(args)).map(drop).context(remedy.to_owned())
}

/// Runs an example that was built with the tests.
fn run_example(built: &[Program], name: &str) -> Result<()> {
    let example = built.iter().find(|program| program.is("example") && program.target.name == name);
    let example = example.with_context(|| format!("cargo built no example {name}"))?;
    let status = Command::new(&example.executable)
        .current_dir(workspace::root())
        .status()
        .with_context(|| format!("cannot run {}", example.executable.display()))?;
    ensure!(status.success(), "the example {name} failed: see what it says above");
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use super::*;
    use crate::programs::{Profile, Target};

    /// `--skip` with a name that no test has skips nothing, and says nothing.
    #[test]
    fn what_a_quick_run_skips_is_there() {
        fn read(folder: &Path, files: &mut Vec<(PathBuf, String)>) {
            for entry in fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("it")) {
                let (path, kind) = (entry.path(), entry.file_type().expect("a kind"));
                if kind.is_dir() && entry.file_name() != "target" {
                    read(&path, files);
                } else if kind.is_file() && path.extension().is_some_and(|end| end == "rs") {
                    let text = fs::read_to_string(&path).expect("UTF-8");
                    files.push((path, text));
                }
            }
        }
        let mut files = Vec::new();
        ["crates", "host", "kernels-gpu", "tests"]
            .iter()
            .for_each(|folder| read(&workspace::root().join(folder), &mut files));
        for name in NOT_QUICK {
            let mut parts = name.trim_end_matches("::").rsplit("::");
            let (last, module) = (parts.next().expect("a name"), parts.next());
            let is_of = |path: &Path| {
                let folder = path.parent().and_then(Path::file_name);
                module.is_none_or(|module| {
                    [path.file_stem(), folder].contains(&Some(module.as_ref()))
                })
            };
            let defines = |text: &str| {
                ["fn", "mod"].iter().any(|kind| text.contains(&format!("{kind} {last}")))
            };
            let is_there = files.iter().any(|(path, text)| is_of(path) && defines(text));
            assert!(is_there, "{name} was renamed");
        }
    }

    #[test]
    fn every_program_of_tests_runs_once() {
        let program = |kind: &str, name: &str, test| Program {
            executable: name.into(),
            target: Target { name: name.to_owned(), kind: vec![kind.to_owned()] },
            profile: Profile { test },
        };
        let built = [
            program("lib", "simt", true),
            program("test", "host", true),
            program("test", LONGEST, true),
            program("example", "decode", false),
            program("example", "two_ranks", true),
            program("bin", "dsv4-kv", false),
        ];
        let others = ["--lib", "--bins", "--test", "host", "--example", "two_ranks"].to_vec();
        assert_eq!(divided(&built).expect("it is there"), (vec!["--test", LONGEST], others));
        assert!(divided(&built[..2]).is_err(), "all tests would run twice");
    }
}
