//! Through a directory that source and target both see.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read};
use std::path::PathBuf;

use super::{
    Descriptor, InFlight, NotPosted, Polled, Region, Registered, Transport, TransportError,
};

/// A transport through files: a source's memory is a file once it is published, and is removed when it is given up. A read
/// is done when it is posted.
#[derive(Debug)]
pub struct Files {
    directory: PathBuf,
    /// Tells its files from those of all others, also of a process of the same number in another container.
    token: u64,
    regions: HashMap<u64, Region>,
    /// Memory that has a file.
    published: HashSet<u64>,
}

impl Files {
    /// Through `directory`, which is made if it is not there.
    ///
    /// # Errors
    /// [`TransportError::File`].
    pub fn new(directory: impl Into<PathBuf>) -> Result<Self, TransportError> {
        let directory = directory.into();
        fs::create_dir_all(&directory).map_err(|error| failed(&directory, error))?;
        // Random: std's keys for hashing are.
        let token = RandomState::new().hash_one("files");
        Ok(Self { directory, token, regions: HashMap::new(), published: HashSet::new() })
    }

    /// What the file of memory is called.
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

    fn region(&mut self, id: u64) -> Result<&mut Region, TransportError> {
        self.regions.get_mut(&id).ok_or(TransportError::Unknown { id })
    }

    fn read(&mut self, id: u64, from: &Descriptor) -> Result<(), TransportError> {
        let name = std::str::from_utf8(&from.0).unwrap_or_default();
        let is_name = name.ends_with(".payload")
            && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '.');
        if !is_name {
            let why = format!("{name:?} is not the name of a payload");
            return Err(TransportError::Descriptor { why });
        }
        let path = self.directory.join(name);
        let into = self.region(id)?.bytes_mut();
        let mut file = File::open(&path).map_err(|error| failed(&path, error))?;
        let found = file.metadata().map_err(|error| failed(&path, error))?.len() as usize;
        if found < into.len() {
            return Err(TransportError::TooShort { needed: into.len(), found });
        }
        file.read_exact(into).map_err(|error| failed(&path, error))
    }
}

fn failed(path: &std::path::Path, error: io::Error) -> TransportError {
    TransportError::File { path: path.to_owned(), error }
}

impl Transport for Files {
    fn register(&mut self, region: Region) -> Result<Registered, TransportError> {
        let memory = Registered::new(region.bytes().len());
        self.regions.insert(memory.id(), region);
        Ok(memory)
    }

    fn deregister(&mut self, memory: Registered) -> Result<Region, TransportError> {
        let id = memory.id();
        self.unlink(id)?;
        self.regions.remove(&id).ok_or(TransportError::Unknown { id })
    }

    fn with_bytes<R>(
        &mut self,
        memory: &mut Registered,
        work: impl FnOnce(&mut [u8]) -> R,
    ) -> Result<R, TransportError> {
        Ok(work(self.region(memory.id())?.bytes_mut()))
    }

    /// Writes the file, whole or not at all.
    fn publish(&mut self, memory: &Registered) -> Result<Descriptor, TransportError> {
        let (directory, name) = (self.directory.clone(), self.name(memory.id()));
        let (path, unfinished) = (directory.join(&name), directory.join(format!("{name}.part")));
        let bytes = self.region(memory.id())?.bytes();
        let written = fs::write(&unfinished, bytes).map_err(|error| failed(&unfinished, error));
        let written = written
            .and_then(|()| fs::rename(&unfinished, &path).map_err(|error| failed(&path, error)));
        if let Err(error) = written {
            // What was written of it is of no use; the first error is the one that says why.
            let _ = fs::remove_file(&unfinished);
            return Err(error);
        }
        self.published.insert(memory.id());
        Ok(Descriptor(name.into_bytes()))
    }

    fn post(&mut self, into: Registered, from: &Descriptor) -> Result<InFlight, NotPosted> {
        match self.read(into.id(), from) {
            Ok(()) => Ok(into.in_flight()),
            Err(error) => Err(NotPosted(into, error)),
        }
    }

    fn poll(&mut self, read: InFlight) -> Polled {
        Polled::Done(read.ended())
    }

    fn fence(&mut self) -> Result<(), TransportError> {
        let ids: Vec<_> = self.regions.keys().copied().collect();
        self.regions.clear();
        ids.into_iter().map(|id| self.unlink(id)).fold(Ok(()), Result::and)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        // What cannot be removed is found by whoever cleans the directory.
        let _ = self.fence();
    }
}
