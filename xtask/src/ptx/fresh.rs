//! Reports why the committed PTX does not match the sources. It compiles nothing: it compares hashes, and lints.

use std::fs;

use anyhow::{Result, bail};
use kernels_gpu::table::ABI_HASH;

use super::lint;
use super::manifest::{Manifest, TargetRecord};
use super::module::Module;
use super::recipe::{self, FLAGS, TARGETS};
use super::sources::{self, Sources};
use crate::workspace;

/// Checks that the committed PTX matches the sources; compiles nothing.
///
/// # Errors
/// It is stale or broken; the error says why, and which command to run.
pub fn check() -> Result<()> {
    let reasons = stale_reasons()?;
    if reasons.is_empty() {
        println!("host/ptx/ is up to date");
        return Ok(());
    }
    bail!("host/ptx/ is stale; run `cargo xtask build-ptx`:\n- {}", reasons.join("\n- "))
}

/// Why `host/ptx/` is stale or broken, one reason per line; empty if it is neither.
///
/// # Errors
/// The manifest or a source cannot be read.
pub fn stale_reasons() -> Result<Vec<String>> {
    let manifest = Manifest::read()?;
    let mut reasons = recipe_changes(&manifest, &Sources::read()?);
    for record in &manifest.targets {
        reasons.extend(file_faults(record, record.read_ptx()));
    }
    reasons.extend(unlisted_files(&manifest)?);
    Ok(reasons)
}

/// Changes of the recipe since `manifest` was written.
fn recipe_changes(manifest: &Manifest, now: &Sources) -> Vec<String> {
    let mut reasons = now.changes_since(&manifest.sources);
    if reasons.is_empty() && now.hash() != manifest.source_hash {
        reasons.push("the manifest's source hash is not that of the sources it lists".to_owned());
    }
    if manifest.abi_hash != ABI_HASH {
        let found = manifest.abi_hash;
        reasons.push(format!("the hash of the ABI was {found:016x} and is {ABI_HASH:016x}"));
    }
    if manifest.flags != FLAGS {
        reasons.push(format!("the compiler flags were {:?} and are {FLAGS:?}", manifest.flags));
    }
    let cargo = recipe::cargo();
    if manifest.cargo != cargo {
        reasons.push(format!("cargo was called with {:?} and is with {cargo:?}", manifest.cargo));
    }
    if manifest.ptxas.is_none() {
        let remedy = "build it where a CUDA toolkit has `ptxas`, or where pip can fetch it";
        reasons.push(format!("no ptxas has assembled the PTX: {remedy}"));
    }
    let recorded: Vec<&str> = manifest.targets.iter().map(|record| record.cpu.as_str()).collect();
    let targets = TARGETS.map(|target| target.cpu);
    if recorded != targets {
        reasons.push(format!("the targets were {recorded:?} and are {targets:?}"));
    }
    reasons
}

/// The faults of a PTX file: it is missing, was edited, or breaks a rule.
fn file_faults(record: &TargetRecord, ptx: Result<String>) -> Vec<String> {
    let ptx = match ptx {
        Ok(ptx) => ptx,
        Err(error) => return vec![format!("{error:#}")],
    };
    let mut reasons = Vec::new();
    if sources::sha256(ptx.as_bytes()) != record.sha256 {
        reasons.push(format!("{} is not the file that was built", record.file));
    }
    let faults = lint::committed_faults(&Module::parse(&ptx), record);
    reasons.extend(faults.iter().map(|fault| format!("{}: {fault}", record.file)));
    reasons
}

/// PTX files in the folder that belong to no target, left over from a removed target.
fn unlisted_files(manifest: &Manifest) -> Result<Vec<String>> {
    let mut reasons = Vec::new();
    for entry in fs::read_dir(workspace::ptx_dir())? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let listed = manifest.targets.iter().any(|record| record.file == name);
        if (name.ends_with(".ptx") || name.ends_with(".ptx.zst")) && !listed {
            reasons.push(format!("{name} belongs to no target; delete it"));
        }
    }
    Ok(reasons)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use dsv4_kv_device_compiler::Version;

    fn manifest() -> Manifest {
        let sources = Sources {
            files: BTreeMap::from([("a.rs".to_owned(), "1".to_owned())]),
            packages: vec!["half 2.7.1".to_owned()],
            editions: vec!["simt 2024".to_owned()],
        };
        Manifest {
            abi_hash: ABI_HASH,
            compiler: Version { rustc: "rustc 1.96.0".to_owned(), llvm: "22".to_owned() },
            flags: FLAGS.map(ToOwned::to_owned).to_vec(),
            cargo: recipe::cargo(),
            ptxas: Some("release 13.5".to_owned()),
            source_hash: sources.hash(),
            sources,
            targets: TARGETS.map(|target| TargetRecord::new(target.cpu, &target.file(), "")).into(),
        }
    }

    fn changed(change: impl Fn(&mut Manifest)) -> String {
        let sources = manifest().sources;
        let mut manifest = manifest();
        change(&mut manifest);
        recipe_changes(&manifest, &sources).join("\n")
    }

    #[test]
    fn each_change_of_the_recipe_is_seen() {
        assert_eq!(changed(|_| {}), "");
        assert!(changed(|manifest| manifest.abi_hash ^= 1).contains("ABI"));
        assert!(changed(|manifest| manifest.flags.truncate(1)).contains("flags"));
        let level = |manifest: &mut Manifest| {
            let level = manifest.cargo.iter_mut().find(|of| of.contains("OPT_LEVEL="));
            *level.expect("the profile has one") = "CARGO_PROFILE_RELEASE_OPT_LEVEL=2".to_owned();
        };
        assert!(changed(level).contains("OPT_LEVEL=2"));
        assert!(changed(|manifest| drop(manifest.cargo.pop())).contains("--emit=asm"));
        assert!(changed(|manifest| manifest.ptxas = None).contains("ptxas"));
        assert!(changed(|manifest| manifest.targets.truncate(1)).contains("targets"));
        assert!(changed(|manifest| manifest.source_hash.clear()).contains("source hash"));
        assert!(changed(|manifest| manifest.sources.files.clear()).contains("a.rs is new"));
    }

    #[test]
    fn an_edited_and_a_missing_file_are_seen() {
        let record = TargetRecord::new("sm_90", "sm_90.ptx", "");
        let edited = file_faults(&record, Ok("// edited".to_owned()));
        assert!(edited.iter().any(|fault| fault.contains("not the file")), "{edited:?}");
        let missing = file_faults(&record, Err(anyhow::anyhow!("gone")));
        assert_eq!(missing, ["gone"]);
    }

    #[test]
    fn the_committed_ptx_is_up_to_date() {
        let reasons = stale_reasons().expect("host/ptx and the sources are readable");
        assert!(reasons.is_empty(), "run `cargo xtask build-ptx`:\n{}", reasons.join("\n"));
    }
}
