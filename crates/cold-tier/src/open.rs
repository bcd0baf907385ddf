//! The store that a URL names.

use std::fs::{self, DirBuilder};
use std::io;
use std::path::{Path as FilePath, PathBuf};
use std::time::Duration;

use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ObjectStore, parse_url_opts};
use url::Url;

use crate::error::ColdError;
use crate::key::{FOLDER, Key};

/// After this time a file that is being written counts as left over.
const LEFTOVER_AGE: Duration = Duration::from_secs(24 * 60 * 60);

/// A store, and where in it the objects are.
pub(crate) struct Opened {
    pub objects: Box<dyn ObjectStore>,
    /// The path of the objects in the store.
    pub prefix: Path,
    /// The local directory, if the store is one.
    pub directory: Option<PathBuf>,
}

/// The store of a URL. A URL without a scheme is a local directory.
pub(crate) fn open(url: &str, options: &[(String, String)]) -> Result<Opened, ColdError> {
    let refused = |why: String| ColdError::Url { url: url.to_owned(), why };
    let unread = |why: String| ColdError::Url { url: text_without_secrets(url), why };
    if let Some(directory) = directory(url).map_err(|why| unread(why.to_owned()))? {
        // Its real path, so that it can be created again wherever the process is then.
        let real = create(directory).and_then(|()| directory.canonicalize());
        let directory = real.map_err(|error| refused(error.to_string()))?;
        remove_leftovers(&directory.join(FOLDER));
        let objects = Box::new(LocalFileSystem::new_with_prefix(&directory)?);
        return Ok(Opened { objects, prefix: Path::default(), directory: Some(directory) });
    }
    let parsed = Url::parse(url).map_err(|error| unread(error.to_string()))?;
    check_parts(&parsed)
        .map_err(|why| ColdError::Url { url: without_secrets(&parsed), why: why.to_owned() })?;
    let options = options.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    let opened = parse_url_opts(&parsed, options);
    let (objects, prefix) = opened.map_err(|error| refused(error.to_string()))?;
    Ok(Opened { objects, prefix, directory: None })
}

/// The local directory that `url` names, if it names one; or why it may not.
fn directory(url: &str) -> Result<Option<&FilePath>, &'static str> {
    match url.split_once("://") {
        None if begins_as_url(url) => {
            Err("write `SCHEME://` for a store, or `./PATH` for a directory with this name")
        }
        None => Ok(Some(FilePath::new(url))),
        Some((scheme, path)) if scheme.eq_ignore_ascii_case("file") => {
            // A host name would be taken for a directory.
            let is_absolute = path.starts_with('/');
            let why = "give an absolute path behind `file://`, or a path alone";
            is_absolute.then(|| Some(FilePath::new(path))).ok_or(why)
        }
        Some(_) => Ok(None),
    }
}

/// Whether a text without `://` begins with a URL's scheme, as `s3:bucket` does. A single letter is a drive.
fn begins_as_url(text: &str) -> bool {
    let Some((scheme, _)) = text.split_once(':') else { return false };
    let may_be_in = |byte: u8| byte.is_ascii_alphanumeric() || b"+.-".contains(&byte);
    scheme.len() > 1
        && scheme.starts_with(|first: char| first.is_ascii_alphabetic())
        && scheme.bytes().all(may_be_in)
}

/// Refuses the parts of a URL that `object_store` ignores, and a local directory, which [`create`] has not made.
fn check_parts(url: &Url) -> Result<(), &'static str> {
    let scheme = url.scheme();
    // Azure's driver for Hadoop writes CONTAINER@ACCOUNT.dfs.core.windows.net.
    let has_container = matches!(scheme, "az" | "abfs" | "abfss");
    if scheme == "file" {
        return Err("begin with `file:///`, or give a path alone");
    }
    if url.password().is_some() || (!url.username().is_empty() && !has_container) {
        return Err("a URL may have no user name and no password: set keys by the store's options");
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err("a URL may have no `?` and no `#`: set keys by the store's options");
    }
    if url.port().is_some() && !matches!(scheme, "http" | "https") {
        return Err(
            "the URL of a bucket may have no port: set the store's endpoint by its options",
        );
    }
    Ok(())
}

