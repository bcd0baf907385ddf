//! A compiler that can make PTX: a rustc of 1.96 or later, with the source of `core`.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, ensure};
use serde::{Deserialize, Serialize};

/// The oldest rustc that makes correct PTX, as (major, minor). 1.95 does not mark functions `convergent`, so LLVM may
/// copy a barrier or a shuffle into both sides of a branch.
const OLDEST: (u32, u32) = (1, 96);

/// A rustc and its LLVM, as recorded in the manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version {
    /// First line of `rustc -vV`.
    pub rustc: String,
    /// LLVM's version.
    pub llvm: String,
}

/// A compiler that can make PTX.
#[derive(Debug)]
pub struct Compiler {
    /// The rustc binary.
    pub rustc: PathBuf,
    /// Its sysroot; the source of `core` lies in `lib/rustlib/src`.
    pub sysroot: PathBuf,
    /// Folders of shared libraries that it needs and that the system does not have.
    pub libraries: Vec<PathBuf>,
    /// Its version.
    pub version: Version,
}

impl Compiler {
    /// The compiler at `rustc`, if it can make PTX.
    ///
    /// # Errors
    /// Why it cannot: it does not run, it is too old, or the source of `core` is missing.
    pub fn probe(rustc: &Path, libraries: Vec<PathBuf>) -> Result<Self> {
        let ask = |args: &[&str]| -> Result<String> {
            let mut command = Command::new(rustc);
            set_library_path(&mut command, &libraries)?;
            // rustup's proxy must choose the same toolchain here as when the cargo with a cleared environment calls it.
            let output = command
                .args(args)
                .env_remove("RUSTUP_TOOLCHAIN")
                .output()
                .with_context(|| format!("{} does not run", rustc.display()))?;
            if !output.status.success() {
                let error = String::from_utf8_lossy(&output.stderr);
                return Err(anyhow!("{} does not run: {}", rustc.display(), error.trim()));
            }
            Ok(String::from_utf8(output.stdout)?)
        };
        let version = parse_version(&ask(&["-vV"])?)?;
        require_recent(&version)?;
        let sysroot = PathBuf::from(ask(&["--print", "sysroot"])?.trim());
        require_core_source(&sysroot)?;
        Ok(Self { rustc: rustc.to_owned(), sysroot, libraries, version })
    }

    /// The rustc on the `PATH`, as it answers in `folder`. If it is rustup's proxy, this is the toolchain that cargo
    /// uses in that folder.
    ///
    /// # Errors
    /// As [`Self::probe`]; also if there is no rustc.
    pub fn in_use(folder: &Path) -> Result<Self> {
        let output = Command::new("rustc")
            .args(["--print", "sysroot"])
            .current_dir(folder)
            .output()
            .context("no rustc on the PATH")?;
        let why = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "rustc does not say where it lies: {}", why.trim());
        let sysroot = String::from_utf8(output.stdout)?;
        Self::probe(&Path::new(sysroot.trim()).join("bin/rustc"), Vec::new())
    }

    /// Debian's `rustc-web`, if it is installed.
    ///
    /// # Errors
    /// As [`Self::probe`].
    pub fn of_debian() -> Result<Self> {
        Self::probe(Path::new("/usr/bin/rustc"), Vec::new())
    }

    /// Makes `command`, a cargo, use this compiler.
    ///
    /// # Errors
    /// A library folder cannot be part of a search path.
    pub fn apply(&self, command: &mut Command) -> Result<()> {
        command.env("RUSTC", &self.rustc).env("RUSTC_WRAPPER", "");
        set_library_path(command, &self.libraries)
    }
}

fn require_recent(version: &Version) -> Result<()> {
    let minor = parse_release(&version.rustc)
        .with_context(|| format!("cannot read the version in {:?}", version.rustc))?;
    if minor < OLDEST {
        return Err(anyhow!(
            "{} is older than {}.{}: it may copy barriers and shuffles into branches",
            version.rustc,
            OLDEST.0,
            OLDEST.1
        ));
    }
    Ok(())
}

fn require_core_source(sysroot: &Path) -> Result<()> {
    let core = sysroot.join("lib/rustlib/src/rust/library/core/Cargo.toml");
    if core.exists() { Ok(()) } else { Err(anyhow!("no rust-src: {} is missing", core.display())) }
}

fn set_library_path(command: &mut Command, libraries: &[PathBuf]) -> Result<()> {
    if !libraries.is_empty() {
        let inherited = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        command.env("LD_LIBRARY_PATH", library_path(libraries, &inherited)?);
    }
    Ok(())
}

/// `libraries`, then the folders of `inherited`. An empty folder is left out: the dynamic linker would take it for the
/// current one.
fn library_path(libraries: &[PathBuf], inherited: &OsStr) -> Result<OsString> {
    let inherited = std::env::split_paths(inherited).filter(|path| !path.as_os_str().is_empty());
    Ok(std::env::join_paths(libraries.iter().cloned().chain(inherited))?)
}

/// Reads `rustc -vV`.
fn parse_version(text: &str) -> Result<Version> {
    let rustc = text.lines().next().filter(|line| line.starts_with("rustc "));
    let llvm = text.lines().find_map(|line| line.strip_prefix("LLVM version: "));
    match (rustc, llvm) {
        (Some(rustc), Some(llvm)) => {
            Ok(Version { rustc: rustc.to_owned(), llvm: llvm.trim().to_owned() })
        }
        _ => Err(anyhow!("not the output of rustc -vV: {text:?}")),
    }
}

/// (major, minor) of `rustc 1.96.0 (..)`.
fn parse_release(rustc: &str) -> Option<(u32, u32)> {
    let mut numbers = rustc.strip_prefix("rustc ")?.split('.');
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(rustc: &str) -> Version {
        Version { rustc: rustc.to_owned(), llvm: "22.1.8".to_owned() }
    }

    #[test]
    fn the_version_is_read() {
        let text = "rustc 1.96.0 (ac68faa20 2026-05-25)\nbinary: rustc\nLLVM version: 22.1.8\n";
        let read = parse_version(text).expect("a version");
        assert_eq!(read, version("rustc 1.96.0 (ac68faa20 2026-05-25)"));
        assert!(parse_version("cargo 1.96.0").is_err());
    }

    #[test]
    fn an_old_compiler_is_refused_with_the_reason() {
        let refused = require_recent(&version("rustc 1.95.0 (59807616e 2026-04-14)"));
        let text = refused.expect_err("1.95 is too old").to_string();
        assert!(text.contains("barriers"), "{text}");
        assert!(require_recent(&version("rustc 1.96.0 (ac68faa20 2026-05-25)")).is_ok());
        assert!(require_recent(&version("rustc 2.0.0-nightly (0 2030-01-01)")).is_ok());
    }

    #[test]
    fn the_current_folder_is_not_searched_for_libraries() {
        let path = |inherited: &str| library_path(&["/new".into()], inherited.as_ref()).unwrap();
        assert_eq!([path(""), path("/a::/b:")], ["/new", "/new:/a:/b"]);
    }

    #[test]
    fn a_sysroot_without_core_is_refused() {
        let text = require_core_source(Path::new("/nonexistent")).expect_err("no core").to_string();
        assert!(text.contains("rust-src"), "{text}");
    }
}
