//! Runs `cargo test`, prints its output, and counts the tests.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

/// Sums over the `test result:` lines.
#[derive(Debug, Default, PartialEq, Eq)]
struct Totals {
    passed: u64,
    failed: u64,
    ignored: u64,
}

impl Totals {
    /// Adds a line such as `test result: ok. 3 passed; 0 failed; 1 ignored; ..`; ignores other lines.
    fn add(&mut self, line: &str) {
        let Some(result) = line.strip_prefix("test result:") else { return };
        let words: Vec<&str> =
            result.split([' ', ';', '.']).filter(|word| !word.is_empty()).collect();
        for pair in words.windows(2) {
            let Ok(number) = pair[0].parse::<u64>() else { continue };
            match pair[1] {
                "passed" => self.passed += number,
                "failed" => self.failed += number,
                "ignored" => self.ignored += number,
                _ => {}
            }
        }
    }

    /// Refuses a run without tests: `cargo test` passes if no test has the name that it is given.
    fn check(&self) -> Result<()> {
        let Self { passed, failed, ignored } = self;
        ensure!(
            passed + failed + ignored > 0,
            "no test has the name that was given: was it renamed?"
        );
        Ok(())
    }
}

/// Runs tests and prints their output, each line after the prefix `name | `, and then the totals.
///
/// # Errors
/// A test failed, or there was none.
pub fn run(command: &mut Command, name: &str) -> Result<()> {
    let prefix = if name.is_empty() { String::new() } else { format!("{name} | ") };
    let mut child = command.stdout(Stdio::piped()).spawn().context("cannot run cargo test")?;
    let mut totals = Totals::default();
    let mut out = std::io::stdout();
    for line in BufReader::new(child.stdout.take().expect("piped")).lines() {
        let line = line?;
        totals.add(&line);
        writeln!(out, "{prefix}{line}")?;
    }
    let status = child.wait()?;
    let Totals { passed, failed, ignored } = totals;
    println!("{prefix}{passed} passed, {failed} failed, {ignored} ignored");
    ensure!(status.success(), "cargo test failed: see the tests named above");
    totals.check()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_summed() {
        let mut totals = Totals::default();
        totals.add("test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out");
        totals
            .add("test result: FAILED. 4 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out");
        totals.add("running 7 tests");
        assert_eq!(totals, Totals { passed: 7, failed: 2, ignored: 1 });
    }

    /// A filter that matches no test in any of two programs.
    #[test]
    fn a_run_without_tests_is_an_error() {
        let none = "test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 12 filtered out";
        let mut totals = Totals::default();
        [none, none].into_iter().for_each(|line| totals.add(line));
        let error = totals.check().expect_err("no test ran").to_string();
        assert!(error.contains("no test has the name"), "{error}");
        // A test that needs a GPU is ignored without one.
        totals.add("test result: ok. 0 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out");
        assert!(totals.check().is_ok());
    }

    #[test]
    fn the_status_counts_and_so_does_the_output() {
        let run = |script: &str| run(Command::new("sh").args(["-c", script]), "");
        let passed = "echo 'test result: ok. 1 passed; 0 failed; 0 ignored'";
        assert!(run(passed).is_ok());
        assert!(run(&format!("{passed}; false")).is_err());
        assert!(run("echo 'test result: ok. 0 passed; 0 failed; 0 ignored'").is_err());
    }
}
