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
mod reuse;
#[cfg(feature = "serve")]
mod serve;
mod share;
mod soak;
mod texts;

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
    /// Continues a prompt with a checkpoint's model; this program was built without it.
    #[cfg(not(feature = "generate"))]
    #[command(disable_help_flag = true)]
    Generate(Unread),
    Plan(plan::PlanArgs),
    Replay(Box<replay::ReplayArgs>),
    Reuse(reuse::ReuseArgs),
    #[cfg(feature = "serve")]
    Serve(Box<serve::ServeArgs>),
    /// Serves a checkpoint's model over HTTP; this program was built without it.
    #[cfg(not(feature = "serve"))]
    #[command(disable_help_flag = true)]
    Serve(Unread),
    Soak(soak::SoakArgs),
}

/// Options of a command that is not there.
#[cfg(not(feature = "serve"))]
#[derive(clap::Args)]
struct Unread {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    _options: Vec<std::ffi::OsString>,
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
        #[cfg(not(feature = "generate"))]
        Command::Generate(_) => Err(InputError::NotBuiltIn { command: "generate" }.into()),
        Command::Plan(args) => plan::run(&args),
        Command::Replay(args) => replay::run(&args),
        Command::Reuse(args) => reuse::run(&args),
        #[cfg(feature = "serve")]
        Command::Serve(args) => serve::run(&args),
        #[cfg(not(feature = "serve"))]
        Command::Serve(_) => Err(InputError::NotBuiltIn { command: "serve" }.into()),
        Command::Soak(args) => soak::run(&args),
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
