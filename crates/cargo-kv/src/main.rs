//! `cargo kv COMMAND` runs the program `dsv4-kv`, built with the features that the command needs. A command that needs
//! no model is built without a tokenizer and without a web server. On a machine without a GPU, commands whose times say
//! nothing of a server on a GPU, and all help, are built in the profile `kv`, which takes a third of the time of a
//! release build, and without CUDA unless their arguments ask for it.

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};

/// Command, an option of it if only that option needs the feature, and the feature of `dsv4-kv-cli`. Shell completions
/// are of all commands.
const FEATURES: [(&str, Option<&str>, &str); 4] = [
    ("completions", None, "serve"),
    ("generate", None, "generate"),
    ("replay", Some("--peers"), "nixl"),
    ("serve", None, "serve"),
];

/// Commands that use the profile `kv` on a machine without a GPU, since their times say nothing of a server on a GPU.
const LOOKS: [&str; 6] = ["completions", "doctor", "inspect", "plan", "replay", "schema"];

/// The profile of `LOOKS`, and of help, on a machine without a GPU.
const LOOKING: &str = "kv";

/// Paths of which one exists if an NVIDIA driver is installed; the second is that of WSL.
const DRIVERS: [&str; 2] = ["/proc/driver/nvidia/version", "/usr/lib/wsl/lib/libcuda.so.1"];

fn main() -> ExitCode {
    let arguments: Vec<_> = env::args_os().skip(1).collect();
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut program = Command::new(cargo);
    let asked = Asked::of(&arguments);
    let profile = profile(asked, DRIVERS.iter().any(|path| Path::new(path).exists()));
    program.args(["run", "--package", "dsv4-kv-cli", "--profile", profile]);
    if is_built(profile) {
        program.arg("--quiet");
    }
    if let Some(features) = features(asked, &arguments) {
        program.args(["--features", features]);
    }
    if profile == LOOKING && (asked.help || !looks_for_gpus(&arguments)) {
        program.arg("--no-default-features");
    }
    program.arg("--").args(arguments);
    run(program)
}

/// What the arguments ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Asked<'a> {
    /// The command; empty for the program's own help and version.
    command: &'a OsStr,
    /// Whether only help or the version is printed.
    help: bool,
}

impl<'a> Asked<'a> {
    fn of(arguments: &'a [OsString]) -> Self {
        let at = |place: usize| arguments.get(place).map_or("".as_ref(), OsString::as_os_str);
        let (first, second) = (at(0), at(1));
        match first.to_str() {
            Some("help") => Self { command: second, help: true },
            // Every option of the program itself prints something and ends, and so does the lack of a command.
            Some(option) if option.is_empty() || option.starts_with('-') => {
                Self { command: "".as_ref(), help: true }
            }
            _ => Self { command: first, help: second == "-h" || second == "--help" },
        }
    }
}

/// Whether the program was built in this profile before. Then Cargo is quiet, since later builds are short. The first
/// build shows Cargo's progress.
fn is_built(profile: &str) -> bool {
    // The path of this program is `target/debug/cargo-kv`.
    let target = env::current_exe().ok().and_then(|own| Some(own.parent()?.parent()?.to_owned()));
    target.is_some_and(|target| target.join(profile).join("dsv4-kv").exists())
}

/// The feature that the command, or its help, needs with these arguments.
fn features(asked: Asked<'_>, arguments: &[OsString]) -> Option<&'static str> {
    let has = |option: &str| {
        let value = format!("{option}=");
        let mut arguments = arguments.iter().filter_map(|argument| argument.to_str());
        arguments.any(|argument| argument == option || argument.starts_with(&value))
    };
    let mut needs = FEATURES
        .iter()
        .filter(|(name, option, _)| asked.command == *name && option.is_none_or(has));
    needs.next().map(|&(_, _, features)| features)
}

/// Whether an argument asks for the CUDA driver: the command `doctor`, or a value such as `--device cuda`.
fn looks_for_gpus(arguments: &[OsString]) -> bool {
    let mut arguments = arguments.iter().filter_map(|argument| argument.to_str());
    arguments.any(|argument| argument == "doctor" || argument.ends_with("cuda"))
}

/// The Cargo profile in which the program is built.
fn profile(asked: Asked<'_>, has_gpu: bool) -> &'static str {
    let looks = asked.help || LOOKS.iter().any(|name| asked.command == *name);
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

    fn words(line: &str) -> Vec<OsString> {
        line.split_whitespace().map(Into::into).collect()
    }

    #[test]
    fn what_is_measured_is_built_as_a_release() {
        let of = |line: &str, has_gpu| profile(Asked::of(&words(line)), has_gpu);
        for line in ["bench", "generate --prompt help", "reuse", "serve --model -h", "soak"] {
            assert_eq!(of(line, false), "release", "{line}");
        }
        for line in ["replay", "plan", "completions bash"] {
            assert_eq!((of(line, false), of(line, true)), ("kv", "release"), "{line}");
        }
    }

    #[test]
    fn help_is_built_as_what_looks() {
        for (line, command) in [
            ("", ""),
            ("-h", ""),
            ("--help", ""),
            ("-V", ""),
            ("--version", ""),
            ("help", ""),
            ("help bench", "bench"),
            ("serve --help", "serve"),
            ("generate -h", "generate"),
        ] {
            let words = words(line);
            let asked = Asked::of(&words);
            assert_eq!(asked, Asked { command: command.as_ref(), help: true }, "{line}");
            assert_eq!((profile(asked, false), profile(asked, true)), ("kv", "release"), "{line}");
        }
    }

    #[test]
    fn what_asks_for_the_driver_is_built_with_cuda() {
        let of = |line: &str| looks_for_gpus(&words(line));
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
            let words = words(line);
            features(Asked::of(&words), &words)
        };
        for line in ["serve --model DIR", "serve --help", "help serve", "completions bash"] {
            assert_eq!(of(line), Some("serve"), "{line}");
        }
        for line in ["generate", "generate -h", "help generate"] {
            assert_eq!(of(line), Some("generate"), "{line}");
        }
        assert_eq!(of("replay --peers 3"), Some("nixl"));
        assert_eq!(of("replay --json --peers=2"), Some("nixl"));
        for line in ["", "-h", "-V", "--help", "help", "help replay", "plan", "bench", "replay"] {
            assert_eq!(of(line), None, "{line}");
        }
        assert_eq!((of("replay --peer 1"), of("plan --peers 2")), (None, None));
    }
}
