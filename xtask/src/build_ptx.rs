//! Compiles the kernels to PTX, one module a target, and commits them to `host/ptx/`.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use kernels_gpu::table::KERNELS;
use kv_layout::ABI_VERSION;
use simt::kernel::KernelInfo;

use crate::manifest::{Manifest, TargetRecord};
use crate::ptx::Module;
use crate::sources::Sources;
use crate::toolchain::{self, Compiler};
use crate::{compressed, fresh, lint, patch, process, ptxas, workspace};

/// A GPU the kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Its name, as in `-Ctarget-cpu` and `ptxas -arch`.
    pub cpu: &'static str,
    /// Its compute capability times ten.
    pub sm: u32,
}

/// H100 and H200; a base target, which all newer GPUs take too; B200. A target with an `a` runs on nothing
/// else and has instructions of its own: products of four warps, conversion to E2M1.
pub const TARGETS: [Target; 3] = [
    Target { cpu: "sm_90a", sm: 90 },
    Target { cpu: "sm_100", sm: 100 },
    Target { cpu: "sm_100a", sm: 100 },
];

impl Target {
    /// The target called `cpu`.
    pub fn named(cpu: &str) -> Option<Self> {
        TARGETS.into_iter().find(|target| target.cpu == cpu)
    }

    /// The kernels of `table` that it can run.
    pub fn kernels(self, table: &[KernelInfo]) -> Vec<KernelInfo> {
        table.iter().copied().filter(|kernel| kernel.min_sm <= self.sm).collect()
    }

    /// Its PTX file in `host/ptx/`, compressed.
    pub fn file(self) -> String {
        format!("{}.ptx.zst", self.cpu)
    }
}

/// Compiler flags for every target; `-Ctarget-cpu` and path remapping come on top.
///
/// Jump threading is off because it copies barriers and shuffles into branches; panics trap; the
/// linker is `true` because the assembly of the one fat-LTO module is the PTX.
pub const FLAGS: [&str; 4] = [
    "-Clinker=true",
    "-Zmir-enable-passes=-JumpThreading",
    "-Zunstable-options",
    "-Cpanic=immediate-abort",
];

/// The release profile of the device build, whatever the workspace's own says.
const PROFILE: [(&str, &str); 6] = [
    ("CARGO_PROFILE_RELEASE_OPT_LEVEL", "3"),
    ("CARGO_PROFILE_RELEASE_LTO", "fat"),
    ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1"),
    ("CARGO_PROFILE_RELEASE_PANIC", "abort"),
    ("CARGO_PROFILE_RELEASE_DEBUG", "0"),
    ("CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS", "false"),
];

/// One target's finished PTX.
pub struct Built {
    /// The target.
    pub target: Target,
    /// Its PTX, with launch bounds.
    pub ptx: String,
}

/// Compiles, lints, assembles and writes the PTX and its manifest.
///
/// # Errors
/// No compiler, a compile error, a broken lint rule, or PTX that `ptxas` refuses; then `host/ptx/`
/// is as it was.
pub fn build() -> Result<()> {
    let compiler = toolchain::find_or_fetch()?;
    println!("{}, LLVM {}", compiler.version.rustc, compiler.version.llvm);
    println!("{}", compiler.rustc.display());
    // Read first: what is edited while the compiler runs must make the PTX stale.
    let sources = Sources::read()?;
    let built = compile(&compiler)?;
    match ptxas::find_or_fetch() {
        Ok(ptxas) => ptxas::report(&ptxas, &built)?,
        Err(error) => println!("not assembled: {error:#}"),
    }
    write(&compiler, sources, &built)?;
    println!("wrote {}", workspace::ptx_dir().display());
    Ok(())
}

/// Says whether the committed PTX is what the sources describe; compiles nothing.
///
/// # Errors
/// It is stale or broken: why, and what to run.
pub fn check() -> Result<()> {
    let reasons = fresh::stale_reasons()?;
    if reasons.is_empty() {
        println!("host/ptx/ is up to date");
        return Ok(());
    }
    bail!("host/ptx/ is stale; run `cargo xtask build-ptx`:\n- {}", reasons.join("\n- "))
}

