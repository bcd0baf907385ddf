//! NVIDIA's PTX assembler: finds it, and reads what it reports about registers and memory.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use comfy_table::Table;
use comfy_table::presets::ASCII_MARKDOWN;
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};

use super::recipe::{Built, TARGETS};
use crate::{process, workspace};

/// The PyPI wheel that holds `ptxas`.
const WHEEL: &str = "nvidia-cuda-nvcc==13.5.37";

/// The report of `ptxas -v` on one entry.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// The entry.
    pub entry: String,
    /// Registers per thread.
    pub registers: u32,
    /// Bytes spilled to local memory, and bytes loaded back from it.
    pub spills: (u32, u32),
    /// Bytes of local memory per thread.
    pub stack: u32,
    /// Bytes of static shared memory per block.
    pub shared: u32,
}

/// A `ptxas` that supports every target: from the PATH, a CUDA toolkit, or the wheel, which is fetched if it is
/// missing.
///
/// # Errors
/// There is none, and the wheel cannot be fetched.
pub fn find_or_fetch() -> Result<PathBuf> {
    let installed = candidates().into_iter().find(|path| knows_the_targets(path));
    installed.map_or_else(fetch, Ok)
}

/// Whether it runs and is new enough: before CUDA 12.8 it does not support `sm_100`.
fn knows_the_targets(ptxas: &Path) -> bool {
    let Ok(output) = Command::new(ptxas).arg("--help").output() else { return false };
    let help = String::from_utf8_lossy(&output.stdout);
    TARGETS.iter().all(|target| help.contains(&format!("'{}'", target.cpu)))
}

fn candidates() -> Vec<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env::var_os);
    env::split_paths(&path)
        .chain(toolkits.map(|toolkit| PathBuf::from(toolkit).join("bin")))
        .chain([PathBuf::from("/usr/local/cuda/bin"), wheel_folder().join("nvidia/cu13/bin")])
        .map(|folder| folder.join("ptxas"))
        .collect()
}

fn wheel_folder() -> PathBuf {
    workspace::target_dir().join("ptxas")
}

fn fetch() -> Result<PathBuf> {
    let folder = wheel_folder();
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--no-deps", "--only-binary=:all:", "--upgrade", "--target"]);
    process::run("fetching ptxas (47 MB)", pip.arg(&folder).arg(WHEEL)).context(
        "no ptxas on the PATH or in a CUDA toolkit knows the targets, and PyPI gave none",
    )?;
    let ptxas = folder.join("nvidia/cu13/bin/ptxas");
    ensure!(ptxas.is_file(), "{WHEEL} holds no {}", ptxas.display());
    Ok(ptxas)
}

/// The release that a `ptxas` names, as in `release 13.0, V13.0.88`.
///
/// # Errors
/// It does not run, or names none.
pub fn version(ptxas: &Path) -> Result<String> {
    let text = process::run("asking for a version", Command::new(ptxas).arg("--version"))?;
    let release = text.lines().find_map(|line| line.find("release").map(|at| &line[at..]));
    Ok(release.with_context(|| format!("{} names no release", ptxas.display()))?.to_owned())
}

/// Assembles each module for its target, and prints the resources of every entry.
///
/// # Errors
/// `ptxas` refuses a module; the error contains its output.
pub fn report(ptxas: &Path, built: &[Built]) -> Result<()> {
    let mut table = Table::new();
    table.load_preset(ASCII_MARKDOWN);
    table.set_header(["target", "entry", "registers", "spill st/ld B", "stack B", "shared B"]);
    let usages = built.par_iter().map(|Built { target, ptx }| assemble(ptxas, target.cpu, ptx));
    let usages: Vec<Vec<Usage>> = usages.collect::<Result<_>>()?;
    for (Built { target, .. }, usages) in built.iter().zip(usages) {
        for usage in usages {
            table.add_row([
                target.cpu.to_owned(),
                usage.entry,
                usage.registers.to_string(),
                format!("{}/{}", usage.spills.0, usage.spills.1),
                usage.stack.to_string(),
                usage.shared.to_string(),
            ]);
        }
    }
    println!("assembled by {}\n{table}", ptxas.display());
    Ok(())
}

fn assemble(ptxas: &Path, cpu: &str, ptx: &str) -> Result<Vec<Usage>> {
    let folder = workspace::target_dir().join("ptx");
    fs::create_dir_all(&folder)?;
    let file = folder.join(format!("{cpu}.ptx"));
    fs::write(&file, ptx)?;
    let mut command = Command::new(ptxas);
    command.arg(format!("-arch={cpu}")).arg("-v").arg(&file).args(["-o", "/dev/null"]);
    Ok(parse_usage(&process::run(&format!("assembling for {cpu}"), &mut command)?))
}

/// Parses the output of `ptxas -v`.
fn parse_usage(text: &str) -> Vec<Usage> {
    let mut usages: Vec<Usage> = Vec::new();
    for line in text.lines() {
        if let Some((_, after)) = line.split_once("Compiling entry function '") {
            let entry = after.split('\'').next().unwrap_or_default().to_owned();
            usages.push(Usage { entry, ..Usage::default() });
        }
        let Some(usage) = usages.last_mut() else { continue };
        if let Some(stack) = number_before(line, " bytes stack frame") {
            usage.stack = stack;
            usage.spills = (
                number_before(line, " bytes spill stores").unwrap_or_default(),
                number_before(line, " bytes spill loads").unwrap_or_default(),
            );
        }
        if let Some(registers) = number_before(line, " registers") {
            usage.registers = registers;
            usage.shared = number_before(line, " bytes smem").unwrap_or_default();
        }
    }
    usages
}

fn number_before(line: &str, unit: &str) -> Option<u32> {
    line.split(unit)
        .next()
        .filter(|before| before.len() < line.len())?
        .split(' ')
        .next_back()?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_is_read() {
        let text = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'amax' for 'sm_90'
ptxas info    : Function properties for amax
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 14 registers, used 1 barriers, 16 bytes cumulative stack size, 4096 bytes smem
ptxas info    : Compile time = 5.000 ms
ptxas info    : Compiling entry function 'next' for 'sm_90'
ptxas info    : Function properties for next
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
";
        let amax = Usage {
            entry: "amax".to_owned(),
            registers: 14,
            spills: (8, 4),
            stack: 16,
            shared: 4096,
        };
        let next = Usage { entry: "next".to_owned(), registers: 32, ..Usage::default() };
        assert_eq!(parse_usage(text), [amax, next]);
    }
}
