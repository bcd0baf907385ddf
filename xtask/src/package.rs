//! The packages of the libraries, as a registry would get them: each compiles from its own files, is small enough, and
//! has licences and a description. With `release`, also checks the settings that only the publisher can decide.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use comfy_table::Table;
use comfy_table::presets::ASCII_MARKDOWN;
use serde::Deserialize;

use crate::process;
use crate::workspace::{cargo, cargo_home, root, target_dir};

/// Largest compressed package that crates.io accepts, in bytes.
const MAX_BYTES: u64 = 10 << 20;
/// Files that each package contains besides its sources.
const FILES: [&str; 3] = ["LICENSE-APACHE", "LICENSE-MIT", "README.md"];
/// The line in `Cargo.toml` that marks a library. All other packages have `publish = false`.
const LIBRARY: &str = "publish.workspace = true";

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    version: String,
    manifest_path: PathBuf,
    description: Option<String>,
    license: Option<String>,
    repository: Option<String>,
    /// The registries to which it may be published; an empty list means none, and `None` means any.
    publish: Option<Vec<String>>,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    /// `dev` or `build`; `None` for a normal dependency.
    kind: Option<String>,
    path: Option<PathBuf>,
}

/// What to do besides the checks of files and manifests.
#[derive(Clone, Copy, clap::Args)]
pub struct Options {
    /// Compile nothing: pack and measure.
    #[arg(long)]
    no_verify: bool,
    /// Insist on what a release needs: `repository` is set, and the packages may be published.
    #[arg(long)]
    release: bool,
}

/// Packs every library, compiles each from its package alone, and checks the contents.
///
/// # Errors
/// A package does not compile, is too large, or lacks something. The error names everything that is missing.
pub fn run(options: Options) -> Result<()> {
    let mut command = cargo();
    command.args(["metadata", "--locked", "--no-deps", "--format-version", "1"]);
    let text = command.output().context("running cargo metadata")?.stdout;
    let packages = serde_json::from_slice::<Metadata>(&text).context("cargo metadata")?.packages;
    let libraries = libraries(packages)?;
    let mut problems: Vec<String> =
        libraries.values().flat_map(|it| missing(it, options)).collect();
    problems.extend(unpublished(&libraries));
    let packed = pack(&libraries, options)?;
    let mut table = Table::new();
    table.load_preset(ASCII_MARKDOWN).set_header(["package", "KiB, compressed"]);
    for (name, library) in &libraries {
        let file = format!("{name}-{}.crate", library.version);
        let path = packed.join(file);
        let bytes = fs::metadata(&path).with_context(|| path.display().to_string())?.len();
        table.add_row([name.clone(), bytes.div_ceil(1024).to_string()]);
        problems.extend(too_large(name, bytes));
    }
    println!("{table}");
    ensure!(problems.is_empty(), "{}", problems.join("\n"));
    Ok(())
}

/// The packages that are libraries, by name.
fn libraries(packages: Vec<Package>) -> Result<BTreeMap<String, Package>> {
    let mut found = BTreeMap::new();
    for package in packages {
        let path = &package.manifest_path;
        let manifest = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        if manifest.lines().any(|line| line == LIBRARY) {
            found.insert(package.name.clone(), package);
        }
    }
    ensure!(!found.is_empty(), "no Cargo.toml says `{LIBRARY}`");
    Ok(found)
}

/// Everything that a package lacks.
fn missing(library: &Package, options: Options) -> Vec<String> {
    let Package { name, manifest_path, description, license, repository, publish, .. } = library;
    let folder = manifest_path.parent().unwrap_or_else(|| root());
    let mut missing: Vec<String> =
        FILES.into_iter().filter(|file| !has_text(&folder.join(file))).map(str::to_owned).collect();
    let mut want = |field: &str, is_there: bool| {
        if !is_there {
            missing.push(format!("`{field}` in Cargo.toml"));
        }
    };
    want("description", description.is_some());
    want("license", license.is_some());
    if options.release {
        want("repository", repository.is_some());
        want("publish = true", publish.as_ref().is_none_or(|registries| !registries.is_empty()));
    }
    missing.into_iter().map(|what| format!("{name} lacks {what}")).collect()
}

fn has_text(path: &Path) -> bool {
    fs::read_to_string(path).is_ok_and(|text| !text.trim().is_empty())
}

/// Libraries that depend on a package of this workspace that is not published, so that no registry has it.
fn unpublished(libraries: &BTreeMap<String, Package>) -> Vec<String> {
    let mut found = Vec::new();
    for (name, library) in libraries {
        for dependency in &library.dependencies {
            let is_needed = dependency.kind.as_deref() != Some("dev") && dependency.path.is_some();
            if is_needed && !libraries.contains_key(&dependency.name) {
                found.push(format!("{name} needs {}, which is not published", dependency.name));
            }
        }
    }
    found
}

fn too_large(name: &str, bytes: u64) -> Option<String> {
    (bytes > MAX_BYTES).then(|| format!("{name} has {bytes} bytes; crates.io takes {MAX_BYTES}"))
}

