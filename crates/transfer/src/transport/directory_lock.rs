//! A lock beside the files of a transport, which shows whether its process still runs.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

/// A locked file in the directory. The system releases the lock when the process ends, however it ends.
#[derive(Debug)]
pub(super) struct DirectoryLock {
    path: PathBuf,
    /// Dropped to release the lock.
    _file: File,
}

impl DirectoryLock {
    /// Takes the lock of the files whose names begin with `token` and a hyphen. `None` if the file system has no locks.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn take(directory: &Path, token: &str) -> io::Result<Option<Self>> {
        let path = directory.join(format!("{token}.lock"));
        // It gets the name that `remove_stale` looks for when it is locked.
        let new = path.with_extension("new");
        let file = File::create_new(&new)?;
        if file.lock().is_err() {
            return fs::remove_file(&new).map(|()| None);
        }
        fs::rename(&new, &path)?;
        Ok(Some(Self { path, _file: file }))
    }

    /// Removes the lock, when all files are removed.
    pub fn remove(self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Removes the files whose lock nobody holds: their processes have ended without removing them. What it may not remove
/// stays.
pub(super) fn remove_stale(directory: &Path) {
    // Where the directory cannot be listed, a later transport does it.
    let Ok(all) = names(directory) else { return };
    for name in all {
        let Some(token) = name.strip_suffix(".lock") else { continue };
        let path = directory.join(format!("{token}.lock"));
        // It is not there if its process has just ended.
        let Ok(file) = OpenOptions::new().read(true).write(true).open(&path) else { continue };
        if file.try_lock().is_err() {
            continue;
        }
        let is_own = |name: &String| {
            name.strip_prefix(token).is_some_and(|rest| rest.starts_with('-'))
                && name.ends_with(".payload")
        };
        // Listed again: the process may have run until now. Without a list of all payloads, the lock stays with them.
        let Ok(all) = names(directory) else { continue };
        let payloads = all.into_iter().filter(is_own);
        let removed = payloads.map(|name| fs::remove_file(directory.join(name)));
        // The lock stays with a file that could not be removed.
        if removed.filter(|removed| removed.is_err()).count() == 0 {
            let _ = fs::remove_file(&path);
        }
    }
}

/// The names of all files in a directory, in order.
///
/// # Errors
/// The directory cannot be listed, as when the process has no file descriptor left.
fn names(directory: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory)? {
        names.extend(entry?.file_name().into_string().ok());
    }
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files of ended processes are removed; those of running ones, files without a lock, and other files are not.
    #[test]
    fn only_files_of_ended_processes_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let own =
            DirectoryLock::take(path, "a").unwrap().expect("temporary directories have locks");
        for name in
            ["a-1.payload", "b.lock", "b-1.payload", "b-2.payload", "c-1.payload", "b-notes"]
        {
            File::create_new(path.join(name)).unwrap();
        }
        remove_stale(path);
        assert_eq!(names(path).unwrap(), ["a-1.payload", "a.lock", "b-notes", "c-1.payload"]);
        // The process ends.
        drop(own);
        remove_stale(path);
        assert_eq!(names(path).unwrap(), ["b-notes", "c-1.payload"]);
        DirectoryLock::take(path, "d").unwrap().unwrap().remove();
        assert_eq!(names(path).unwrap(), ["b-notes", "c-1.payload"]);
    }
}
