//! The manifest `host/ptx/manifest.json`: the sources of the committed PTX, and its contents.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::compressed;
use super::module::{Counts, Module};
use super::sources::{self, Sources};
use crate::workspace;
use dsv4_kv_device_compiler::Version;

const FILE: &str = "manifest.json";

/// The manifest.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`kernels_gpu::table::ABI_HASH`] of the build.
    pub abi_hash: u64,
    /// The compiler that made the PTX.
    pub compiler: Version,
    /// Its flags, without those that depend on the machine.
    pub flags: Vec<String>,
    /// The release profile, as environment variables, and cargo's arguments, without those that depend on the machine.
    pub cargo: Vec<String>,
    /// The version of the `ptxas` that assembled the PTX of all targets. `None`: none was found.
    pub ptxas: Option<String>,
    /// One hash over [`Manifest::sources`].
    pub source_hash: String,
    /// Hashes of the source files; versions and features of the packages; editions.
    pub sources: Sources,
    /// One PTX file per target.
    pub targets: Vec<TargetRecord>,
}

/// One PTX file.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetRecord {
    /// The target, as in `sm_90`.
    pub cpu: String,
    /// The file's name in `host/ptx/`.
    pub file: String,
    /// SHA-256 of the uncompressed PTX text, in hex.
    pub sha256: String,
    /// PTX ISA version.
    pub ptx_version: String,
    /// The number of recorded instructions of each entry.
    pub entries: BTreeMap<String, Counts>,
}

impl TargetRecord {
    /// The record of `ptx`, built for `cpu` and stored as `file`.
    pub fn new(cpu: &str, file: &str, ptx: &str) -> Self {
        let module = Module::parse(ptx);
        Self {
            cpu: cpu.to_owned(),
            file: file.to_owned(),
            sha256: sources::sha256(ptx.as_bytes()),
            ptx_version: module.version,
            entries: module.entries.into_iter().map(|entry| (entry.name, entry.counts)).collect(),
        }
    }

    /// Reads and decompresses the PTX text from `host/ptx/`.
    ///
    /// # Errors
    /// The file is missing or damaged.
    pub fn read_ptx(&self) -> Result<String> {
        let path = workspace::ptx_dir().join(&self.file);
        let bytes = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        compressed::decompress(&bytes)
            .with_context(|| format!("{} is damaged; run `cargo xtask build-ptx`", path.display()))
    }
}

impl Manifest {
    /// The committed manifest.
    ///
    /// # Errors
    /// It is missing, or is not a manifest.
    pub fn read() -> Result<Self> {
        let path = workspace::ptx_dir().join(FILE);
        let text = fs::read_to_string(&path).with_context(|| {
            format!("cannot read {}; run `cargo xtask build-ptx`", path.display())
        })?;
        serde_json::from_str(&text).with_context(|| {
            format!("{} is no manifest; run `cargo xtask build-ptx`", path.display())
        })
    }

    /// Writes the manifest to `host/ptx/`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self) -> Result<()> {
        let path = workspace::ptx_dir().join(FILE);
        let text = serde_json::to_string_pretty(self)? + "\n";
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }
}
