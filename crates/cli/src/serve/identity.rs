//! What tells the bytes in a server's cache from those of others.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use dsv4_kv_model::engine::AttentionPlace;
use sha2::{Digest, Sha256};

use crate::error::InputError;

/// Bytes that are read at once.
const CHUNK: usize = 1 << 20;

/// A digest of a checkpoint's configuration and weights, with where attention runs, the device, and this program's version:
/// each of them makes other bits.
pub(super) fn of(
    folder: &Path,
    place: AttentionPlace,
    device: &str,
) -> Result<Vec<u8>, InputError> {
    let failed = |error: io::Error| {
        InputError::Serve(format!("{}: {error}; --cold-cache reads all of it", folder.display()))
    };
    let weights = digest(folder).map_err(failed)?;
    let version = env!("CARGO_PKG_VERSION");
    let others = format!("{place:?}\n{device}\n{version}").into_bytes();
    Ok([weights, others].concat())
}

/// The digest of the files, in the order of their names, each with its name and length.
fn digest(folder: &Path) -> io::Result<Vec<u8>> {
    let mut files: Vec<PathBuf> = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let is_of_model = path.extension().is_some_and(|extension| extension == "safetensors")
            || path.file_name().is_some_and(|name| name == "config.json");
        files.extend(Some(path).filter(|_| is_of_model));
    }
    files.sort();
    let (mut digest, mut chunk) = (Sha256::new(), vec![0; CHUNK]);
    for path in files {
        let mut file = File::open(&path)?;
        let name = path.file_name().unwrap_or_default().as_encoded_bytes();
        for bytes in [&(name.len() as u64).to_le_bytes(), name] {
            digest.update(bytes);
        }
        digest.update(file.metadata()?.len().to_le_bytes());
        loop {
            match file.read(&mut chunk)? {
                0 => break,
                read => digest.update(&chunk[..read]),
            }
        }
    }
    Ok(digest.finalize().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A bit of the weights, the configuration, a name, the place of attention, and the device: each makes another identity,
    /// and nothing else does.
    #[test]
    fn whatever_makes_other_bytes_makes_another_identity() {
        let (host, device) = (AttentionPlace::Host, AttentionPlace::Device);
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| fs::write(folder.path().join(name), bytes).unwrap();
        write("config.json", b"{}");
        write("model.safetensors", &[1; CHUNK + 1]);
        let identity = |place, device| of(folder.path(), place, device).unwrap();
        let first = identity(host, "a");
        assert_eq!(identity(host, "a"), first);
        write("README.md", b"of no use");
        assert_eq!(identity(host, "a"), first);
        let mut seen = vec![first, identity(device, "a"), identity(host, "b")];
        let mut weights = vec![1; CHUNK + 1];
        weights[CHUNK] = 2;
        write("model.safetensors", &weights);
        seen.push(identity(host, "a"));
        write("config.json", b"[]");
        seen.push(identity(host, "a"));
        fs::rename(folder.path().join("model.safetensors"), folder.path().join("m.safetensors"))
            .unwrap();
        seen.push(identity(host, "a"));
        let all = seen.len();
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), all);
    }
}
