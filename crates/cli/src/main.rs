//! `dsv4-kv`: programs around the KV cache library. Exit codes: [`outcome::EXIT_CODES`].

mod bench;
mod device;
mod error;
#[cfg(feature = "generate")]
mod generate;
mod interrupt;
mod model;
mod options;
mod outcome;
mod output;
mod plan;
mod replay;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::error::InputError;

/// The KV cache of a DeepSeek-V4 server, on a GPU or on the CPU.
#[derive(Parser)]
#[command(name = "dsv4-kv", version, after_help = outcome::EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Bench(bench::BenchArgs),
    #[cfg(feature = "generate")]
    Generate(Box<generate::GenerateArgs>),
    Plan(plan::PlanArgs),
    Replay(Box<replay::ReplayArgs>),
}

fn main() -> ExitCode {
    let command = match Cli::try_parse() {
        Ok(Cli { command }) => command,
        Err(refusal) if refusal.use_stderr() => {
            let _ = refusal.print();
            return ExitCode::from(2);
        }
        // `--help` and `--version`.
        Err(text) => return output::check(text.print()).map_or_else(fail, |()| ExitCode::SUCCESS),
    };
    let outcome = match command {
        Command::Bench(args) => bench::run(&args),
        #[cfg(feature = "generate")]
        Command::Generate(args) => generate::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Replay(args) => replay::run(&args),
    };
    outcome.map_or_else(fail, ExitCode::from)
}

/// Says what went wrong: exit code 2 if the input was refused, else 1.
fn fail(error: impl Into<anyhow::Error>) -> ExitCode {
    let error = error.into();
    // Without the chain of sources: every error here names its cause in its own message.
    output::note(format_args!("error: {error}"));
    if error.is::<InputError>() { ExitCode::from(2) } else { ExitCode::FAILURE }
}
