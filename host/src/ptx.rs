//! The kernels as PTX, embedded compressed, and the choice among them.

use std::error::Error;
use std::io::Read;

use ruzstd::decoding::StreamingDecoder;
use serde::Deserialize;

use crate::device::DeviceError;

/// One compiled module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PtxModule {
    /// Compute capability it is for, as in `sm_90`.
    pub sm: u32,
    /// Whether it runs on that capability alone, as `sm_90a` does; else it runs on newer ones too
    /// (PTX ISA 11.1.2 `.target`).
    pub only: bool,
    /// The PTX, compressed with Zstandard; see [`PtxModule::text`].
    pub compressed: &'static [u8],
}

/// The embedded modules, least compute capability first.
pub const MODULES: [PtxModule; 3] = [
    PtxModule { sm: 90, only: true, compressed: include_bytes!("../ptx/sm_90a.ptx.zst") },
    PtxModule { sm: 100, only: false, compressed: include_bytes!("../ptx/sm_100.ptx.zst") },
    PtxModule { sm: 100, only: true, compressed: include_bytes!("../ptx/sm_100a.ptx.zst") },
];

const MANIFEST: &str = include_str!("../ptx/manifest.json");

/// The part of the PTX manifest that matters at run time.
#[derive(Deserialize)]
struct Manifest {
    abi_hash: u64,
}

/// Checks that a manifest is of modules for this kernel table.
///
/// # Errors
/// [`DeviceError::Manifest`] if it is no manifest; [`DeviceError::AbiHash`] if it is of another table.
pub fn check_manifest(json: &str) -> Result<(), DeviceError> {
    let Manifest { abi_hash: found } =
        serde_json::from_str(json).map_err(|error| DeviceError::Manifest(error.to_string()))?;
    let expected = kernels_gpu::table::ABI_HASH;
    if found == expected { Ok(()) } else { Err(DeviceError::AbiHash { found, expected }) }
}

/// The most specific module that runs on compute capability `sm` of the GPU called `name`.
///
/// # Errors
/// [`DeviceError::TooOld`] below the oldest module, [`DeviceError::AbiHash`] if the modules were
/// built for another kernel table.
pub fn select(name: &str, sm: u32) -> Result<PtxModule, DeviceError> {
    check_manifest(MANIFEST)?;
    let fits = MODULES.iter().rev().find(|module| match module.only {
        true => module.sm == sm,
        false => module.sm <= sm,
    });
    fits.copied().ok_or_else(|| DeviceError::TooOld {
        name: name.to_owned(),
        sm,
        least: MODULES[0].sm,
    })
}

impl PtxModule {
    /// The PTX: about 10 MB of text, decompressed at every call, in some 50 ms.
    ///
    /// # Errors
    /// [`DeviceError::DamagedPtx`] if the embedded bytes are no compressed text.
    pub fn text(&self) -> Result<String, DeviceError> {
        let damaged = |error: &dyn Error| DeviceError::DamagedPtx(error.to_string());
        let mut decoder =
            StreamingDecoder::new(self.compressed).map_err(|error| damaged(&error))?;
        let mut text = String::new();
        decoder.read_to_string(&mut text).map_err(|error| damaged(&error))?;
        Ok(text)
    }
}

