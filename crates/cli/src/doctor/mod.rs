//! `dsv4-kv doctor`: what this machine has of what the program can use.
//!
//! | module | what it holds |
//! |---|---|
//! | [`checks`] | one function for each thing that is looked at |
//! | [`report`] | the result: lines and JSON |

mod checks;
mod report;

use anyhow::Result;
use clap::Args;

use crate::outcome::{Exit, Outcome, after_help};
use crate::output;
pub use report::Report;

/// Examples of `--help`: what each is for, and the command.
const EXAMPLES: [(&str, &str); 2] = [
    ("what is there, what is missing, and what to do", "cargo kv doctor"),
    ("the same for a program to read", "cargo kv doctor --json"),
];

/// How it ends.
const EXITS: [Exit; 3] = [
    (0, "nothing is broken; what is missing is no failure"),
    (1, "something is there that does not work, or the result could not be written"),
    (2, "an option was refused"),
];

/// Looks at this machine: CUDA driver, GPUs and the PTX that is chosen for each, a compiler for the kernels, and the
/// library of NIXL; says what is there, what is missing, what it is needed for, and what to do.
///
/// Nothing has to be there: without a GPU the kernels run on the CPU, and the PTX of the kernels is part of the
/// program. What is missing is no failure; what is there and does not work is one, with exit code 1.
#[derive(Args, Debug)]
#[command(after_help = after_help(&EXAMPLES, &EXITS))]
pub struct DoctorArgs {
    /// Print the result as JSON instead of lines.
    #[arg(long)]
    json: bool,
}

/// Runs the command and prints its result.
pub fn run(args: &DoctorArgs) -> Result<Outcome> {
    let report = Report { version: env!("CARGO_PKG_VERSION"), findings: checks::all() };
    if args.json {
        output::print(serde_json::to_string_pretty(&report)?)?;
    } else {
        output::print(&report)?;
    }
    Ok(if report.is_broken() { Outcome::Mismatch } else { Outcome::Passed })
}