/// Compiles every target and lints what comes out.
///
/// # Errors
/// A compile error or a broken rule.
pub fn compile(compiler: &Compiler) -> Result<Vec<Built>> {
    TARGETS.into_iter().map(|target| compile_target(compiler, target)).collect()
}

fn compile_target(compiler: &Compiler, target: Target) -> Result<Built> {
    let folder = workspace::target_dir().join("ptx").join(target.cpu);
    let assembly = folder.join("nvptx64-nvidia-cuda/release/deps/kernels_gpu.s");
    // A failed build would leave an old one behind.
    remove_if_there(&assembly)?;
    let mut cargo = workspace::clean_cargo();
    compiler.apply(&mut cargo)?;
    cargo
        .args(["rustc", "--locked", "--package", "kernels-gpu", "--release"])
        .args(["--crate-type", "cdylib", "-Zbuild-std=core", "--target", "nvptx64-nvidia-cuda"])
        .arg("--target-dir")
        .arg(&folder)
        .args(["--", "--emit=asm"])
        .env("RUSTC_BOOTSTRAP", "1")
        .env("CARGO_ENCODED_RUSTFLAGS", rustflags(compiler, target).join("\x1f"))
        .envs(PROFILE);
    process::run(&format!("compiling the kernels for {}", target.cpu), &mut cargo)?;
    let raw = fs::read_to_string(&assembly)
        .with_context(|| format!("the compiler wrote no {}", assembly.display()))?;
    let kernels = target.kernels(KERNELS);
    let ptx = patch::launch_bounds(&raw, &kernels)?;
    let faults = lint::faults(&Module::parse(&ptx), target.cpu, &kernels);
    if !faults.is_empty() {
        let faults: Vec<String> = faults.iter().map(ToString::to_string).collect();
        bail!("{} breaks the rules of ptx-lint:\n{}", assembly.display(), faults.join("\n"));
    }
    Ok(Built { target, ptx })
}

/// The flags of one target, with every path of this machine mapped to a fixed name.
fn rustflags(compiler: &Compiler, target: Target) -> Vec<String> {
    let rust_src = compiler.sysroot.join("lib/rustlib/src/rust");
    let remap = |path: &Path, name| format!("--remap-path-prefix={}={name}", path.display());
    let mut flags = vec![format!("-Ctarget-cpu={}", target.cpu)];
    flags.extend(FLAGS.map(ToOwned::to_owned));
    flags.push(remap(&workspace::cargo_home(), "/cargo"));
    flags.push(remap(workspace::root(), "/dsv4-kv"));
    flags.push(remap(&rust_src, "/rust"));
    flags
}

fn remove_if_there(file: &Path) -> Result<()> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", file.display()))
        }
        _ => Ok(()),
    }
}

fn write(compiler: &Compiler, sources: Sources, built: &[Built]) -> Result<()> {
    let folder = workspace::ptx_dir();
    fs::create_dir_all(&folder)?;
    let mut targets = Vec::new();
    for Built { target, ptx } in built {
        let file = target.file();
        let bytes = compressed::compress(ptx)?;
        fs::write(folder.join(&file), &bytes).with_context(|| format!("cannot write {file}"))?;
        let megabytes = |bytes: usize| bytes as f64 / 1e6;
        println!("{file}: {:.2} MB of {:.2} MB", megabytes(bytes.len()), megabytes(ptx.len()));
        targets.push(TargetRecord::new(target.cpu, &file, ptx));
    }
    Manifest {
        abi_version: ABI_VERSION,
        compiler: compiler.version.clone(),
        flags: FLAGS.map(ToOwned::to_owned).to_vec(),
        source_hash: sources.hash(),
        sources,
        targets,
    }
    .write()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_takes_the_kernels_it_can_run() {
        let kernel = KernelInfo {
            name: "k",
            pointers: &[],
            params_size: 4,
            params_align: 4,
            block: 32,
            min_blocks: 1,
            shared: 0,
            min_sm: 100,
            cluster: 1,
        };
        let names = |target: Target| target.kernels(&[kernel]).len();
        assert_eq!(TARGETS.map(names), [0, 1, 1]);
    }
}