/// The PTX ISA version of a module, as (major, minor); from its `.version` directive.
fn isa(ptx: &str) -> Option<(u32, u32)> {
    let line = ptx.lines().find_map(|line| line.trim().strip_prefix(".version"))?;
    let (major, minor) = line.trim().split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Checks that a driver understands a module, given as text. `version` is that of
/// `cuDriverGetVersion`: 12080 is CUDA 12.8.
///
/// # Errors
/// [`DeviceError::PtxTooNew`] names both versions.
pub fn check_driver(ptx: &str, version: i32) -> Result<(), DeviceError> {
    let driver = (version as u32 / 1000, version as u32 % 1000 / 10);
    let Some((isa, needed)) = isa(ptx).map(|isa| (isa, cuda_version_of_isa(isa))) else {
        return Ok(());
    };
    if driver >= needed {
        return Ok(());
    }
    let text = |(major, minor)| format!("{major}.{minor}");
    Err(DeviceError::PtxTooNew { ptx: text(isa), needed: text(needed), driver: text(driver) })
}

/// The CUDA version, as (major, minor), whose driver first understood a PTX ISA version.
/// Source: PTX ISA, "Release notes": 7.x came with CUDA 11.x, 8.x with 12.x (one off from 8.6 on,
/// as CUDA 12.6 brought none), 9.x with 13.x.
const fn cuda_version_of_isa((major, minor): (u32, u32)) -> (u32, u32) {
    let skipped = major == 8 && minor >= 6;
    (major + 4, minor + skipped as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Modules that were built for another kernel table are refused, and so is a manifest that does not name its table.
    #[test]
    fn a_manifest_is_of_this_kernel_table() {
        let expected = kernels_gpu::table::ABI_HASH;
        let manifest = |hash: u64| format!("{{\"abi_hash\": {hash}}}");
        check_manifest(MANIFEST).unwrap();
        check_manifest(&manifest(expected)).unwrap();
        for hash in [0, expected ^ 1, u64::MAX] {
            let error = check_manifest(&manifest(hash)).unwrap_err();
            let DeviceError::AbiHash { found, expected: needed } = error else { panic!("{error}") };
            assert_eq!((found, needed), (hash, expected));
        }
        for none in ["", "{}", "{\"abi_hash\": \"0\"}", "{\"abi_hash\": -1}"] {
            let error = check_manifest(none).unwrap_err();
            assert!(matches!(error, DeviceError::Manifest(_)), "{none}: {error}");
        }
    }

    #[test]
    fn the_most_particular_module_that_fits_is_chosen() {
        let chosen = |name, sm| select(name, sm).map(|module| (module.sm, module.only)).unwrap();
        assert_eq!(chosen("H200", 90), (90, true));
        assert_eq!(chosen("B200", 100), (100, true));
        assert_eq!(chosen("B300", 103), (100, false));
    }

    #[test]
    fn an_older_gpu_is_named_in_the_error() {
        let error = select("NVIDIA L40", 89).unwrap_err().to_string();
        assert!(error.contains("NVIDIA L40 is sm_89") && error.contains("sm_90"), "{error}");
    }

    #[test]
    fn a_driver_older_than_the_ptx_is_refused() {
        let [sm_90a, sm_100, _] = MODULES.map(|module| module.text().unwrap());
        check_driver(&sm_90a, 12000).unwrap();
        check_driver(&sm_100, 13000).unwrap();
        let error = check_driver(&sm_100, 12040).unwrap_err().to_string();
        assert!(error.contains("this driver is for CUDA 12.4"), "{error}");
    }

    #[test]
    fn damaged_ptx_is_an_error() {
        let half = &MODULES[0].compressed[..MODULES[0].compressed.len() / 2];
        for compressed in [half, b"", b".version 8.0"] {
            let error = PtxModule { compressed, ..MODULES[0] }.text().unwrap_err();
            assert!(matches!(error, DeviceError::DamagedPtx(_)), "{error}");
        }
    }

    #[test]
    fn every_module_says_what_driver_it_needs() {
        for module in MODULES {
            let isa = isa(&module.text().unwrap()).expect("a .version directive");
            assert!(cuda_version_of_isa(isa) >= (12, 0));
        }
        assert_eq!(cuda_version_of_isa((7, 8)), (11, 8));
        assert_eq!(cuda_version_of_isa((8, 5)), (12, 5));
        assert_eq!(cuda_version_of_isa((8, 6)), (12, 7));
        assert_eq!(cuda_version_of_isa((9, 0)), (13, 0));
    }
}
