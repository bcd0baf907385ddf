//! The store that a URL names.

use std::fs::{self, DirBuilder};
use std::io;
use std::path::Path as FilePath;
use std::time::Duration;

use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ObjectStore, parse_url_opts};
use url::Url;

use crate::error::ColdError;
use crate::key::{FOLDER, Key};

/// After this time a file that is being written counts as left over.
const LEFTOVER_AGE: Duration = Duration::from_secs(24 * 60 * 60);

/// The store of a URL, and the path in it. A URL without a scheme is a local directory.
pub(crate) fn open(
    url: &str,
    options: &[(String, String)],
) -> Result<(Box<dyn ObjectStore>, Path), ColdError> {
    let refused = |why: String| ColdError::Url { url: url.to_owned(), why };
    let directory = match url.split_once("://") {
        None => Some(url.to_owned()),
        // A host name would be taken for a directory.
        Some(("file", path)) if !path.starts_with('/') => {
            return Err(refused(
                "give an absolute path behind `file://`, or a path alone".to_owned(),
            ));
        }
        Some(("file", path)) => Some(path.to_owned()),
        Some(_) => None,
    };
    if let Some(directory) = directory {
        let directory = FilePath::new(&directory);
        create(directory).map_err(|error| refused(error.to_string()))?;
        remove_leftovers(&directory.join(FOLDER));
        let objects = LocalFileSystem::new_with_prefix(directory)?;
        return Ok((Box::new(objects), Path::default()));
    }
    let parsed = Url::parse(url).map_err(|error| refused(error.to_string()))?;
    let options = options.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    parse_url_opts(&parsed, options).map_err(|error| refused(error.to_string()))
}

/// Creates a directory for the process's user alone, since objects contain prompts and salts. A directory that exists
/// stays as it is.
fn create(directory: &FilePath) -> io::Result<()> {
    let mut builder = DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(directory)
}

/// Removes the files of processes that ended in the middle of a write: `object_store` writes to the file KEY#NUMBER,
/// and renames it. What cannot be removed stays.
fn remove_leftovers(folder: &FilePath) {
    // It does not exist before the first write.
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let modified = || entry.metadata().and_then(|file| file.modified());
        let is_old = || modified().is_ok_and(|at| at.elapsed().is_ok_and(|age| age > LEFTOVER_AGE));
        if entry.file_name().to_str().is_some_and(is_unfinished) && is_old() {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Whether an object is being written to the file of this name.
fn is_unfinished(name: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    name.split_once('#')
        .is_some_and(|(key, number)| Key::of_name(key).is_some() && is_number(number))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::time::SystemTime;

    use super::*;

    /// Only old files that `object_store` has not renamed are removed.
    #[test]
    fn leftovers_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let folder = directory.path().join(FOLDER);
        fs::create_dir(&folder).unwrap();
        let (key, hour) = ("0a".repeat(32), Duration::from_secs(60 * 60));
        let [old, young] = [LEFTOVER_AGE + hour, LEFTOVER_AGE - hour];
        let names = ["", "#1", "#2", "#x"].map(|end| format!("{key}{end}"));
        for (name, age) in names.iter().zip([old, old, young, old]) {
            let file = File::create_new(folder.join(name)).unwrap();
            file.set_modified(SystemTime::now() - age).unwrap();
        }
        let notes = File::create_new(folder.join("notes#1")).unwrap();
        notes.set_modified(SystemTime::now() - old).unwrap();
        open(directory.path().to_str().unwrap(), &[]).unwrap();
        let left = fs::read_dir(&folder).unwrap();
        let mut left: Vec<_> =
            left.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        left.sort();
        assert_eq!(left, [&names[0], &names[2], &names[3], "notes#1"]);
    }
}
