//! `dsv4-kv completions`: shell completions.

use anyhow::Result;
use clap::{Args, Command};
use clap_complete::Shell;

use crate::outcome::{Outcome, PRINTS, after_help};
use crate::output;

/// Examples for `--help`: the purpose of each, and the command.
const EXAMPLES: [(&str, &str); 2] = [
    ("what bash reads", "cargo kv completions bash"),
    ("what fish reads", "cargo kv completions fish"),
];

/// Prints shell completions for the program `dsv4-kv`, to be saved where the shell looks for them: `dsv4-kv
/// completions bash > ~/.local/share/bash-completion/completions/dsv4-kv`.
#[derive(Args, Debug)]
#[command(after_help = after_help(&EXAMPLES, &PRINTS))]
pub struct CompletionsArgs {
    /// The shell.
    #[arg(value_enum)]
    shell: Shell,
}

/// Runs the command; `program` is the definition of the whole command line.
pub fn run(args: &CompletionsArgs, program: &mut Command) -> Result<Outcome> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, program, "dsv4-kv", &mut script);
    output::print(String::from_utf8(script)?.trim_end())?;
    Ok(Outcome::Passed)
}
