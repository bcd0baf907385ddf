//! The identity of the bytes in a server's cache: a digest that differs if anything could change these bytes.

use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use dsv4_kv_model::engine::AttentionPlace;
use dsv4_kv_model_files::ModelFiles;
use sha2::{Digest, Sha256};

use crate::error::InputError;

/// Bytes that are read at once.
const CHUNK: usize = 1 << 20;

/// Number of arguments at which the mathematical functions are evaluated.
const FUNCTION_VALUES: u32 = 4096;

/// The files of a model, recorded before its weights are read.
pub(super) struct Files {
    folder: PathBuf,
    files: Vec<Stamp>,
}

/// A file, and the properties that change when it is replaced.
#[derive(PartialEq, Eq)]
struct Stamp {
    path: PathBuf,
    length: u64,
    modified: SystemTime,
    inode: u64,
}

impl Files {
    /// The files that are in `folder` now.
    pub fn of(folder: &Path) -> Result<Self, InputError> {
        let files = ModelFiles::files(folder)
            .map_err(|error| InputError::Serve(format!("--cold-cache: {error}")))?;
        let files = files.into_iter().map(|path| {
            let stamp = path.metadata().and_then(|data| {
                let (length, modified) = (data.len(), data.modified()?);
                Ok(Stamp { path: path.clone(), length, modified, inode: inode(&data) })
            });
            stamp.map_err(|error| failed(&path, &error))
        });
        Ok(Self { folder: folder.into(), files: files.collect::<Result<_, _>>()? })
    }

    /// A digest of the files. Fails if a file was replaced since it was recorded: weights that were read in between may
    /// be from either file.
    pub fn digest(&self) -> Result<Sha256, InputError> {
        let mut digest = Sha256::new();
        for Stamp { path, .. } in &self.files {
            let name = path.file_name().unwrap_or_default().as_encoded_bytes();
            digest.update((name.len() as u64).to_le_bytes());
            digest.update(name);
            add(&mut digest, path).map_err(|error| failed(path, &error))?;
        }
        if Self::of(&self.folder)?.files == self.files {
            return Ok(digest);
        }
        let folder = self.folder.display();
        Err(InputError::Serve(format!(
            "files of {folder} have changed while they were read; start again"
        )))
    }
}

#[cfg(unix)]
fn inode(data: &Metadata) -> u64 {
    std::os::unix::fs::MetadataExt::ino(data)
}

#[cfg(not(unix))]
fn inode(_: &Metadata) -> u64 {
    0
}

/// The digest of the model's files combined with this program, the place of attention, the device, the processor and the
/// mathematical functions of the system. Each of them can change bits of the results.
pub(super) fn of(
    files_digest: &Sha256,
    place: AttentionPlace,
    device: &str,
) -> Result<Vec<u8>, InputError> {
    let mut digest = files_digest.clone();
    // The running executable, even if the file at its path was renamed or replaced.
    let program = if cfg!(target_os = "linux") {
        Ok(PathBuf::from("/proc/self/exe"))
    } else {
        std::env::current_exe()
    };
    let added = program.and_then(|path| add(&mut digest, &path));
    added.map_err(|error| failed(Path::new("this program"), &error))?;
    // These functions are those of a system library, which may be updated.
    for step in 0..FUNCTION_VALUES {
        let x = (step as f32 - FUNCTION_VALUES as f32 / 2.0) * 0.037;
        let (sin, cos) = x.sin_cos();
        let (wide_sin, wide_cos) = f64::from(x).sin_cos();
        for value in [x.exp(), sin, cos] {
            digest.update(value.to_bits().to_le_bytes());
        }
        let wide = f64::from(x);
        let others = [wide.exp2(), wide.abs().log2(), 10_000_f64.powf(wide / 64.0)];
        for value in [wide.exp(), wide.abs().ln(), wide_sin, wide_cos].into_iter().chain(others) {
            digest.update(value.to_bits().to_le_bytes());
        }
    }
    let others = format!("{place:?}\n{device}\n{}", processor());
    Ok([&digest.finalize()[..], others.as_bytes()].concat())
}

fn failed(path: &Path, error: &io::Error) -> InputError {
    InputError::Serve(format!("{}: {error}; --cold-cache reads all of it", path.display()))
}

/// Adds a file and its length.
fn add(digest: &mut Sha256, path: &Path) -> io::Result<()> {
    let (mut file, mut chunk) = (File::open(path)?, vec![0; CHUNK]);
    digest.update(file.metadata()?.len().to_le_bytes());
    loop {
        match file.read(&mut chunk)? {
            0 => return Ok(()),
            read => digest.update(&chunk[..read]),
        }
    }
}

/// The architecture, and the instruction sets by which `matrixmultiply` selects its kernels. The kernels round
/// differently.
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

    /// A bit of the weights, the configuration, a file name, the index, a shard of any name, the place of attention,
    /// and the device: each changes the identity, and nothing else does.
    #[test]
    fn whatever_makes_other_bytes_makes_another_identity() {
        let (host, device) = (AttentionPlace::Host, AttentionPlace::Device);
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let write = |name: &str, bytes: &[u8]| fs::write(path(name), bytes).unwrap();
        write("config.json", b"{}");
        write("model.safetensors", &[1; CHUNK + 1]);
        let identity = |place, device| {
            let files = Files::of(folder.path()).unwrap();
            of(&files.digest().unwrap(), place, device).unwrap()
        };
        let first = identity(host, "a");
        assert_eq!(identity(host, "a"), first);
        write("README.md", b"of no use");
        write("other.safetensors", b"which no index lists");
        write("generation_config.json", b"{}");
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
        // The same two files, with an index that names the other one.
        write("model.safetensors.index.json", index("other.safetensors").as_bytes());
        seen.push(identity(host, "a"));
        // The same two shards, with an index that exchanges their tensors.
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

    /// Files that change while weights are read give no identity: the weights may be from the old files, the new ones,
    /// or both.
    #[test]
    fn files_that_change_meanwhile_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("config.json"), b"{}").unwrap();
        fs::write(path("model.safetensors"), [1; 8]).unwrap();
        let files = Files::of(folder.path()).unwrap();
        files.digest().map(drop).unwrap();
        // A file of the same length and modification time.
        let modified = path("model.safetensors").metadata().unwrap().modified().unwrap();
        fs::write(path("new"), [2; 8]).unwrap();
        File::options().write(true).open(path("new")).unwrap().set_modified(modified).unwrap();
        fs::rename(path("new"), path("model.safetensors")).unwrap();
        let refused = files.digest().map(drop).unwrap_err().to_string();
        assert!(refused.contains("have changed while they were read"), "{refused}");
    }
}
