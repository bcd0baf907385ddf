//! A transport through a directory that source and target share.

use std::collections::{HashMap, HashSet};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::directory_lock::{DirectoryLock, remove_stale};
use super::{
    Descriptor, Held, InFlight, NotPosted, Polled, Region, RegionMut, Registered, Transport,
    TransportError,
};

/// A transport through files. Published memory has a file with the bytes that were flushed. The file is removed when
/// the memory is deregistered. A read is complete when `post` returns.
///
/// A process that is killed leaves its files. The next transport through the directory removes them: it finds them by a
/// file `*.lock`, which a running process has locked. So all users of the directory must see each other's file locks, as
/// on a local file system or `tmpfs`, in containers too.
///
/// Payloads and the directory belong to the process's user alone: source and target run as one user, and a directory that
/// another user owns or may write is refused. The directories above it are trusted: no other user may rename their entries.
/// Bytes of a published region are there twice, in the region and in its file.
#[derive(Debug)]
pub struct Files {
    directory: PathBuf,
    /// A random number in the file names. It distinguishes the files of this transport from all others, even from those
    /// of a process with the same id in another container.
    token: u64,
    regions: HashMap<u64, Held>,
    /// Ids of the memory that has a file.
    published: HashSet<u64>,
    /// `None` if the file system has no locks.
    lock: Option<DirectoryLock>,
}

impl Files {
    /// A transport through `directory`, which is created if it does not exist, for the process's user alone. Removes files
    /// of killed processes.
    ///
    /// # Errors
    /// [`TransportError::File`]; [`TransportError::NotOwn`] for a directory in which another user could replace payloads.
    /// Nothing is left in it then.
    pub fn new(directory: impl Into<PathBuf>) -> Result<Self, TransportError> {
        let directory = directory.into();
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&directory)
            .map_err(|error| failed(&directory, error))?;
        // Without links, which may lead elsewhere after the check.
        let directory = directory.canonicalize().map_err(|error| failed(&directory, error))?;
        // Random, because std seeds its hasher randomly.
        let token = RandomState::new().hash_one("files");
        let (lock, own) = DirectoryLock::take(&directory, &format!("{token:016x}"))
            .map_err(|error| failed(&directory, error))?;
        if let Err(error) = check_own(&directory, own) {
            if let Some(lock) = lock {
                lock.remove();
            }
            return Err(error);
        }
        remove_stale(&directory);
        Ok(Self { directory, token, regions: HashMap::new(), published: HashSet::new(), lock })
    }

    /// The file name of memory `id`.
    fn name(&self, id: u64) -> String {
        format!("{:016x}-{id}.payload", self.token)
    }

    /// Removes the file of memory, if it was published.
    fn unlink(&mut self, id: u64) -> Result<(), TransportError> {
        if !self.published.contains(&id) {
            return Ok(());
        }
        let path = self.directory.join(self.name(id));
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(&path, error)),
            _ => {
                self.published.remove(&id);
                Ok(())
            }
        }
    }

    fn region(&mut self, id: u64) -> Result<RegionMut<'_>, TransportError> {
        self.regions.get_mut(&id).map(Held::region_mut).ok_or(TransportError::Unknown { id })
    }

    fn read(
        &mut self,
        id: u64,
        bytes: Range<usize>,
        from: &Descriptor,
    ) -> Result<(), TransportError> {
        let name = std::str::from_utf8(&from.0).unwrap_or_default();
        let is_name = name.ends_with(".payload")
            && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '.');
        if !is_name {
            let why = format!("{name:?} is not the name of a payload");
            return Err(TransportError::Descriptor { why });
        }
        let path = self.directory.join(name);
        let (start, needed) = (bytes.start as u64, bytes.end);
        let mut region = self.region(id)?;
        let len = region.len();
        if bytes.start > bytes.end || bytes.end > len {
            return Err(TransportError::Outside { bytes, len });
        }
        let mut file = File::open(&path).map_err(|error| failed(&path, error))?;
        let found = file.metadata().map_err(|error| failed(&path, error))?.len() as usize;
        if found < needed {
            return Err(TransportError::TooShort { needed, found });
        }
        let mut part = vec![0; bytes.len()];
        let read = file.seek(SeekFrom::Start(start)).and_then(|_| file.read_exact(&mut part));
        read.map_err(|error| failed(&path, error))?;
        region.write(bytes.start, &part)
    }
}

fn failed(path: &Path, error: io::Error) -> TransportError {
    TransportError::File { path: path.to_owned(), error }
}

/// Refuses a directory that does not belong to user `own`, or in which others may create and remove files.
fn check_own(directory: &Path, own: u32) -> Result<(), TransportError> {
    let found = directory.metadata().map_err(|error| failed(directory, error))?;
    let (owner, mode) = (found.uid(), found.mode() & 0o7777);
    if owner == own && mode & 0o022 == 0 {
        return Ok(());
    }
    Err(TransportError::NotOwn { path: directory.to_owned(), owner, mode, own })
}

impl Transport for Files {
    fn register(&mut self, region: Region) -> Result<Registered, TransportError> {
        let (held, memory) = Held::new(region);
        self.regions.insert(memory.id(), held);
        Ok(memory)
    }

