//! Writes results to standard output, to standard error, and to the file of `--report`.
//!
//! A reader that closes standard output early, such as `head`, is not an error: writing stops without a message, and
//! the exit code is that of the result. `generate` ends then, unless it also writes a file. Any other failure, such as a full disk, is an [`OutputError`]. Standard error
//! is for messages to people; a message that cannot be written there is dropped.

use std::fmt::Display;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anstyle::{AnsiColor, Style};

use crate::error::InputError;

/// A result that could not be written; exit code 1.
#[derive(Debug, thiserror::Error)]
#[error("{to}: {source}")]
pub struct OutputError {
    /// Name of the destination.
    to: String,
    /// The error of the system.
    source: io::Error,
}

/// Writes `text` and a line end to standard output. Colours are written only to a terminal, or if `CLICOLOR_FORCE` is
/// set and `NO_COLOR` is not.
///
/// # Errors
/// [`OutputError`] if it cannot be written, unless the reader has closed the pipe.
pub fn print(text: impl Display) -> Result<(), OutputError> {
    let mut stdout = anstream::stdout().lock();
    check(writeln!(stdout, "{text}").and_then(|()| stdout.flush()))
}

/// Writes `text` to standard output without a line end, and flushes. Returns `false` if the reader has closed the pipe.
///
/// # Errors
/// As [`print()`].
#[cfg(feature = "generate")]
pub fn print_part(text: &str) -> Result<bool, OutputError> {
    let mut stdout = io::stdout().lock();
    let written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    let is_closed = written.as_ref().is_err_and(|error| error.kind() == ErrorKind::BrokenPipe);
    check(written).map(|()| !is_closed)
}

/// Converts the result of a write to standard output.
///
/// # Errors
/// As [`print()`].
pub fn check(written: io::Result<()>) -> Result<(), OutputError> {
    match written {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(OutputError { to: "standard output".into(), source: error })
        }
        _ => Ok(()),
    }
}

/// Writes a line to standard error, if possible.
pub fn note(text: impl Display) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Writes an error message to standard error, if possible.
pub fn error(message: impl Display) {
    let style = Style::new().bold().fg_color(Some(AnsiColor::Red.into()));
    let _ = writeln!(anstream::stderr(), "{style}error:{style:#} {message}");
}

/// An option that names a file to read, and the file.
pub type Input<'a> = (&'static str, &'a Path);

/// Refuses a file that the option `output` would replace, and which is also read. Other names of a file, such as links,
/// count as the file; pipes and devices are not replaced.
///
/// # Errors
/// [`InputError::OutputIsInput`].
pub fn check_not_read(
    (output, path): (&'static str, &Path),
    file: &File,
    inputs: &[Input<'_>],
) -> Result<(), InputError> {
    // A file that cannot be examined is refused where it is read or written.
    let Ok(written) = file.metadata() else { return Ok(()) };
    let is_it = |(_, input): &&Input<'_>| {
        let read = fs::metadata(input);
        read.is_ok_and(|read| (read.dev(), read.ino()) == (written.dev(), written.ino()))
    };
    match inputs.iter().find(is_it) {
        Some(&(input, _)) if written.is_file() => {
            Err(InputError::OutputIsInput { output, path: path.into(), input })
        }
        _ => Ok(()),
    }
}

/// The file of `--report`. It is opened before any work is done, and written at the end.
///
/// Until then, an older report stays unchanged. If the value is dropped before it is written, a file that was created
/// for it is removed.
#[derive(Debug)]
pub struct ReportFile {
    path: PathBuf,
    file: File,
    /// Whether the file is removed when this value is dropped.
    unfinished: bool,
}

impl ReportFile {
    /// Opens the file, or creates it. `inputs` are the files that the command reads.
    ///
    /// # Errors
    /// [`InputError::Report`] if it cannot be written to; [`InputError::OutputIsInput`] if it is one of `inputs`.
    pub fn open(path: &Path, inputs: &[Input<'_>]) -> Result<Self, InputError> {
        let mut options = OpenOptions::new();
        let (file, unfinished) = match options.write(true).create_new(true).open(path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                (options.create_new(false).open(path), false)
            }
            made => (made, true),
        };
        let file = file.map_err(|source| InputError::Report { path: path.into(), source })?;
        let report = Self { path: path.into(), file, unfinished };
        check_not_read(("--report", path), &report.file, inputs)?;
        Ok(report)
    }

    /// Replaces the contents of the file by the report.
    ///
    /// # Errors
    /// [`OutputError`] if it cannot be written, as on a full disk.
    pub fn write(mut self, page: &str) -> Result<(), OutputError> {
        let mut replace = || {
            // A pipe or a device cannot be truncated.
            if self.file.metadata()?.is_file() {
                self.file.set_len(0)?;
            }
            self.file.write_all(page.as_bytes())
        };
        replace().map_err(|source| OutputError { to: self.path.display().to_string(), source })?;
        self.unfinished = false;
        Ok(())
    }
}

impl Drop for ReportFile {
    fn drop(&mut self) {
        if self.unfinished {
            let _ = fs::remove_file(&self.path);
        }
    }
}
