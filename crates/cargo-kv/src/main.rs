//! `cargo kv COMMAND`: the program `dsv4-kv`, built with the features that the command needs. A command that
//! needs no model is built without a tokenizer and without a web server.

use std::env;
use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

/// Commands, and features of `dsv4-kv-cli` that they need.
const FEATURES: [(&str, &str); 2] = [("generate", "generate"), ("serve", "serve")];

fn main() -> ExitCode {
    let arguments: Vec<_> = env::args_os().skip(1).collect();
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut program = Command::new(cargo);
    program.args(["run", "--quiet", "--release", "--package", "dsv4-kv-cli"]);
    if let Some(features) = arguments.first().and_then(|command| features(command)) {
        program.args(["--features", features]);
    }
    program.arg("--").args(arguments);
    run(program)
}

fn features(command: &OsStr) -> Option<&'static str> {
    FEATURES.iter().find(|(name, _)| command == *name).map(|&(_, features)| features)
}

/// Becomes the program: its signals and its exit code are those of this process.
fn run(mut program: Command) -> ExitCode {
    let error = program.exec();
    eprintln!("error: cannot run {}: {error}", program.get_program().display());
    ExitCode::FAILURE
}

#[cfg(test)]
mod tests {
    use super::features;

    #[test]
    fn only_commands_that_need_a_model_are_built_with_one() {
        assert_eq!(features("serve".as_ref()), Some("serve"));
        assert_eq!(features("generate".as_ref()), Some("generate"));
        for command in ["replay", "plan", "bench", "--help", ""] {
            assert_eq!(features(command.as_ref()), None, "{command}");
        }
    }
}