/// Packs the libraries together, so that each is compiled against the packages of the others. Returns the folder of the
/// packages.
///
/// It packs a copy of the workspace in which the libraries may be published, because cargo resolves the dependencies of
/// a package only among packages that a registry could have.
fn pack(libraries: &BTreeMap<String, Package>, options: Options) -> Result<PathBuf> {
    let (source, built) = (target_dir().join("package-source"), target_dir().join("package-build"));
    copy_workspace(&source)?;
    forget(libraries, &built)?;
    let manifest = source.join("Cargo.toml");
    let text = fs::read_to_string(&manifest)?.replacen("\npublish = false\n", "\n", 1);
    let text = text.replacen("[workspace.package]\n", "[workspace.package]\npublish = true\n", 1);
    fs::write(&manifest, text)?;
    let mut command = cargo();
    command.current_dir(&source).args(["package", "--locked", "--exclude-lockfile"]);
    command.arg("--target-dir").arg(&built).env_remove("CARGO_TARGET_DIR");
    // The compiled output is not used, so it needs no debug information.
    command.env("CARGO_PROFILE_DEV_DEBUG", "0");
    for name in libraries.keys() {
        command.args(["--package", name]);
    }
    if options.no_verify {
        command.arg("--no-verify");
    }
    process::run("packing", &mut command)?;
    Ok(built.join("package"))
}

/// Removes the build of earlier packages, and the copies that cargo unpacked. Cargo identifies a package of a registry
/// by name and version, and does not read its files again. A registry that is a local folder has no name before the
/// `-`.
fn forget(libraries: &BTreeMap<String, Package>, built: &Path) -> Result<()> {
    let unpacked = cargo_home().join("registry/src");
    let mut folders = vec![built.to_owned()];
    let registries = unpacked.exists().then(|| fs::read_dir(&unpacked)).transpose()?;
    for registry in registries.into_iter().flatten() {
        let registry = registry?;
        if registry.file_name().as_encoded_bytes().starts_with(b"-") {
            let of = |(name, package): (&String, &Package)| format!("{name}-{}", package.version);
            folders.extend(libraries.iter().map(of).map(|name| registry.path().join(name)));
        }
    }
    for folder in folders.iter().filter(|folder| folder.exists()) {
        fs::remove_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    Ok(())
}

/// Copies the tracked files, and the untracked ones that git does not ignore, into an empty folder.
fn copy_workspace(to: &Path) -> Result<()> {
    if to.exists() {
        fs::remove_dir_all(to).with_context(|| to.display().to_string())?;
    }
    let mut git = Command::new("git");
    git.current_dir(root()).args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
    let listed = git.output().context("running git ls-files")?;
    ensure!(listed.status.success(), "git ls-files: {}", String::from_utf8_lossy(&listed.stderr));
    let listed = String::from_utf8(listed.stdout).context("names of files are UTF-8")?;
    for file in listed.split('\0').filter(|file| !file.is_empty()) {
        let (from, to) = (root().join(file), to.join(file));
        // git also lists files that were deleted but whose deletion is not committed.
        if from.is_file() {
            fs::create_dir_all(to.parent().unwrap_or(&to))?;
            fs::copy(&from, &to).with_context(|| from.display().to_string())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: Options = Options { no_verify: true, release: false };

    fn package(name: &str, needs: &[(&str, Option<&str>)]) -> Package {
        let dependency = |&(name, kind): &(&str, Option<&str>)| Dependency {
            name: name.to_owned(),
            kind: kind.map(str::to_owned),
            path: Some(PathBuf::new()),
        };
        Package {
            name: name.to_owned(),
            version: "0.1.0".to_owned(),
            manifest_path: root().join("host/Cargo.toml"),
            description: Some("A package".to_owned()),
            license: Some("MIT".to_owned()),
            repository: None,
            publish: Some(Vec::new()),
            dependencies: needs.iter().map(dependency).collect(),
        }
    }

    #[test]
    fn what_a_package_lacks_is_named() {
        let whole = package("whole", &[]);
        assert!(missing(&whole, NOTHING).is_empty());
        let release = missing(&whole, Options { release: true, ..NOTHING }).join("\n");
        assert!(release.contains("repository") && release.contains("publish"), "{release}");
        let elsewhere = root().join("xtask/Cargo.toml");
        let bare = Package { description: None, manifest_path: elsewhere, ..package("bare", &[]) };
        let named = missing(&bare, NOTHING).join("\n");
        assert!(named.contains("description") && named.contains("LICENSE-MIT"), "{named}");
    }

    #[test]
    fn a_package_that_nobody_else_has_is_found() {
        let needs = [("tests", Some("dev")), ("b", None)];
        let both = [("a", package("a", &needs)), ("b", package("b", &[("oracle", None)]))];
        let libraries = both.into_iter().map(|(name, it)| (name.to_owned(), it)).collect();
        assert_eq!(unpublished(&libraries), ["b needs oracle, which is not published"]);
    }

    #[test]
    fn the_limit_is_the_registrys() {
        assert_eq!(too_large("small", MAX_BYTES), None);
        assert!(too_large("large", MAX_BYTES + 1).is_some());
    }
}
