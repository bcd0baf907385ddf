//! Hashes of everything on which the PTX depends: the files of the device crates, their edition, and the versions and
//! features of the packages with which they are compiled.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::workspace;

/// The device crates: the folder, and the modules in its `src` that the device build leaves out. Each module is a
/// folder or a file, named without `.rs`.
const CRATES: [(&str, &[&str]); 3] = [
    ("crates/kv-layout", &["crates/kv-layout/src/config"]),
    ("crates/simt", &["crates/simt/src/emu"]),
    ("kernels-gpu", &["kernels-gpu/src/launch"]),
];

/// The sources from which the PTX is compiled.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sources {
    /// SHA-256 of each file, by its path relative to the workspace root.
    pub files: BTreeMap<String, String>,
    /// The packages that the device build uses: those from the registry as `name version features`, and those of this
    /// workspace as `name features`. Features are often chosen in the workspace's `Cargo.toml`, which is not hashed.
    pub packages: Vec<String>,
    /// The editions of the device crates, as `name edition`: the workspace's `Cargo.toml` has them, too.
    pub editions: Vec<String>,
}

impl Sources {
    /// The sources as they are now.
    ///
    /// # Errors
    /// A file cannot be read, or cargo cannot list the packages.
    pub fn read() -> Result<Self> {
        let mut files = BTreeMap::new();
        for (folder, left_out) in CRATES {
            add_file(&format!("{folder}/Cargo.toml"), &mut files)?;
            add_folder(&format!("{folder}/src"), left_out, &mut files)?;
        }
        Ok(Self { files, packages: packages()?, editions: editions()? })
    }

    /// One hash over all files and packages.
    pub fn hash(&self) -> String {
        let mut text = String::new();
        for (path, hash) in &self.files {
            text.push_str(&format!("{hash} {path}\n"));
        }
        for line in self.packages.iter().chain(&self.editions) {
            text.push_str(&format!("{line}\n"));
        }
        sha256(text.as_bytes())
    }

    /// The differences from `recorded`, one per line.
    pub fn changes_since(&self, recorded: &Self) -> Vec<String> {
        let mut changes = Vec::new();
        for (path, hash) in &self.files {
            match recorded.files.get(path) {
                None => changes.push(format!("{path} is new")),
                Some(old) if old != hash => changes.push(format!("{path} changed")),
                Some(_) => {}
            }
        }
        let gone = recorded.files.keys().filter(|path| !self.files.contains_key(*path));
        changes.extend(gone.map(|path| format!("{path} is gone")));
        for (what, now, old) in [
            ("packages", &self.packages, &recorded.packages),
            ("editions", &self.editions, &recorded.editions),
        ] {
            if now != old {
                let (old, now) = (old.join("; "), now.join("; "));
                changes.push(format!("the device {what} were [{old}] and are [{now}]"));
            }
        }
        changes
    }
}

/// SHA-256 of `bytes`, in hex.
pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().fold(String::new(), |mut hex, byte| {
        write!(hex, "{byte:02x}").expect("a String takes all text");
        hex
    })
}

fn add_file(path: &str, files: &mut BTreeMap<String, String>) -> Result<()> {
    let bytes =
        fs::read(workspace::root().join(path)).with_context(|| format!("reading {path}"))?;
    files.insert(path.to_owned(), sha256(&bytes));
    Ok(())
}

/// Adds the Rust files of `folder`, a path relative to the workspace root.
fn add_folder(folder: &str, left_out: &[&str], files: &mut BTreeMap<String, String>) -> Result<()> {
    let absolute = workspace::root().join(folder);
    for entry in fs::read_dir(&absolute).with_context(|| format!("reading {folder}"))? {
        let entry = entry?;
        let path = format!("{folder}/{}", entry.file_name().to_string_lossy());
        if left_out.contains(&path.trim_end_matches(".rs")) {
            continue;
        }
        if entry.file_type()?.is_dir() {
            add_folder(&path, left_out, files)?;
        } else if Path::new(&path).extension().is_some_and(|extension| extension == "rs") {
            add_file(&path, files)?;
        }
    }
    Ok(())
}

/// The packages of the device build with their features, sorted.
fn packages() -> Result<Vec<String>> {
    let mut command = workspace::cargo();
    command.args(["tree", "--locked", "--package", "kernels-gpu", "--edges", "normal"]);
    command.args(["--target", "nvptx64-nvidia-cuda", "--prefix", "none", "--format", "{p}|{f}"]);
    let output = command.output().context("cannot run cargo tree")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "cargo tree failed:\n{errors}");
    Ok(parse_tree(&String::from_utf8(output.stdout)?))
}

/// Reads lines such as `half v2.7.1|bytemuck,std`, `syn v2.0.1|full (*)` and `simt v0.1.0 (/path)|`. A package of this
/// workspace has no version: its files are hashed.
fn parse_tree(text: &str) -> Vec<String> {
    let package = |line: &str| {
        let (package, features) = line.split_once('|')?;
        let mut words = package.split_whitespace();
        let (name, version) = (words.next()?, words.next()?.trim_start_matches('v'));
        let version = if package.contains("(/") { "" } else { version };
        let features = features.trim_end_matches("(*)").trim();
        let words = [name, version, features].into_iter().filter(|word| !word.is_empty());
        Some(words.collect::<Vec<_>>().join(" "))
    };
    let mut packages: Vec<String> = text.lines().filter_map(package).collect();
    packages.sort();
    packages.dedup();
    packages
}

