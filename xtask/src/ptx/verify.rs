//! Compiles PTX again and compares it with the committed PTX, if the compiler is available.

use std::env;
use std::ffi::OsStr;

use anyhow::{Context, Result, bail};

use super::manifest::Manifest;
use super::recipe::TARGETS;
use super::{build, toolchain};
use dsv4_kv_device_compiler::{Compiler, Version};

/// With the value 1, PTX that is not compared is an error; 0 and an empty one are as none.
const REQUIRE: &str = "DSV4_REQUIRE_PTX";

/// Compiles the PTX of the targets that tests rebuild, and compares it with the committed PTX, byte for byte, if the
/// compiler that made it is installed. If [`REQUIRE`] is 1, that compiler is fetched where none is installed.
///
/// # Errors
/// They differ, or the kernels do not compile; [`REQUIRE`] is neither 1 nor off. If it is 1, also: the compiler is not
/// available.
pub fn rebuild() -> Result<()> {
    let is_required = is_on(env::var_os(REQUIRE).as_deref())?;
    let manifest = Manifest::read()?;
    let found = if is_required { toolchain::find_or_fetch() } else { toolchain::find_installed() };
    let Some(compiler) = same(&manifest.compiler, found, is_required)? else { return Ok(()) };
    let targets = Vec::from_iter(TARGETS.into_iter().filter(|target| target.is_rebuilt_by_tests()));
    for built in build::compile(&compiler, &targets)? {
        let cpu = built.target.cpu;
        let record = manifest.targets.iter().find(|record| record.cpu == cpu);
        let record = record.with_context(|| format!("the manifest has no {cpu}"))?;
        if record.read_ptx()? != built.ptx {
            bail!("{} is not what the compiler makes; run `cargo xtask build-ptx`", record.file);
        }
        println!("{}: rebuilt and identical", record.file);
    }
    Ok(())
}

/// Whether this value of [`REQUIRE`] requires the compiler.
///
/// # Errors
/// It is none of 1, 0 and an empty one.
fn is_on(value: Option<&OsStr>) -> Result<bool> {
    let value = value.unwrap_or_default();
    match value.to_str() {
        Some("" | "0") => Ok(false),
        Some("1") => Ok(true),
        _ => bail!("{REQUIRE} is {value:?}; it has to be 1, or for off 0 or empty"),
    }
}

/// The compiler that was found, if it is the one that made the PTX. If not, says so.
///
/// # Errors
/// It is another one or there is none, and it `is_required`.
fn same(made_by: &Version, found: Result<Compiler>, is_required: bool) -> Result<Option<Compiler>> {
    let reason = match found {
        Ok(compiler) if compiler.version == *made_by => return Ok(Some(compiler)),
        Ok(Compiler { rustc, version, .. }) => format!(
            "made by {} with LLVM {}; {} is {} with LLVM {}",
            made_by.rustc,
            made_by.llvm,
            rustc.display(),
            version.rustc,
            version.llvm
        ),
        Err(error) => format!("no device compiler here\n{error:#}"),
    };
    if is_required {
        bail!(
            "{REQUIRE}=1, and the PTX cannot be compared: {reason}\ninstall {}, or run `cargo xtask build-ptx` with the \
             compiler that is here and commit host/ptx/",
            made_by.rustc
        );
    }
    println!("not rebuilt: {reason}");
    Ok(None)
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    fn version(rustc: &str, llvm: &str) -> Version {
        Version { rustc: rustc.to_owned(), llvm: llvm.to_owned() }
    }

    fn compiler(version: Version) -> Compiler {
        Compiler {
            rustc: "/usr/bin/rustc".into(),
            sysroot: "/usr".into(),
            libraries: Vec::new(),
            version,
        }
    }

    #[test]
    fn what_is_neither_on_nor_off_is_refused() {
        let read = |value: Option<&str>| is_on(value.map(OsStr::new));
        assert!(read(Some("1")).expect("on"));
        for off in [None, Some(""), Some("0")] {
            assert!(!read(off).expect("off"), "{off:?}");
        }
        for unclear in ["true", "yes", "2"] {
            let error = read(Some(unclear)).expect_err("neither").to_string();
            assert!(error.contains(REQUIRE) && error.contains(unclear), "{error}");
        }
    }

    #[test]
    fn a_compiler_that_is_required_is_there_or_an_error() {
        let made_by = version("rustc 1.96.0", "22.1.8");
        for is_required in [false, true] {
            let found = same(&made_by, Ok(compiler(made_by.clone())), is_required);
            assert_eq!(found.expect("it is there").expect("the same").version, made_by);
        }
        let others: [fn() -> Result<Compiler>; 3] = [
            || Ok(compiler(version("rustc 1.97.0", "22.1.8"))),
            || Ok(compiler(version("rustc 1.96.0", "22.1.9"))),
            || Err(anyhow!("no rustc on the PATH")),
        ];
        for (other, said) in others.into_iter().zip(["1.97.0", "22.1.9", "no rustc on the PATH"]) {
            assert!(same(&made_by, other(), false).expect("it is not required").is_none());
            let error = same(&made_by, other(), true).expect_err("it is required").to_string();
            for part in [said, "DSV4_REQUIRE_PTX=1", "install rustc 1.96.0", "build-ptx"] {
                assert!(error.contains(part), "{error}");
            }
        }
    }
}
