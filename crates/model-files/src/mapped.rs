//! A memory-mapped file.

use std::fs::File;
use std::path::Path;

use memmap2::Mmap;

use crate::error::ModelFileError;

/// A file whose bytes are read from disk when they are accessed.
pub(crate) struct Mapped(Mmap);

impl Mapped {
    /// Maps the file. The file must not be changed or truncated while it is mapped. No program can check this; every
    /// program that maps weights relies on it.
    pub(crate) fn open(path: &Path) -> Result<Self, ModelFileError> {
        let failed = |source| ModelFileError::File { path: path.into(), source };
        let file = File::open(path).map_err(failed)?;
        // SAFETY: the map is read-only and private to this crate, which copies out of it and keeps no
        // reference. What `Mmap::map` asks for besides, that no other process changes the file, is the
        // documented duty of whoever runs the program: checkpoints are not changed in place.
        let map = unsafe { Mmap::map(&file) }.map_err(failed)?;
        Ok(Self(map))
    }

    /// All bytes of the file.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}
