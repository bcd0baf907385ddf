//! A lock beside the files of a transport, which shows whether its process still runs.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// After this time a lock that never got its name counts as left over. Its process names it at once.
const LEFTOVER_AGE: Duration = Duration::from_secs(60 * 60);

/// A locked file in the directory. The system releases the lock when the process ends, however it ends.
#[derive(Debug)]
pub(super) struct DirectoryLock {
    path: PathBuf,
    /// Dropped to release the lock.
    _file: File,
}

impl DirectoryLock {
    /// Takes the lock of the files whose names begin with `token`, 16 hexadecimal digits, and a hyphen. `None` if the
    /// file system has no locks. Also returns the id of the user to whom the process's new files belong.
    ///
    /// # Errors
    /// The file cannot be created or named. None is left then.
    pub fn take(directory: &Path, token: &str) -> io::Result<(Option<Self>, u32)> {
        let path = directory.join(format!("{token}.lock"));
        // It gets the name by which `remove_stale` finds payloads when it is locked.
        let new = path.with_extension("new");
        let file = File::create_new(&new)?;
        let named = file.metadata().and_then(|made| {
            let is_locked = file.lock().is_ok();
            if is_locked {
                fs::rename(&new, &path)?;
            }
            Ok((is_locked, made.uid()))
        });
        if !matches!(named, Ok((true, _))) {
            // What cannot be removed, `remove_stale` finds later.
            let _ = fs::remove_file(&new);
        }
        let (is_locked, user) = named?;
        Ok((is_locked.then_some(Self { path, _file: file }), user))
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
        let Some((token, end)) = name.split_once('.') else { continue };
        if !is_token(token) || !["lock", "new"].contains(&end) {
            continue;
        }
        let path = directory.join(&name);
        // It is not there if its process has just ended.
        let Ok(file) = OpenOptions::new().read(true).write(true).open(&path) else { continue };
        if file.try_lock().is_err() {
            continue;
        }
        // The lock stays with a payload that could not be removed.
        let is_over = if end == "new" { is_old(&file) } else { remove_payloads(directory, token) };
        if is_over {
            let _ = fs::remove_file(&path);
        }
    }
}

/// Whether it is a token of a transport: other files of a directory are not touched.
fn is_token(text: &str) -> bool {
    text.len() == 16 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Whether a lock that never got its name is so old that its process cannot be about to name it.
fn is_old(file: &File) -> bool {
    let modified = file.metadata().and_then(|file| file.modified());
    modified.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > LEFTOVER_AGE))
}

/// Removes the payloads of a process that has ended. Returns whether none is left.
fn remove_payloads(directory: &Path, token: &str) -> bool {
    let is_own = |name: &String| {
        name.strip_prefix(token).is_some_and(|rest| rest.starts_with('-'))
            && name.ends_with(".payload")
    };
    // Listed after the lock was taken, because the process may have run until then.
    let Ok(all) = names(directory) else { return false };
    let payloads = all.into_iter().filter(is_own);
    let removed = payloads.map(|name| fs::remove_file(directory.join(name)));
    removed.filter(|removed| removed.is_err()).count() == 0
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
    use std::time::SystemTime;

    use super::*;

    fn token(digit: char) -> String {
        String::from(digit).repeat(16)
    }

    fn take(directory: &Path, digit: char) -> DirectoryLock {
        let taken = DirectoryLock::take(directory, &token(digit)).unwrap();
        taken.0.expect("temporary directories have locks")
    }

    /// Files of ended processes are removed; those of running ones, files without a lock, and other files are not.
    #[test]
    fn only_files_of_ended_processes_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let own = take(path, 'a');
        let [a, b, c] = ['a', 'b', 'c'].map(token);
        let [of_a, lock] = [format!("{a}-1.payload"), format!("{a}.lock")];
        let [gone, first, second] =
            [format!("{b}.lock"), format!("{b}-1.payload"), format!("{b}-2.payload")];
        let [other, notes] = [format!("{c}-1.payload"), format!("{b}-notes")];
        for name in [&of_a, &gone, &first, &second, &other, &notes] {
            File::create_new(path.join(name)).unwrap();
        }
        // Locks of something else.
        for name in ["Cargo.lock", "0123456789ABCDEF.lock", "0123.new"] {
            File::create_new(path.join(name)).unwrap();
        }
        let others = ["0123.new", "0123456789ABCDEF.lock", "Cargo.lock"];
        remove_stale(path);
        let left = [&*of_a, &*lock, &*notes, &*other];
        assert_eq!(names(path).unwrap(), [&others[..], &left[..]].concat());
        // The process ends.
        drop(own);
        remove_stale(path);
        let left = [&*notes, &*other];
        assert_eq!(names(path).unwrap(), [&others[..], &left[..]].concat());
        take(path, 'd').remove();
        assert_eq!(names(path).unwrap(), [&others[..], &left[..]].concat());
    }

    /// A process that was killed before its lock had its name leaves a file, which is removed when it is old and nobody
    /// holds it. If the lock cannot be named, no file is left at once.
    #[test]
    fn locks_without_a_name_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let [old, young, held] = ['a', 'b', 'c'].map(|digit| format!("{}.new", token(digit)));
        let make = |name: &str, age| {
            let file = File::create_new(path.join(name)).unwrap();
            file.set_modified(SystemTime::now() - age).unwrap();
            file
        };
        let minute = Duration::from_secs(60);
        make(&old, LEFTOVER_AGE + minute);
        make(&young, LEFTOVER_AGE - minute);
        let running = make(&held, LEFTOVER_AGE + minute);
        running.lock().unwrap();
        remove_stale(path);
        assert_eq!(names(path).unwrap(), [&*young, &*held]);
        let taken = format!("{}.lock", token('d'));
        fs::create_dir(path.join(&taken)).unwrap();
        DirectoryLock::take(path, &token('d')).unwrap_err();
        assert_eq!(names(path).unwrap(), [&*young, &*held, &*taken]);
    }
}
