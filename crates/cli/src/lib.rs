//! The program `dsv4-kv`: commands around the KV cache library.
//!
//! It is a library, and `main.rs` only calls it, so that builds are faster: Cargo compiles a library in parallel with
//! its dependencies, but a program after them.
#![cfg_attr(
    not(feature = "peers"),
    allow(dead_code, reason = "much of a replay is for several processes only")
)]

mod bench;
mod completions;
mod device;
mod doctor;
mod error;
#[cfg(feature = "generate")]
mod generate;
mod generated;
mod inspect;
mod interrupt;
mod model;
mod options;
mod outcome;
mod output;
mod page;
mod plan;
mod progress;
mod replay;
mod reuse;
mod schema;
#[cfg(feature = "serve")]
mod serve;
mod share;
mod soak;
mod texts;

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::error::InputError;

/// Examples for `--help`: the purpose of each, and the command.
const EXAMPLES: [(&str, &str); 3] = [
    ("what this machine has", "cargo kv doctor"),
    ("a load through the cache, compared with the reference", "cargo kv replay"),
    ("how many requests fit", "cargo kv plan --model flash --gpu-mem 64GiB --context 32768"),
];

/// Exit codes of the commands; each command has its own list in its `--help`.
const EXITS: [outcome::Exit; 4] = [
    (0, "done, and nothing was wrong"),
    (1, "something was wrong or has failed"),
    (2, "an option, a file or a model was refused"),
    (130, "SIGINT (Ctrl-C) ended it early; COMMAND --help says which commands print a result then"),
];

/// The KV cache of a DeepSeek-V4 server, on a GPU or on the CPU.
#[derive(Parser)]
#[command(name = "dsv4-kv", version, after_help = outcome::after_help(&EXAMPLES, &EXITS))]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Bench(bench::BenchArgs),
    Completions(completions::CompletionsArgs),
    Doctor(doctor::DoctorArgs),
    #[cfg(feature = "generate")]
    Generate(Box<generate::GenerateArgs>),
    /// Continues a prompt with a model; this program was built without it.
    #[cfg(not(feature = "generate"))]
    #[command(disable_help_flag = true)]
    Generate(Unread),
    Inspect(inspect::InspectArgs),
    Plan(plan::PlanArgs),
    Replay(Box<replay::ReplayArgs>),
    Reuse(reuse::ReuseArgs),
    Schema(schema::SchemaArgs),
    #[cfg(feature = "serve")]
    Serve(Box<serve::ServeArgs>),
    /// Serves a model over HTTP; this program was built without it.
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

/// The definition of the command line. A negative number counts as the value of an option, and is refused as such,
/// rather than as an unknown option. On a terminal, help is wrapped at words; elsewhere it is not wrapped.
fn command_line() -> clap::Command {
    let negative = |argument: clap::Arg| {
        let takes_values = argument.get_action().takes_values();
        argument.allow_negative_numbers(takes_values)
    };
    let command = Cli::command().mut_subcommands(move |command| command.mut_args(negative));
    if std::io::stdout().is_terminal() {
        command.max_term_width(120)
    } else {
        command.term_width(0)
    }
}

/// Runs the program with the command line of its process.
pub fn main() -> ExitCode {
    let parsed = command_line().try_get_matches().and_then(|matches| {
        let Cli { command } = Cli::from_arg_matches(&matches)?;
        // A command is required.
        Ok((command, matches.subcommand().map(|(_, given)| given.clone()).unwrap_or_default()))
    });
    let (command, given) = match parsed {
        Ok(parsed) => parsed,
        Err(refusal) if refusal.use_stderr() => {
            let _ = refusal.print();
            return ExitCode::from(2);
        }
        // `--help` and `--version`.
        Err(text) => return output::check(text.print()).map_or_else(fail, |()| ExitCode::SUCCESS),
    };
    let outcome = match command {
        Command::Bench(args) => bench::run(&args, &given),
        Command::Completions(args) => completions::run(&args, &mut command_line()),
        Command::Doctor(args) => doctor::run(&args),
        #[cfg(feature = "generate")]
        Command::Generate(args) => generate::run(&args),
        #[cfg(not(feature = "generate"))]
        Command::Generate(_) => Err(InputError::NotBuiltIn { command: "generate" }.into()),
        Command::Inspect(args) => inspect::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Replay(args) => replay::run(&args),
        Command::Reuse(args) => reuse::run(&args),
        Command::Schema(args) => schema::run(&args),
        #[cfg(feature = "serve")]
        Command::Serve(args) => serve::run(&args),
        #[cfg(not(feature = "serve"))]
        Command::Serve(_) => Err(InputError::NotBuiltIn { command: "serve" }.into()),
        Command::Soak(args) => soak::run(&args),
    };
    outcome.map_or_else(fail, ExitCode::from)
}

