//! What tells the bytes in a server's cache from those of others.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use dsv4_kv_checkpoint::Checkpoint;
use dsv4_kv_model::engine::AttentionPlace;
use sha2::{Digest, Sha256};

use crate::error::InputError;

/// Bytes that are read at once.
const CHUNK: usize = 1 << 20;

/// A digest of all files of a checkpoint and of this program, with where attention runs, the device and the processor: each of
/// them makes other bits.
pub(super) fn of(
    folder: &Path,
    place: AttentionPlace,
    device: &str,
) -> Result<Vec<u8>, InputError> {
    let files = Checkpoint::files(folder)
        .map_err(|error| InputError::Serve(format!("--cold-cache: {error}")))?;
    let mut digest = Sha256::new();
    let mut chunk = vec![0; CHUNK];
    for path in &files {
        let name = path.file_name().unwrap_or_default().as_encoded_bytes();
        digest.update((name.len() as u64).to_le_bytes());
        digest.update(name);
        add(&mut digest, path, &mut chunk).map_err(|error| failed(path, &error))?;
    }
    // The program that runs, whatever its path names by now; under whatever name.
    let program = if cfg!(target_os = "linux") {
        Ok(PathBuf::from("/proc/self/exe"))
    } else {
        std::env::current_exe()
    };
    let added = program.and_then(|path| add(&mut digest, &path, &mut chunk));
    added.map_err(|error| failed(Path::new("this program"), &error))?;
    let others = format!("{place:?}\n{device}\n{}", processor());
    Ok([&digest.finalize()[..], others.as_bytes()].concat())
}

fn failed(path: &Path, error: &io::Error) -> InputError {
    InputError::Serve(format!("{}: {error}; --cold-cache reads all of it", path.display()))
}

/// Adds a file with its length.
fn add(digest: &mut Sha256, path: &Path, chunk: &mut [u8]) -> io::Result<()> {
    let mut file = File::open(path)?;
    digest.update(file.metadata()?.len().to_le_bytes());
    loop {
        match file.read(chunk)? {
            0 => return Ok(()),
            read => digest.update(&chunk[..read]),
        }
    }
}

/// The architecture, and the instructions by whose presence `matrixmultiply` chooses its kernels, which round differently.
fn processor() -> String {
    let arch = std::env::consts::ARCH;
    #[cfg(any(target_arch = "x86", target_arch = "x86_64"))]
    {
        let [fma, avx, avx2, avx512f] = [
            std::is_x86_feature_detected!("fma"),
            std::is_x86_feature_detected!("avx"),
            std::is_x86_feature_detected!("avx2"),
            std::is_x86_feature_detected!("avx512f"),
        ];
        format!("{arch} fma={fma} avx={avx} avx2={avx2} avx512f={avx512f}")
    }
    #[cfg(not(any(target_arch = "x86", target_arch = "x86_64")))]
    arch.to_owned()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// A bit of the weights, the configuration, a name, an index, a shard of any name, the place of attention, and the device: each
    /// makes another identity, and nothing else does.
    #[test]
    fn whatever_makes_other_bytes_makes_another_identity() {
        let (host, device) = (AttentionPlace::Host, AttentionPlace::Device);
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let write = |name: &str, bytes: &[u8]| fs::write(path(name), bytes).unwrap();
        write("config.json", b"{}");
        write("model.safetensors", &[1; CHUNK + 1]);
        let identity = |place, device| of(folder.path(), place, device).unwrap();
        let first = identity(host, "a");
        assert_eq!(identity(host, "a"), first);
        write("README.md", b"of no use");
        write("other.safetensors", b"which no index lists");
        assert_eq!(identity(host, "a"), first);
        let mut seen = vec![first, identity(device, "a"), identity(host, "b")];
        let mut weights = vec![1; CHUNK + 1];
        weights[CHUNK] = 2;
        write("model.safetensors", &weights);
        seen.push(identity(host, "a"));
        write("config.json", b"[]");
        seen.push(identity(host, "a"));
        fs::rename(path("model.safetensors"), path("shard.bin")).unwrap();
        let index = |shard: &str| format!(r#"{{"weight_map": {{"embed.weight": "{shard}"}}}}"#);
        write("model.safetensors.index.json", index("shard.bin").as_bytes());
        seen.push(identity(host, "a"));
        write("shard.bin", &[3; 8]);
        seen.push(identity(host, "a"));
        // The same two files, of which the index takes the other.
        write("model.safetensors.index.json", index("other.safetensors").as_bytes());
        seen.push(identity(host, "a"));
        // The same two shards, which have each other's tensors.
        for [first, second] in
            [["shard.bin", "other.safetensors"], ["other.safetensors", "shard.bin"]]
        {
            let map = format!(r#"{{"weight_map": {{"a": "{first}", "b": "{second}"}}}}"#);
            write("model.safetensors.index.json", map.as_bytes());
            seen.push(identity(host, "a"));
        }
        let all = seen.len();
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), all);
    }
}
