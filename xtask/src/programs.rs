//! The programs that cargo built, from its JSON messages.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use serde::Deserialize;

use crate::{process, workspace};

/// A program that cargo built: a line of its JSON messages. Other lines lack these fields.
#[derive(Debug, PartialEq, Eq, Deserialize)]
pub struct Program {
    /// The file.
    pub executable: PathBuf,
    /// What it was built from.
    pub target: Target,
}

/// A cargo target.
#[derive(Debug, PartialEq, Eq, Deserialize)]
pub struct Target {
    /// Its name.
    pub name: String,
    /// What it is: `bin`, `test`, `example`, or `lib`, of which unit tests are a program.
    pub kind: Vec<String>,
}

impl Program {
    /// Whether it was built from a target of this kind.
    pub fn is(&self, kind: &str) -> bool {
        self.target.kind.iter().any(|own| own == kind)
    }
}

/// Calls cargo with `arguments`, under a progress line named `what`, and returns what it built.
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
{"reason":"compiler-artifact","target":{"kind":["lib"],"name":"half"},"executable":null}
{"reason":"compiler-artifact","target":{"kind":["lib"],"name":"x"},"executable":"/t/x-1"}
{"reason":"compiler-artifact","target":{"kind":["test"],"name":"suite"},"executable":"/t/suite-2"}
{"reason":"compiler-artifact","target":{"kind":["bin"],"name":"cli"},"executable":"/t/cli"}
{"reason":"build-finished","success":true}
"#;
        let found: Vec<_> = parse(printed)
            .into_iter()
            .map(|program| (program.is("bin"), program.target.name.clone(), program.executable))
            .collect();
        let expected =
            [(false, "x", "/t/x-1"), (false, "suite", "/t/suite-2"), (true, "cli", "/t/cli")];
        let expected = expected.map(|(bin, name, path)| (bin, name.to_owned(), path.into()));
        assert_eq!(found, expected);
    }
}
