//! The sizes that the project limits: lines of a file, and functions with too many arguments.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

/// Most lines of a source file.
const MAX_LINES: usize = 500;

/// The lint for functions with more than seven arguments.
const ARGUMENTS_LINT: &str = concat!("clippy::", "too_many_arguments");

/// How often code may contain an expectation of this lint.
const MAX_EXPECTATIONS: usize = 4;

/// Files under `root` that are too long, and the lint if it is expected too often.
///
/// # Errors
/// A folder or file cannot be read.
pub fn faults(root: &Path) -> Result<Vec<String>> {
    let mut files = Vec::new();
    add_files(root, &mut files)?;
    let mut faults = Vec::new();
    let mut expectations = Vec::new();
    for (file, text) in &files {
        let lines = text.lines().count();
        if lines > MAX_LINES {
            faults.push(format!("{file} has {lines} lines, more than {MAX_LINES}"));
        }
        let count = text.matches(ARGUMENTS_LINT).count();
        if count > 0 {
            expectations.push((file.as_str(), count));
        }
    }
    let total: usize = expectations.iter().map(|(_, count)| count).sum();
    if total > MAX_EXPECTATIONS {
        let places: Vec<_> =
            expectations.iter().map(|(file, count)| format!("{file} ({count})")).collect();
        faults.push(format!(
            "{ARGUMENTS_LINT} is expected {total} times, more than {MAX_EXPECTATIONS}: {}",
            places.join(", ")
        ));
    }
    println!("{} files, {total} expectations of {ARGUMENTS_LINT}", files.len());
    Ok(faults)
}

/// Adds the Rust files under `folder`: the path relative to it, and the text.
fn add_files(folder: &Path, files: &mut Vec<(String, String)>) -> Result<()> {
    fn walk(root: &Path, folder: &Path, files: &mut Vec<(String, String)>) -> Result<()> {
        let mut entries = fs::read_dir(folder)
            .and_then(Iterator::collect::<std::io::Result<Vec<_>>>)
            .with_context(|| format!("cannot read {}", folder.display()))?;
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            let (path, name) = (entry.path(), entry.file_name());
            let name = name.to_string_lossy();
            if entry.file_type()?.is_dir() {
                if name != "target" && !name.starts_with('.') {
                    walk(root, &path, files)?;
                }
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path)
                    .with_context(|| format!("cannot read {}", path.display()))?;
                let shown = path.strip_prefix(root).unwrap_or(&path).display().to_string();
                files.push((shown, text));
            }
        }
        Ok(())
    }
    walk(folder, folder, files)
}
