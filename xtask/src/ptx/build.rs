//! Compiles the kernels to PTX, one module per target, and writes them to `host/ptx/`, where they are committed.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use kernels_gpu::table::ABI_HASH;
use kernels_gpu::table::KERNELS;
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};

use super::manifest::{Manifest, TargetRecord};
use super::module::Module;
use super::recipe::{ARGUMENTS, Built, FLAGS, PROFILE, TARGETS, Target};
use super::sources::Sources;
use super::{compressed, lint, patch, ptxas, recipe, toolchain};
use crate::{process, workspace};
use dsv4_kv_device_compiler::Compiler;

/// Compiles, lints, assembles and writes the PTX and its manifest.
///
/// # Errors
/// There is no compiler, a compile error, a broken lint rule, or PTX that `ptxas` refuses. Then `host/ptx/` is
/// unchanged.
pub fn run() -> Result<()> {
    let compiler = toolchain::find_or_fetch()?;
    println!("{}, LLVM {}", compiler.version.rustc, compiler.version.llvm);
    println!("{}", compiler.rustc.display());
    // Hashed before the compiler starts, so that an edit during the build makes the PTX stale.
    let sources = Sources::read()?;
    let built = compile(&compiler, &TARGETS)?;
    let assembled_by = match ptxas::find_or_fetch() {
        Ok(ptxas) => {
            ptxas::report(&ptxas, &built)?;
            Some(ptxas::version(&ptxas)?)
        }
        Err(error) => {
            println!("not assembled, which `build-ptx --check` refuses: {error:#}");
            None
        }
    };
    write(&compiler, assembled_by, sources, &built)?;
    println!("wrote {}", workspace::ptx_dir().display());
    Ok(())
}

/// Compiles targets, as many in parallel as there are cores, and lints the results.
///
/// # Errors
/// A compile error or a broken rule.
pub fn compile(compiler: &Compiler, targets: &[Target]) -> Result<Vec<Built>> {
    targets.par_iter().map(|&target| compile_target(compiler, target)).collect()
}

fn compile_target(compiler: &Compiler, target: Target) -> Result<Built> {
    let folder = workspace::target_dir().join("ptx").join(target.cpu);
    let assembly = folder.join("nvptx64-nvidia-cuda/release/deps/kernels_gpu.s");
    // After a failed build, the file of an earlier build would be read.
    remove_if_there(&assembly)?;
    let mut cargo = workspace::clean_cargo();
    compiler.apply(&mut cargo)?;
    cargo
        .args(["rustc", "--target-dir"])
        .arg(&folder)
        .args(ARGUMENTS)
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

/// The compiler flags of one target. Every path of this machine is mapped to a fixed name.
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

fn write(
    compiler: &Compiler,
    ptxas: Option<String>,
    sources: Sources,
    built: &[Built],
) -> Result<()> {
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
        abi_hash: ABI_HASH,
        compiler: compiler.version.clone(),
        flags: FLAGS.map(ToOwned::to_owned).to_vec(),
        cargo: recipe::cargo(),
        ptxas,
        source_hash: sources.hash(),
        sources,
        targets,
    }
    .write()
}
