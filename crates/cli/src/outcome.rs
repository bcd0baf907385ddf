//! How a command ended, and the exit code that says so.

use std::process::ExitCode;

/// The exit codes of every command, as its `--help` lists them.
pub const EXIT_CODES: &str = "\
Exit codes:
  0    done, nothing wrong; a server that a signal has ended, with all that it had taken
  1    a mismatch was found, a device failed, a result could not be written, or `doctor` found something broken
  2    an option, a file or a model was refused, or the cache does not fit
  130  interrupted by SIGINT (Ctrl-C); a replay first prints the result of the steps it has run. A server that
       a signal has ended before all was done
  143  a server that a second SIGTERM has ended at once";

/// What follows a command's options in its `--help`: examples, each with what it is for, and the exit codes.
#[must_use]
pub fn after_help(examples: &[(&str, &str)]) -> String {
    let lines = examples.iter().map(|(what, command)| format!("  {command}\n      {what}\n"));
    format!("Examples:\n{}\n{EXIT_CODES}", lines.collect::<String>())
}

/// Exit code of a command that a signal ended, less the signal's number.
pub const SIGNALLED: i32 = 128;
/// Exit code of a command that SIGINT ended.
const INTERRUPTED: u8 = 130;

/// How a command ended that was not refused and did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing wrong.
    Passed,
    /// The cache did not hold what it should, or something on this machine is broken.
    Mismatch,
    /// SIGINT ended it early, and nothing was wrong until then.
    Interrupted,
}

impl From<Outcome> for ExitCode {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Passed => Self::SUCCESS,
            Outcome::Mismatch => Self::FAILURE,
            Outcome::Interrupted => Self::from(INTERRUPTED),
        }
    }
}
