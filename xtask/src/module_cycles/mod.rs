//! Finds files that import each other in a cycle, and checks the sizes that the project limits.
//!
//! # The rule
//! File A *imports* file B of the same library or program if a path in A, in a `use` or in code,
//! resolves to an item that B defines. Paths are followed through re-exports to the file that
//! defines the item, so that naming `crate::Ledger` imports `ledger.rs`, not `lib.rs`.
//!
//! These do not count as imports:
//! - `mod child;` and re-exports (`pub use`, `pub(crate) use`): a parent that declares and re-exports its children, and
//!   from which they import nothing, is in no cycle;
//! - tests (`#[cfg(test)]`, `#[test]`);
//! - bodies of `macro_rules!`, whose paths resolve where the macro is used; the arguments of a macro call count;
//! - calls of methods, and links in documentation.
//!
//! Files that can reach each other by imports form a cycle; the check fails and names one way around.
//!
//! | module | what it does |
//! |---|---|
//! | [`modules`] | reads the module tree of a library or program: items, imports, children |
//! | [`paths`] | collects the paths that code names |
//! | [`resolve`] | finds the files that a path leads to |
//! | [`graph`] | finds cycles |
//! | [`sizes`] | lengths of files, functions with too many arguments |

mod graph;
mod modules;
mod paths;
mod resolve;
mod sizes;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::workspace;
use graph::Graph;
use modules::Tree;

/// Checks every library and program of the workspace, and prints how many files were checked.
///
/// # Errors
/// There is a cycle, a file that is too long, or too many functions with too many arguments. The error names all of
/// them.
pub fn run() -> Result<()> {
    let targets = targets()?;
    let mut faults = Vec::new();
    let mut files = 0;
    for target in &targets {
        let graph = imports(&target.src_path)?;
        files += graph.len();
        let cycles = graph.cycles();
        faults.extend(cycles.iter().map(|cycle| describe(&target.title(), cycle)));
    }
    println!(
        "{} libraries and programs with {files} files: {} cycles",
        targets.len(),
        faults.len()
    );
    faults.extend(sizes::faults(workspace::root())?);
    ensure!(faults.is_empty(), "{}", faults.join("\n"));
    Ok(())
}

/// A library or program that cargo builds.
#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
    src_path: PathBuf,
}

impl Target {
    fn title(&self) -> String {
        format!("{} ({})", self.name, self.kind.join(", "))
    }
}

fn targets() -> Result<Vec<Target>> {
    #[derive(Deserialize)]
    struct Metadata {
        packages: Vec<Package>,
    }
    #[derive(Deserialize)]
    struct Package {
        targets: Vec<Target>,
    }
    let output = workspace::cargo()
        .args(["metadata", "--locked", "--no-deps", "--format-version", "1"])
        .output()
        .context("cannot run cargo metadata")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "cargo metadata failed:\n{errors}");
    let metadata: Metadata =
        serde_json::from_slice(&output.stdout).context("cannot read cargo's metadata")?;
    Ok(metadata.packages.into_iter().flat_map(|package| package.targets).collect())
}

/// The imports of each file of the library or program whose root file is `root`.
fn imports(root: &Path) -> Result<Graph> {
    let tree = Tree::read(root)?;
    let mut graph = Graph::default();
    for module in tree.modules() {
        graph.add_file(module.file());
        for path in module.paths() {
            for file in resolve::files(&tree, module, path) {
                graph.add_import(module.file(), &file, path);
            }
        }
    }
    Ok(graph)
}

/// Describes a cycle: its size, and one path of imports around it.
fn describe(title: &str, cycle: &graph::Cycle) -> String {
    let mut text = format!("{title}: {} files import each other in a cycle:", cycle.files.len());
    let names: BTreeMap<&Path, String> =
        cycle.files.iter().map(|file| (file.as_path(), shown(file))).collect();
    for import in &cycle.way_around {
        let (from, to) = (&names[import.from.as_path()], &names[import.to.as_path()]);
        text.push_str(&format!("\n  {from}:{} imports {} from {to}", import.line, import.path));
    }
    let around: Vec<_> = cycle.way_around.iter().map(|import| &import.from).collect();
    let others: Vec<_> =
        cycle.files.iter().filter(|file| !around.contains(file)).map(|file| shown(file)).collect();
    if !others.is_empty() {
        text.push_str(&format!("\n  and by other ways: {}", others.join(", ")));
    }
    text
}

/// A file's path, relative to the root of the workspace.
fn shown(file: &Path) -> String {
    file.strip_prefix(workspace::root()).unwrap_or(file).display().to_string()
}

#[cfg(test)]
mod tests;
