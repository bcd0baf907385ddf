//! `cargo kv COMMAND` runs the program `dsv4-kv`, built with the features that the command needs. A command that needs
//! no model is built without a tokenizer and without a web server. On a machine without a GPU, commands whose times say
//! nothing of a server on a GPU are built in the profile `kv`, which takes a third of the time of a release build, and
//! without CUDA unless their arguments ask for it.

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};

/// Command, an option of it if only that option needs the feature, and the feature of `dsv4-kv-cli`.
const FEATURES: [(&str, Option<&str>, &str); 3] =
    [("generate", None, "generate"), ("replay", Some("--peers"), "nixl"), ("serve", None, "serve")];

/// Commands that use the profile `kv` on a machine without a GPU, since their times say nothing of a server on a GPU.
const LOOKS: [&str; 6] = ["completions", "doctor", "inspect", "plan", "replay", "schema"];

/// The profile of `LOOKS` on a machine without a GPU.
const LOOKING: &str = "kv";

/// Paths of which one exists if an NVIDIA driver is installed; the second is that of WSL.
const DRIVERS: [&str; 2] = ["/proc/driver/nvidia/version", "/usr/lib/wsl/lib/libcuda.so.1"];

fn main() -> ExitCode {
    let arguments: Vec<_> = env::args_os().skip(1).collect();
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut program = Command::new(cargo);
    let command = arguments.first().map_or("--help".as_ref(), |command| command.as_os_str());
    let has_gpu = DRIVERS.iter().any(|path| Path::new(path).exists());
    let profile = profile(command, has_gpu);
    program.args(["run", "--package", "dsv4-kv-cli", "--profile", profile]);
    if is_built(profile) {
        program.arg("--quiet");
    }
    if let Some(features) = features(command, &arguments) {
        program.args(["--features", features]);
    }
    if profile == LOOKING && !looks_for_gpus(&arguments) {
        program.arg("--no-default-features");
    }
    program.arg("--").args(arguments);
    run(program)
}

/// Whether the program was built in this profile before. Then Cargo is quiet, since later builds are short. The first
/// build shows Cargo's progress.
fn is_built(profile: &str) -> bool {
    // The path of this program is `target/debug/cargo-kv`.
    let target = env::current_exe().ok().and_then(|own| Some(own.parent()?.parent()?.to_owned()));
    target.is_some_and(|target| target.join(profile).join("dsv4-kv").exists())
}

/// The feature that the command needs with these arguments.
fn features(command: &OsStr, arguments: &[OsString]) -> Option<&'static str> {
    let has = |option: &str| {
        let value = format!("{option}=");
        let mut arguments = arguments.iter().filter_map(|argument| argument.to_str());
        arguments.any(|argument| argument == option || argument.starts_with(&value))
    };
    let mut needs =
        FEATURES.iter().filter(|(name, option, _)| command == *name && option.is_none_or(has));
    needs.next().map(|&(_, _, features)| features)
}

/// Whether an argument asks for the CUDA driver: the command `doctor`, or a value such as `--device cuda`.
fn looks_for_gpus(arguments: &[OsString]) -> bool {
    let mut arguments = arguments.iter().filter_map(|argument| argument.to_str());
    arguments.any(|argument| argument == "doctor" || argument.ends_with("cuda"))
}

/// The Cargo profile in which the program is built for a command.
fn profile(command: &OsStr, has_gpu: bool) -> &'static str {
    let looks =
        LOOKS.iter().any(|name| command == *name) || command == "help" || command == "--help";
    if looks && !has_gpu { LOOKING } else { "release" }
}

/// Replaces this process by the program, so that signals and the exit code are the program's.
fn run(mut program: Command) -> ExitCode {
    let error = program.exec();
    eprintln!("error: cannot run {}: {error}", program.get_program().display());
    ExitCode::FAILURE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_measured_is_built_as_a_release() {
        for command in ["bench", "generate", "reuse", "serve", "soak"] {
            assert_eq!(profile(command.as_ref(), false), "release", "{command}");
        }
        for command in ["replay", "plan", "--help"] {
            assert_eq!(profile(command.as_ref(), false), "kv", "{command}");
            assert_eq!(profile(command.as_ref(), true), "release", "{command}");
        }
    }

    #[test]
    fn what_asks_for_the_driver_is_built_with_cuda() {
        let of = |line: &str| looks_for_gpus(&line.split(' ').map(Into::into).collect::<Vec<_>>());
        for line in ["doctor", "doctor --json", "replay --device cuda", "replay --device=cuda"] {
            assert!(of(line), "{line}");
        }
        for line in ["replay", "replay --device cpu", "plan --model flash", "--help"] {
            assert!(!of(line), "{line}");
        }
    }

    #[test]
    fn only_what_needs_a_feature_is_built_with_it() {
        let of = |line: &str| {
            let words: Vec<OsString> = line.split(' ').map(Into::into).collect();
            features(&words[0], &words)
        };
        assert_eq!(of("serve --model DIR"), Some("serve"));
        assert_eq!(of("generate"), Some("generate"));
        assert_eq!(of("replay --peers 3"), Some("nixl"));
        assert_eq!(of("replay --json --peers=2"), Some("nixl"));
        for line in ["plan", "bench", "--help", "", "replay", "replay --peer 1", "plan --peers 2"] {
            assert_eq!(of(line), None, "{line}");
        }
    }
}