/// The editions of the device crates, sorted.
fn editions() -> Result<Vec<String>> {
    #[derive(Deserialize)]
    struct Metadata {
        packages: Vec<Package>,
    }
    #[derive(Deserialize)]
    struct Package {
        name: String,
        edition: String,
        manifest_path: PathBuf,
    }
    let mut command = workspace::cargo();
    command.args(["metadata", "--locked", "--no-deps", "--format-version", "1"]);
    let output = command.output().context("cannot run cargo metadata")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "cargo metadata failed:\n{errors}");
    let metadata: Metadata =
        serde_json::from_slice(&output.stdout).context("cannot read cargo's metadata")?;
    let is_device = |package: &Package| {
        let manifest = |folder: &str| Path::new(folder).join("Cargo.toml");
        CRATES.iter().any(|(folder, _)| package.manifest_path.ends_with(manifest(folder)))
    };
    let crates = metadata.packages.into_iter().filter(is_device);
    let mut editions: Vec<_> =
        crates.map(|Package { name, edition, .. }| format!("{name} {edition}")).collect();
    ensure!(editions.len() == CRATES.len(), "cargo metadata names {editions:?} as device crates");
    editions.sort();
    Ok(editions)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources(files: &[(&str, &str)], packages: &[&str]) -> Sources {
        Sources {
            files: files.iter().map(|(path, hash)| (path.to_string(), hash.to_string())).collect(),
            packages: packages.iter().map(ToString::to_string).collect(),
            editions: vec!["simt 2024".to_owned()],
        }
    }

    #[test]
    fn each_change_is_named_and_changes_the_hash() {
        let recorded = sources(&[("a", "1"), ("b", "2")], &["half 2.7.1"]);
        assert!(recorded.changes_since(&recorded).is_empty());
        for (now, said) in [
            (sources(&[("a", "9"), ("b", "2")], &["half 2.7.1"]), "a changed"),
            (sources(&[("a", "1")], &["half 2.7.1"]), "b is gone"),
            (sources(&[("a", "1"), ("b", "2"), ("c", "3")], &["half 2.7.1"]), "c is new"),
            (sources(&[("a", "1"), ("b", "2")], &["half 2.8.0"]), "half 2.8.0"),
            (sources(&[("a", "1"), ("b", "2")], &["half 2.7.1 std"]), "half 2.7.1 std"),
            (
                Sources {
                    editions: vec!["simt 2027".to_owned()],
                    ..sources(&[("a", "1"), ("b", "2")], &["half 2.7.1"])
                },
                "the device editions were [simt 2024] and are [simt 2027]",
            ),
        ] {
            let changes = now.changes_since(&recorded);
            assert_eq!(changes.len(), 1, "{changes:?}");
            assert!(changes[0].contains(said), "{changes:?}");
            assert_ne!(now.hash(), recorded.hash());
        }
    }

    #[test]
    fn the_hash_is_sha256() {
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(sha256(b"abc"), abc);
    }

    #[test]
    fn host_only_files_are_left_out() {
        let sources = Sources::read().expect("the sources are readable");
        assert!(sources.files.contains_key("kernels-gpu/src/table/mod.rs"));
        assert!(sources.files.contains_key("kernels-gpu/Cargo.toml"));
        for module in CRATES.into_iter().flat_map(|(_, left_out)| left_out) {
            let is_there = |end: &str| workspace::root().join(format!("{module}{end}")).exists();
            assert!(is_there("") || is_there(".rs"), "{module} was renamed");
            assert!(!sources.files.keys().any(|path| path.starts_with(module)), "{module}");
        }
    }

    #[test]
    fn packages_have_their_features_once() {
        let tree = "kernels-gpu v0.1.0 (/w/kernels-gpu)|\nkv-layout v0.1.0 (/w/kv)|config\n\
            derive v1.0.0 (proc-macro)|\nhalf v2.7.1|a,std\nsyn v2.0.1|full (*)\nhalf v2.7.1|a,std\n";
        let expected = [
            "derive 1.0.0",
            "half 2.7.1 a,std",
            "kernels-gpu",
            "kv-layout config",
            "syn 2.0.1 full",
        ];
        assert_eq!(parse_tree(tree), expected);
    }

    #[test]
    fn what_the_workspace_chooses_is_there() {
        let Sources { packages, editions, .. } = Sources::read().expect("they are readable");
        assert_eq!(editions.len(), CRATES.len());
        assert!(editions.contains(&"simt 2024".to_owned()), "{editions:?}");
        let bytemuck = packages.iter().find(|package| package.starts_with("bytemuck "));
        assert!(bytemuck.is_some_and(|package| package.contains("derive")), "{packages:?}");
    }
}
