//! The programs that cargo built, from its JSON messages.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use serde::Deserialize;

use crate::{process, workspace};

/// A program that cargo built, from a line of its JSON messages. Other lines lack these fields.
#[derive(Debug, PartialEq, Eq, Deserialize)]
pub struct Program {
    /// The file.
    pub executable: PathBuf,
    /// The cargo target from which it was built.
    pub target: Target,
    /// The profile in which it was built.
    pub profile: Profile,
}

/// A cargo target.
#[derive(Debug, PartialEq, Eq, Deserialize)]
pub struct Target {
    /// Its name.
    pub name: String,
    /// Kinds: `bin`, `test`, `example`, or `lib` (the unit tests of a library are a program of this kind).
    pub kind: Vec<String>,
}

/// A cargo profile.
#[derive(Debug, PartialEq, Eq, Deserialize)]
pub struct Profile {
    /// Whether it is a test program.
    pub test: bool,
}

impl Program {
    /// Whether it was built from a target of this kind.
    pub fn is(&self, kind: &str) -> bool {
        self.target.kind.iter().any(|own| own == kind)
    }
}

/// Calls cargo with `arguments`, under a progress line named `what`, and returns the programs that it built.
///
/// # Errors
/// The build failed, or made no program.
pub fn build(what: &str, arguments: &[&str]) -> Result<Vec<Program>> {
    let mut cargo = workspace::cargo();
    cargo.args(arguments).arg("--message-format=json-render-diagnostics");
    let programs = parse(&process::run(what, &mut cargo)?);
    ensure!(!programs.is_empty(), "cargo {} built no program", arguments.join(" "));
    Ok(programs)
}

fn parse(printed: &str) -> Vec<Program> {
    printed.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_in_cargos_messages() {
        let printed = r#"   Compiling x
{"reason":"compiler-artifact","target":{"kind":["lib"],"name":"half"},"profile":{"test":false},"executable":null}
{"reason":"compiler-artifact","target":{"kind":["lib"],"name":"x"},"profile":{"test":true},"executable":"/t/x-1"}
{"reason":"compiler-artifact","target":{"kind":["test"],"name":"suite"},"profile":{"test":true},"executable":"/t/suite-2"}
{"reason":"compiler-artifact","target":{"kind":["bin"],"name":"cli"},"profile":{"test":false},"executable":"/t/cli"}
{"reason":"build-finished","success":true}
"#;
        let found: Vec<_> = parse(printed)
            .into_iter()
            .map(|program| {
                let (is_bin, is_test) = (program.is("bin"), program.profile.test);
                (is_bin, is_test, program.target.name.clone(), program.executable)
            })
            .collect();
        let expected = [
            (false, true, "x", "/t/x-1"),
            (false, true, "suite", "/t/suite-2"),
            (true, false, "cli", "/t/cli"),
        ];
        let expected =
            expected.map(|(bin, test, name, path)| (bin, test, name.to_owned(), path.into()));
        assert_eq!(found, expected);
    }
}
