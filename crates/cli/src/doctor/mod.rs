//! `dsv4-kv doctor`: checks what this machine has of the things that the program can use.
//!
//! | module | what it holds |
//! |---|---|
//! | [`checks`] | one function per check |
//! | [`report`] | the result: lines and JSON |

mod checks;
mod report;

use anyhow::Result;
use clap::Args;

use crate::outcome::{Exit, Outcome, after_help};
use crate::output;
pub use report::Report;

/// Examples for `--help`: the purpose of each, and the command.
const EXAMPLES: [(&str, &str); 2] = [
    ("what is there, what is missing, and what to do", "cargo kv doctor"),
    ("the same for a program to read", "cargo kv doctor --json"),
];

/// Exit codes.
const EXITS: [Exit; 3] = [
    (0, "nothing is broken; what is missing is no failure"),
    (1, "something is there that does not work, or the result could not be written"),
    (2, "an option was refused"),
];

/// Checks this machine: CUDA driver, GPUs and the PTX that is chosen for each, a compiler for the kernels, and
/// NIXL's library; says what is missing, what it is needed for, and how to get it.
///
/// None of these is required: without a GPU the kernels run on the CPU, and the program contains the PTX of the
/// kernels. Something that is missing is no failure. Something that does not work is one, with exit code 1.
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
