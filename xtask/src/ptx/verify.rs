//! Compiles PTX again and compares it with the committed PTX, if the compiler is available.

use anyhow::{Context, Result, bail};

use super::manifest::Manifest;
use super::recipe::TARGETS;
use super::{build, toolchain};

/// Compiles the PTX of the targets that tests rebuild, and compares it with the committed PTX, byte for byte, if the
/// compiler that made it is installed.
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
