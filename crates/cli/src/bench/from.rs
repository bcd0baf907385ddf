//! Reads the result for `--from`, which an earlier `bench --json` has written.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use super::report::Report;
use crate::error::InputError;

/// Most bytes of a file that are read; a result has far fewer.
const MAX_BYTES: u64 = 64 << 20;

/// Reads a result.
///
/// # Errors
/// [`InputError::BenchResult`] if the file cannot be read, or is not a result.
pub fn read(path: &Path) -> Result<Report, InputError> {
    let refused = |reason| InputError::BenchResult { path: path.into(), reason };
    let mut json = String::new();
    File::open(path)
        .and_then(|file| file.take(MAX_BYTES + 1).read_to_string(&mut json))
        .map_err(|error| refused(error.to_string()))?;
    if json.len() as u64 > MAX_BYTES {
        return Err(refused(format!("it has more than {MAX_BYTES} bytes")));
    }
    serde_json::from_str(&json).map_err(|error| refused(error.to_string()))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn what_is_no_result_is_refused_with_the_reason() {
        let refusal = |text: &str| {
            let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
            file.write_all(text.as_bytes()).expect("room for a line");
            read(file.path()).expect_err(text).to_string()
        };
        for (text, reason) in [
            ("", "EOF while parsing"),
            ("{\"device\": \"a\"}", "missing field `date`"),
            ("{\"device\": \"a\", \"date\": \"b\", \"tier\": 3}", "invalid type: integer `3`"),
        ] {
            let message = refusal(text);
            assert!(message.contains(reason), "{message}");
            assert!(message.ends_with("give a file that `bench --json` has written"), "{message}");
        }
        let missing = read(Path::new("no/such/file.json")).expect_err("there is none").to_string();
        assert!(missing.starts_with("--from no/such/file.json: No such file"), "{missing}");
    }

    #[test]
    fn a_result_without_rows_is_one() {
        let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
        file.write_all(b"{\"device\": \"a\", \"date\": \"b\"}").expect("room for a line");
        let report = read(file.path()).expect("a result");
        assert!(report.measurements.is_empty() && report.tier.is_empty());
    }
}
