//! `dsv4-kv`: programs around the KV cache library.
//!
//! Exit codes: 0 = done; 1 = the cache was found wrong, or a device failed; 2 = the input was
//! refused (a bad option, trace line or model, or a cache that does not fit).

mod bench;
mod device;
mod error;
mod model;
mod plan;
mod replay;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::error::InputError;

/// The KV cache of a DeepSeek-V4 server, on a GPU or on the CPU.
#[derive(Parser)]
#[command(name = "dsv4-kv", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Bench(bench::BenchArgs),
    Plan(plan::PlanArgs),
    Replay(Box<replay::ReplayArgs>),
}

/// What a command that ran to its end found.
enum Verdict {
    /// Nothing wrong.
    Passed,
    /// The cache did not hold what it should.
    Failed,
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Bench(args) => bench::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Replay(args) => replay::run(&args),
    };
    match result {
        Ok(Verdict::Passed) => ExitCode::SUCCESS,
        Ok(Verdict::Failed) => ExitCode::FAILURE,
        Err(error) => {
            // Without the chain of sources: every error here names its cause in its own message.
            eprintln!("error: {error}");
            if error.is::<InputError>() { ExitCode::from(2) } else { ExitCode::FAILURE }
        }
    }
}
