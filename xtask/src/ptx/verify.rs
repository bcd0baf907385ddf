//! Makes the committed PTX anew, and assembles it, where the programs for that can be had.

use anyhow::{Context, Result, bail};

use super::manifest::Manifest;
use super::recipe::{Built, Target};
use super::{build, ptxas, toolchain};

/// Compiles the PTX anew and compares it with the committed one, byte for byte, where the compiler
/// that made it is installed.
///
/// # Errors
/// They differ, or the kernels do not compile.
pub fn rebuild() -> Result<()> {
    let manifest = Manifest::read()?;
    let compiler = match toolchain::find_installed() {
        Ok(compiler) if compiler.version == manifest.compiler => compiler,
        Ok(other) => {
            println!(
                "not rebuilt: made by {}, here is {}",
                manifest.compiler.rustc, other.version.rustc
            );
            return Ok(());
        }
        Err(error) => {
            println!("not rebuilt: no device compiler here\n{error:#}");
            return Ok(());
        }
    };
    for (built, record) in build::compile(&compiler)?.iter().zip(&manifest.targets) {
        if record.cpu != built.target.cpu || record.read_ptx()? != built.ptx {
            bail!("{} is not what the compiler makes; run `cargo xtask build-ptx`", record.file);
        }
        println!("{}: rebuilt and identical", record.file);
    }
    Ok(())
}

/// Assembles the committed PTX where `ptxas` can be had.
///
/// # Errors
/// `ptxas` refuses it.
pub fn assemble() -> Result<()> {
    let ptxas = match ptxas::find_or_fetch() {
        Ok(ptxas) => ptxas,
        Err(error) => {
            println!("not run: {error:#}");
            return Ok(());
        }
    };
    let mut committed = Vec::new();
    for record in Manifest::read()?.targets {
        let target = Target::named(&record.cpu).context("build-ptx --check knows the targets")?;
        committed.push(Built { target, ptx: record.read_ptx()? });
    }
    ptxas::report(&ptxas, &committed)
}
