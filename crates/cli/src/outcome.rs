//! How a command ended, and its exit code.

use std::process::ExitCode;

/// An exit code, and when a command ends with it.
pub type Exit = (u8, &'static str);

/// The exit codes of commands that only print something.
pub const PRINTS: [Exit; 3] =
    [(0, "printed"), (1, "the result could not be written"), (2, "an option was refused")];

/// The text after the options in the `--help` of a command: examples with their purposes, and the command's exit codes.
#[must_use]
pub fn after_help(examples: &[(&str, &str)], exits: &[Exit]) -> String {
    let lines = examples.iter().map(|(what, command)| format!("  {command}\n      {what}\n"));
    let exits: Vec<_> = exits.iter().map(|(code, when)| format!("  {code:<5}{when}")).collect();
    format!("Examples:\n{}\nExit codes:\n{}", lines.collect::<String>(), exits.join("\n"))
}

/// Exit code of a command that a signal ended, minus the number of the signal.
pub const SIGNALLED: i32 = 128;
/// Exit code of a command that SIGINT ended.
const INTERRUPTED: u8 = 130;

/// How a command ended that was neither refused nor failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Everything was correct.
    Passed,
    /// The cache did not hold the expected contents, or something on this machine is broken.
    Mismatch,
    /// SIGINT ended it early. Everything was correct until then.
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