/// The URL without the parts that may be keys, for a message.
fn without_secrets(url: &Url) -> String {
    let mut url = url.clone();
    url.set_query(None);
    url.set_fragment(None);
    // Both fail for a URL without a host, which has neither.
    let _ = url.set_password(None);
    let _ = url.set_username("");
    url.into()
}

/// As [`without_secrets`], of a URL that may not parse. A path stays as it is.
pub(crate) fn text_without_secrets(url: &str) -> String {
    let is_url = url.contains("://") || begins_as_url(url);
    let Some((scheme, rest)) = url.split_once(':').filter(|_| is_url) else {
        return url.to_owned();
    };
    let (slashes, rest) = rest.strip_prefix("//").map_or(("", rest), |rest| ("//", rest));
    // A password may have any character, also those that end a host.
    let rest = rest.rsplit_once('@').map_or(rest, |(_, rest)| rest);
    let end = rest.find(['?', '#']).unwrap_or(rest.len());
    format!("{scheme}:{slashes}{}", &rest[..end])
}

/// Creates a directory for the process's user alone, since objects contain prompts and salts. A directory that exists
/// stays as it is.
pub(crate) fn create(directory: &FilePath) -> io::Result<()> {
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

    /// What a URL would lose is refused, with the reason and without its secrets.
    #[test]
    fn parts_that_no_store_reads_are_refused() {
        let refused = |url: &str| open(url, &[]).map(drop).unwrap_err().to_string();
        for (url, shown, why) in [
            ("s3://bucket/x?region=a", "s3://bucket/x", "no `?`"),
            ("s3://bucket/x#y", "s3://bucket/x", "no `?`"),
            (
                "https://a.blob.core.windows.net/c?sig=key",
                "https://a.blob.core.windows.net/c",
                "no `?`",
            ),
            ("https://me:key@host/x", "https://host/x", "no password"),
            ("s3://key@bucket/x", "s3://bucket/x", "no user name"),
            (
                "abfss://c:key@a.dfs.core.windows.net/x",
                "abfss://a.dfs.core.windows.net/x",
                "no password",
            ),
            ("s3://127.0.0.1:9000/bucket", "s3://127.0.0.1:9000/bucket", "endpoint"),
            (" file:///no/such/directory", "file:///no/such/directory", "`file:///`"),
            // These do not parse.
            ("https://me:pa#ss@host/x", "https://host/x", "port"),
            ("https://me:key@host:port/x", "https://host:port/x", "port"),
            ("https://host:port/x?sig=secret", "https://host:port/x", "port"),
            ("s3:me:key@bucket/x", "s3:bucket/x", "`SCHEME://`"),
            ("file://me:key@host/x", "file://host/x", "`file://`"),
        ] {
            let message = refused(url);
            assert!(message.starts_with(&format!("{shown}: ")), "{url}: {message}");
            assert!(message.contains(why), "{url}: {message}");
            for secret in ["key@", "ss@", "secret"] {
                assert!(!message.contains(secret), "{url}: {message}");
            }
        }
        for url in
            ["abfss://c@a.dfs.core.windows.net/x", "http://127.0.0.1:9000/x", "s3://bucket/x"]
        {
            assert_eq!(check_parts(&Url::parse(url).unwrap()), Ok(()), "{url}");
        }
    }

    /// A path may have colons, and one letter before the first is a drive.
    #[test]
    fn a_scheme_is_told_from_a_path() {
        for url in ["s3:/bucket/x", "file:/x", "s3:bucket", "gs:", "a+b.c-1:x"] {
            assert!(begins_as_url(url), "{url}");
        }
        for path in ["./s3:x", "a/b:c", "/a:b", "C:/x", "3s:x", "_a:b", ":x", "a b:c", "prefixes"] {
            assert!(!begins_as_url(path), "{path}");
        }
    }

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
