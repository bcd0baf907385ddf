//! The checks, and the advice for each.

use std::env;
use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use bytesize::ByteSize;
use dsv4_kv::device::{CudaOptions, CudaSurvey, DeviceError, DeviceInfo};
use dsv4_kv::ptx;
use dsv4_kv_device_compiler::Compiler;

use super::report::{Finding, State};

/// The variable that names the library of NIXL.
const NIXL: &str = "DSV4_NIXL";
/// The first bytes of an ELF file.
const ELF: &[u8; 4] = b"\x7fELF";

/// Runs all checks.
pub fn all() -> Vec<Finding> {
    let survey = CudaSurvey::of_machine();
    let mut findings = vec![emulator(), driver(&survey)];
    match &survey {
        Ok(survey) if !survey.gpus.is_empty() => {
            let gpus = (0..).zip(&survey.gpus);
            findings.extend(gpus.map(|(ordinal, gpu)| self::gpu(ordinal, gpu, survey.version)));
        }
        _ => findings.push(no_gpu()),
    }
    findings.push(kernels(&survey));
    findings.push(compiler(Compiler::in_use(Path::new(".")), Compiler::of_debian()));
    findings.push(nixl(env::var_os(NIXL).as_deref()));
    findings
}

fn finding(what: &str, needed_for: &'static str, found: impl Into<String>) -> Finding {
    Finding { what: what.into(), state: State::Ok, found: found.into(), needed_for, advice: None }
}

fn emulator() -> Finding {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    finding(
        "emulated device",
        "running the kernels without a GPU: every command but `bench`, slowly",
        format!("{cores} cores"),
    )
}