/// Prints an error. The exit code is 2 if the input was refused, else 1.
fn fail(error: impl Into<anyhow::Error>) -> ExitCode {
    let error = error.into();
    // The chain of sources is not printed: the message of every error here includes its cause.
    output::error(&error);
    if error.is::<InputError>() { ExitCode::from(2) } else { ExitCode::FAILURE }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text of every `--help`; the first is that of the program.
    fn helps() -> Vec<(String, String)> {
        // Lines are not wrapped, since the width of a terminal is not known here.
        let mut root = command_line().term_width(0);
        root.build();
        let own = (String::new(), root.render_long_help().to_string());
        let of = |command: &mut clap::Command| {
            (command.get_name().to_owned(), command.render_long_help().to_string())
        };
        let shown = |command: &&mut clap::Command| command.get_name() != "help";
        std::iter::once(own).chain(root.get_subcommands_mut().filter(shown).map(of)).collect()
    }

    #[test]
    fn every_help_has_examples_that_parse() {
        for (command, help) in helps() {
            if cfg!(not(feature = "serve")) && ["generate", "serve"].contains(&&command[..]) {
                continue;
            }
            let examples =
                help.split("Examples:").nth(1).expect("examples").split("Exit codes").next();
            let lines = examples.expect("they end").lines();
            let commands: Vec<_> =
                lines.filter_map(|line| line.strip_prefix("  cargo kv ")).collect();
            assert!(!commands.is_empty(), "{command}");
            for example in commands {
                assert!(example.starts_with(&command), "{command}: {example}");
                let needs_model =
                    ["generate", "serve"].iter().any(|name| example.starts_with(name));
                // Without its feature, a command accepts any options.
                if cfg!(feature = "serve") || !needs_model {
                    let words = std::iter::once("dsv4-kv").chain(example.split_whitespace());
                    Cli::try_parse_from(words).map(drop).unwrap_or_else(|error| panic!("{error}"));
                }
            }
        }
    }

    /// The exit codes that a help lists.
    fn exit_codes(help: &str) -> Vec<u8> {
        let listed = help.split("Exit codes:").nth(1).unwrap_or_default();
        listed.lines().filter_map(|line| line.split_whitespace().next()?.parse().ok()).collect()
    }

    /// Only a command that handles signals ends with their exit codes, and only a server handles SIGTERM.
    #[test]
    fn every_help_has_the_exit_codes_of_its_command() {
        for (command, help) in helps() {
            let signals: &[u8] = match command.as_str() {
                "" | "generate" | "replay" | "soak" => &[130],
                "serve" => &[130, 143],
                _ => &[],
            };
            if cfg!(feature = "serve") || !["generate", "serve"].contains(&&command[..]) {
                assert_eq!(exit_codes(&help), [&[0, 1, 2], signals].concat(), "{command}");
            }
        }
    }

    /// `docs/reference/cli.md` contains every help text. `DSV4_BLESS=1` writes the file; that needs a build with all
    /// commands.
    #[test]
    fn the_page_of_the_command_line_is_what_help_prints() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/cli.md");
        let section = |(command, help): (String, String)| {
            let lines: Vec<_> = help.lines().map(str::trim_end).collect();
            let name = format!("cargo kv {command}");
            (
                command,
                format!("## `{}`\n\n```text\n{}\n```\n", name.trim(), lines.join("\n").trim()),
            )
        };
        let sections: Vec<_> = helps().into_iter().map(section).collect();
        let blesses = std::env::var_os("DSV4_BLESS").is_some_and(|value| value == "1");
        if blesses && cfg!(feature = "serve") {
            let texts: Vec<_> = sections.iter().map(|(_, text)| text.as_str()).collect();
            let head =
                "# Command line\n\nWhat `--help` prints, of every command. A test compares it.\n";
            std::fs::write(path, format!("{head}\n{}", texts.join("\n")))
                .expect("it can be written");
        }
        let page = std::fs::read_to_string(path).expect("it is committed");
        for (command, text) in sections {
            if cfg!(feature = "serve") || !["", "generate", "serve"].contains(&&command[..]) {
                assert!(
                    page.contains(&text),
                    "of another version: {command}; DSV4_BLESS=1 writes it anew"
                );
            }
        }
    }

    #[test]
    fn options_are_consistent() {
        command_line().debug_assert();
    }
}