    fn deregister(&mut self, memory: Registered) -> Result<Region, TransportError> {
        let id = memory.id();
        self.unlink(id)?;
        self.regions.remove(&id).map(Held::into_region).ok_or(TransportError::Unknown { id })
    }

    fn with_region<R>(
        &mut self,
        memory: &mut Registered,
        work: impl FnOnce(RegionMut<'_>) -> R,
    ) -> Result<R, TransportError> {
        Ok(work(self.region(memory.id())?))
    }

    /// Creates a file of zeros; [`Self::flush`] writes the bytes.
    fn publish(&mut self, memory: &Registered) -> Result<Descriptor, TransportError> {
        let (id, len) = (memory.id(), self.region(memory.id())?.len());
        let name = self.name(id);
        let path = self.directory.join(&name);
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
        let file = file.map_err(|error| failed(&path, error))?;
        self.published.insert(id);
        file.set_len(len as u64).map_err(|error| failed(&path, error))?;
        Ok(Descriptor(name.into_bytes()))
    }

    fn flush(&mut self, memory: &Registered, bytes: Range<usize>) -> Result<(), TransportError> {
        let (path, start) = (self.directory.join(self.name(memory.id())), bytes.start as u64);
        let region = self.region(memory.id())?;
        let len = region.len();
        // Checked before a buffer for the range is allocated.
        if bytes.start > bytes.end || bytes.end > len {
            return Err(TransportError::Outside { bytes, len });
        }
        let mut part = vec![0; bytes.len()];
        region.read(bytes.start, &mut part)?;
        let written = OpenOptions::new().write(true).open(&path).and_then(|mut file| {
            file.seek(SeekFrom::Start(start))?;
            file.write_all(&part)
        });
        written.map_err(|error| failed(&path, error))
    }

    fn post(
        &mut self,
        into: Registered,
        bytes: Range<usize>,
        from: &Descriptor,
    ) -> Result<InFlight, NotPosted> {
        match self.read(into.id(), bytes, from) {
            Ok(()) => Ok(into.in_flight()),
            Err(error) => Err(NotPosted(into, error)),
        }
    }

    fn poll(&mut self, read: InFlight) -> Polled {
        let id = read.id();
        match self.regions.get(&id) {
            Some(held) => held.done(read),
            None => Polled::Failed(read, TransportError::Unknown { id }),
        }
    }

    fn fence(&mut self) -> Result<(), TransportError> {
        self.regions.clear();
        let ids: Vec<_> = self.published.iter().copied().collect();
        ids.into_iter().map(|id| self.unlink(id)).fold(Ok(()), Result::and)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        // Files that cannot be removed stay in the directory, with their lock, by which a later transport finds them.
        if self.fence().is_ok()
            && let Some(lock) = self.lock.take()
        {
            lock.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    /// A directory that another user could write is refused, also behind a link, and stays as it is: not even what looks
    /// like a payload of a killed process is removed from it.
    #[test]
    fn a_directory_of_others_is_refused() {
        let above = tempfile::tempdir().unwrap();
        let (path, link) = (above.path().join("shared"), above.path().join("link"));
        fs::create_dir(&path).unwrap();
        symlink(&path, &link).unwrap();
        let stale = ["0123456789abcdef-1.payload", "0123456789abcdef.lock"];
        stale.iter().for_each(|name| fs::write(path.join(name), b"").unwrap());
        let refused = |path: &Path| Files::new(path).unwrap_err();
        for mode in [0o777, 0o1777, 0o770, 0o702] {
            set_mode(&path, mode);
            for path in [&path, &link] {
                let error = refused(path);
                assert!(error.to_string().contains("run `chmod go-w` on it"), "{error}");
                let TransportError::NotOwn { owner, own, mode: found, .. } = error else {
                    panic!("{mode:o}: {error}")
                };
                assert_eq!((owner, found), (own, mode));
            }
            assert_eq!(path.read_dir().unwrap().count(), stale.len(), "{mode:o}");
        }
        set_mode(&path, 0o755);
        // Only root may give a directory away.
        if chown(&path, Some(4711), None).is_ok() {
            let error = refused(&path);
            assert!(matches!(error, TransportError::NotOwn { owner: 4711, .. }), "{error}");
            let error = error.to_string();
            assert!(error.contains("mode 755") && !error.contains("chmod"), "{error}");
            chown(&path, Some(above.path().metadata().unwrap().uid()), None).unwrap();
        }
        drop(Files::new(&path).unwrap());
        assert_eq!(path.read_dir().unwrap().count(), 0, "the files of a killed process");
    }

    /// Files stay in the directory that was checked, even if a link to it leads elsewhere later.
    #[test]
    fn a_link_that_changes_moves_nothing() {
        let above = tempfile::tempdir().unwrap();
        let [own, other, link] = ["own", "other", "link"].map(|name| above.path().join(name));
        fs::create_dir(&other).unwrap();
        set_mode(&other, 0o777);
        drop(Files::new(&own).unwrap());
        symlink(&own, &link).unwrap();
        let mut files = Files::new(&link).unwrap();
        fs::remove_file(&link).unwrap();
        symlink(&other, &link).unwrap();
        let memory = files.register(Region::new(8).unwrap()).unwrap();
        let name = String::from_utf8(files.publish(&memory).unwrap().0).unwrap();
        assert!(own.join(name).exists());
        assert_eq!(other.read_dir().unwrap().count(), 0);
    }
}
