//! A file in memory.

use std::fs::File;
use std::path::Path;

use memmap2::Mmap;

use crate::error::CheckpointError;

/// A file whose bytes are read from disk when they are touched.
pub(crate) struct Mapped(Mmap);

impl Mapped {
    /// Maps the file. Nobody may change or cut it while it is mapped: the contract of every program that
    /// maps weights, which no program can check.
    pub(crate) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let failed = |source| CheckpointError::File { path: path.into(), source };
        let file = File::open(path).map_err(failed)?;
        // SAFETY: the map is read-only and private to this crate, which copies out of it and keeps no
        // reference. What `Mmap::map` asks for besides, that no other process changes the file, is the
        // documented duty of whoever runs the program: checkpoints are not changed in place.
        let map = unsafe { Mmap::map(&file) }.map_err(failed)?;
        Ok(Self(map))
    }

    /// All of it.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}