/// `major.minor` of a version number as the driver reports it.
fn cuda_version(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

fn driver(survey: &Result<CudaSurvey, DeviceError>) -> Finding {
    let finding = |found: String| finding("CUDA driver", "running on a GPU", found);
    match survey {
        Ok(CudaSurvey { driver, version, .. }) => {
            finding(format!("for CUDA {}, {}", cuda_version(*version), driver.display()))
        }
        Err(error @ DeviceError::NoCuda) => Finding {
            state: State::Missing,
            advice: Some(
                "for a GPU, run `cargo kv doctor`, which builds it with CUDA, or build it with default features"
                    .into(),
            ),
            ..finding(error.to_string())
        },
        #[cfg(feature = "cuda")]
        Err(error @ DeviceError::NoDriver(_)) => Finding {
            state: State::Missing,
            advice: Some(
                "for a GPU, install NVIDIA's driver for CUDA 12.7 or newer (12.0 for H100, H200)"
                    .into(),
            ),
            ..finding(error.to_string())
        },
        Err(error) => Finding {
            state: State::Broken,
            advice: Some("see what `nvidia-smi` says".into()),
            ..finding(error.to_string())
        },
    }
}

fn no_gpu() -> Finding {
    Finding {
        state: State::Missing,
        advice: Some("use an H100, H200 or B200, or stay on the CPU".into()),
        ..finding("GPU", "speed, and `bench`", "none")
    }
}

/// A GPU, and the embedded PTX module that is used on it.
fn gpu(ordinal: u32, gpu: &DeviceInfo, driver: i32) -> Finding {
    let DeviceInfo { name, sm, total_memory } = gpu;
    let memory = ByteSize(*total_memory);
    let sm = sm.unwrap_or(0);
    let finding = |found: String| finding(&format!("GPU {ordinal}"), "speed, and `bench`", found);
    let module = ptx::select(name, sm);
    let checked =
        module.and_then(|module| ptx::check_driver(&module.text()?, driver).map(|()| module));
    match checked {
        Ok(module) => {
            let only = if module.only { "a" } else { "" };
            finding(format!("{name}, sm_{sm}, {memory}: PTX of sm_{}{only}", module.sm))
        }
        Err(error) => Finding {
            state: State::Broken,
            advice: Some(
                match error {
                    DeviceError::PtxTooNew { .. } => "install a newer driver",
                    DeviceError::TooOld { .. } => "use an H100, H200 or B200, or `--device cpu`",
                    _ => "rebuild the PTX with `cargo xtask build-ptx`",
                }
                .into(),
            ),
            ..finding(format!("{name}, sm_{sm}, {memory}: {error}"))
        },
    }
}

/// Whether the driver accepts the kernels: it compiles them for the first GPU.
fn kernels(survey: &Result<CudaSurvey, DeviceError>) -> Finding {
    let modules = ptx::MODULES
        .map(|module| format!("sm_{}{}", module.sm, if module.only { "a" } else { "" }));
    let finding = |found: String| finding("kernels", "running on a GPU", found);
    let embedded = format!("PTX of {} is embedded", modules.join(", "));
    if !survey.as_ref().is_ok_and(|survey| !survey.gpus.is_empty()) {
        return finding(embedded);
    }
    match dsv4_kv::open_cuda(CudaOptions::default()) {
        Ok(_) => finding(format!("{embedded}, loaded on GPU 0")),
        Err(error) => Finding {
            state: State::Broken,
            advice: Some("see GPU 0 above; with `--device cpu` the kernels run on the CPU".into()),
            ..finding(error.to_string())
        },
    }
}

/// A compiler for the kernels: the one in use, or Debian's.
fn compiler(in_use: anyhow::Result<Compiler>, debian: anyhow::Result<Compiler>) -> Finding {
    let finding = |found: String| {
        finding("device compiler", "changing a kernel: the PTX is committed", found)
    };
    match in_use.or_else(|refused| debian.map_err(|_| refused)) {
        Ok(compiler) => {
            let version = &compiler.version;
            finding(format!(
                "{}, LLVM {}, {}",
                version.rustc,
                version.llvm,
                compiler.rustc.display()
            ))
        }
        Err(refused) => Finding {
            state: State::Missing,
            advice: Some(
                "`cargo xtask build-ptx` fetches one on Debian; or rustc 1.96 with rust-src".into(),
            ),
            ..finding(format!("{refused:#}"))
        },
    }
}

/// The library that [`NIXL`] names. It is not loaded, since loading starts threads.
fn nixl(named: Option<&OsStr>) -> Finding {
    let finding = |found: String| finding("NIXL", "moving blocks to other machines", found);
    let Some(path) = named.map(Path::new) else {
        return Finding {
            state: State::Missing,
            advice: Some(format!(
                "to move blocks, set {NIXL} to the path of libnixl_capi.so, as the PyPI package nixl-cu12 has it"
            )),
            ..finding(format!("{NIXL} is not set"))
        };
    };
    let mut magic = [0; 4];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut magic));
    let refused = match read {
        Ok(()) if magic == *ELF => return finding(path.display().to_string()),
        Ok(()) => "it is no ELF file".to_owned(),
        Err(error) => error.to_string(),
    };
    Finding {
        state: State::Broken,
        advice: Some(format!("set {NIXL} to the path of libnixl_capi.so, or unset it")),
        ..finding(format!("{NIXL}={}: {refused}", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn info(name: &str, sm: u32) -> DeviceInfo {
        DeviceInfo { name: name.into(), sm: Some(sm), total_memory: 80 << 30 }
    }

    #[test]
    fn a_gpu_has_its_ptx_or_the_reason_why_not() {
        let found = gpu(0, &info("NVIDIA H100", 90), 12_080);
        assert_eq!(found.state, State::Ok);
        assert!(found.found.ends_with("PTX of sm_90a"), "{found:?}");
        for (of, driver, advice) in [
            (info("NVIDIA L40", 89), 13_000, "use an H100"),
            (info("NVIDIA H100", 90), 11_080, "install a newer driver"),
        ] {
            let found = gpu(1, &of, driver);
            assert_eq!(found.state, State::Broken, "{found:?}");
            assert!(found.advice.is_some_and(|text| text.contains(advice)));
        }
    }

    #[test]
    fn a_driver_is_told_with_its_version_and_what_is_missing_with_what_to_do() {
        let survey = CudaSurvey {
            driver: PathBuf::from("/lib/libcuda.so.1"),
            version: 12_080,
            gpus: vec![],
        };
        let found = driver(&Ok(survey));
        assert_eq!(
            (found.state, &found.found[..]),
            (State::Ok, "for CUDA 12.8, /lib/libcuda.so.1")
        );
        let found = compiler(Err(anyhow::anyhow!("too old")), Err(anyhow::anyhow!("not there")));
        assert_eq!((found.state, &found.found[..]), (State::Missing, "too old"));
    }

    #[test]
    fn a_library_of_nixl_is_there_missing_or_broken() {
        assert_eq!(nixl(None).state, State::Missing);
        let program = std::env::current_exe().expect("Linux tells");
        assert_eq!(nixl(Some(program.as_os_str())).state, State::Ok);
        let text = tempfile::NamedTempFile::new().expect("a temporary file");
        for path in [text.path(), Path::new("no/such/libnixl_capi.so"), Path::new("/")] {
            let found = nixl(Some(path.as_os_str()));
            assert_eq!(found.state, State::Broken, "{found:?}");
            assert!(found.found.contains(&path.display().to_string()), "{found:?}");
        }
    }
}
