//! Mooncake-format traces: one JSON object a line, read as a stream.
//!
//! | field | unit | |
//! |---|---|---|
//! | `timestamp` | ms | never decreases |
//! | `input_length` | tokens | at least 1 |
//! | `output_length` | tokens | at least 1 |
//! | `hash_ids` | one per 512 input tokens | may be absent, except where [`Prompt`]s are read; equal ids at equal indices are equal tokens |
//!
//! A line has at most [`MAX_LINE_BYTES`]. A trace that is read as a whole has at most [`MAX_REQUESTS`].
//!
//! ```
//! use std::path::Path;
//!
//! use dsv4_kv_trace::TraceReader;
//!
//! // A file is read by `TraceReader::open`; this example reads two lines of one.
//! let lines = r#"{"timestamp": 1000, "input_length": 700, "output_length": 3, "hash_ids": [1, 2]}
//! {"timestamp": 3000, "input_length": 900, "output_length": 5, "hash_ids": [1, 7]}"#;
//! let requests = TraceReader::new(Path::new("two lines"), lines.as_bytes()).read_requests(10)?;
//!
//! let (arrival, prompt) = &requests[1];
//! assert_eq!((arrival.at_ms, arrival.input, arrival.cached_tokens()), (2000.0, 900, 904)); // times count from the first
//! // Equal first ids: the first 512 tokens of both prompts are the same.
//! let of_first = requests[0].1.as_ref().map(|prompt| prompt.hash_ids[0]);
//! assert_eq!(of_first, prompt.as_ref().map(|prompt| prompt.hash_ids[0]));
//! # Ok::<(), dsv4_kv_trace::TraceError>(())
//! ```
//!
//! Source: github.com/kvcache-ai/Mooncake, `FAST25-release/traces`.

use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};

/// One request of a load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Arrival {
    /// Arrival time, in milliseconds of virtual time.
    pub at_ms: f64,
    /// Number of prompt tokens, at least 1.
    pub input: u32,
    /// Number of generated tokens, at least 1.
    pub output: u32,
}

impl Arrival {
    /// Number of tokens in the cache when the request ends. The last generated token is never fed back, so it is not
    /// cached.
    #[must_use]
    pub fn cached_tokens(&self) -> u32 {
        self.input.saturating_add(self.output).saturating_sub(1)
    }

    /// The same request in a load that is `factor` times smaller and arrives `speed` times faster. Both lengths and the
    /// arrival time are divided by `factor`, so that as many requests run at once. No length becomes less than 1.
    ///
    /// # Errors
    /// [`TooLong`] if the sum of the lengths exceeds [`u32::MAX`], which only a `factor` below 1 can cause.
    pub fn shrunk(self, factor: f64, speed: f64) -> Result<Self, TooLong> {
        // The conversion saturates; the checked sum below does not.
        let length = |tokens: u32| ((f64::from(tokens) / factor).ceil() as u32).max(1);
        let (input, output) = (length(self.input), length(self.output));
        if input.checked_add(output).is_none() {
            return Err(TooLong { input: self.input, output: self.output, factor });
        }
        Ok(Self { at_ms: self.at_ms / factor / speed, input, output })
    }
}

/// The prompt of a request, as far as a trace describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// Length in tokens.
    pub tokens: u32,
    /// One id per [`HASH_TOKENS`] tokens. Prompts with equal first ids have the tokens of these ids in common.
    pub hash_ids: Vec<u64>,
}

/// A request that is too long after its lengths are divided.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error(
    "input_length {input} and output_length {output}, divided by {factor}, pass {} together",
    u32::MAX
)]
pub struct TooLong {
    input: u32,
    output: u32,
    factor: f64,
}

/// Most bytes of a line, without its line end.
pub const MAX_LINE_BYTES: usize = 1 << 20;
/// Most requests of a load.
pub const MAX_REQUESTS: u32 = 1_000_000;

/// Input tokens that one element of `hash_ids` stands for.
pub const HASH_TOKENS: u32 = 512;

/// Why a trace cannot be used, and in which file and line.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}", Place { path, line: *line })]
pub struct TraceError {
    /// The file.
    path: PathBuf,
    /// The line, counted from 1; 0 for the file as a whole.
    line: u64,
    problem: Problem,
}

/// The place of an error, as it is printed: a line of a file, or the file.
struct Place<'a> {
    path: &'a Path,
    line: u64,
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}", self.path.display()),
            line => write!(f, "{}:{line}", self.path.display()),
        }
    }
}

/// What is wrong with a line.
#[derive(Debug, thiserror::Error)]
enum Problem {
    #[error("{0}; give a trace in Mooncake's format")]
    Read(#[from] io::Error),
    #[error(
        "column {}: {}; a line is a JSON object with timestamp, input_length and output_length",
        .0.column(), without_location(.0)
    )]
    Json(#[from] serde_json::Error),
    #[error("{field} is 0; a request has at least one token of each")]
    ZeroLength { field: &'static str },
    #[error("input_length + output_length is over {}", u32::MAX)]
    TooLong,
    #[error("timestamp {now} comes after {last}; timestamps must not go backwards")]
    Backwards { now: u64, last: u64 },
    #[error("hash_ids has {found} elements; {input} input tokens make {expected} of 512 tokens")]
    HashCount { found: usize, expected: u32, input: u32 },
    #[error("it has no hash_ids, which say what prompts have in common")]
    NoHashIds,
    #[error("the line is longer than {MAX_LINE_BYTES} bytes; a trace has one JSON object a line")]
    LongLine,
    #[error(
        "the trace has more than {MAX_REQUESTS} requests; replay its first ones with --requests"
    )]
    ManyRequests,
    #[error("the trace has no requests; it needs at least one line")]
    Empty,
}

/// The message without serde's line number. Each line is a JSON document of its own, so that number is always 1.
fn without_location(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let location = format!(" at line {} column {}", error.line(), error.column());
    text.strip_suffix(&location).map_or(text.clone(), str::to_owned)
}

#[derive(Deserialize)]
struct Line<I> {
    timestamp: u64,
    input_length: u32,
    output_length: u32,
    hash_ids: Option<Vec<I>>,
}

/// The requests of a trace, in order; times count from the first.
pub struct TraceReader<R = BufReader<File>> {
    path: PathBuf,
    from: R,
    /// The line being read.
    text: Vec<u8>,
    line: u64,
    first: Option<u64>,
    last: u64,
}

impl TraceReader {
    /// Opens a trace.
    ///
    /// # Errors
    /// [`TraceError`] if there is no such file, or it may not be read.
    pub fn open(path: &Path) -> Result<Self, TraceError> {
        let failed = |error| TraceError { path: path.into(), line: 0, problem: error };
        let file = File::open(path).map_err(|error| failed(error.into()))?;
        Ok(Self::new(path, BufReader::new(file)))
    }
}

impl<R: BufRead> TraceReader<R> {
    /// Reads a trace from any reader. `path` names the trace in errors.
    pub fn new(path: &Path, from: R) -> Self {
        Self { path: path.into(), from, text: Vec::new(), line: 0, first: None, last: 0 }
    }

    /// Reads the first `limit` requests, or all if there are fewer; at least one.
    ///
    /// # Errors
    /// [`TraceError`] of the first line that is not a request; also if the trace has no request, or more than
    /// [`MAX_REQUESTS`] requests within `limit`.
    pub fn read(mut self, limit: usize) -> Result<Vec<Arrival>, TraceError> {
        self.read_all(limit, Self::next)
    }

    /// Reads the prompts of the first `limit` requests, or of all if there are fewer; at least one.
    ///
    /// # Errors
    /// As [`Self::read`]; [`TraceError`] of the first line without `hash_ids`.
    pub fn read_prompts(mut self, limit: usize) -> Result<Vec<Prompt>, TraceError> {
        self.read_all(limit, |reader| {
            reader.next_line(|reader| {
                let (arrival, hash_ids) = reader.parse()?;
                let hash_ids = hash_ids.ok_or(Problem::NoHashIds)?;
                Ok(Prompt { tokens: arrival.input, hash_ids })
            })
        })
    }

    /// Reads the first `limit` requests, or all if there are fewer; at least one. A request also has its prompt if its
    /// line has `hash_ids`.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn read_requests(
        mut self,
        limit: usize,
    ) -> Result<Vec<(Arrival, Option<Prompt>)>, TraceError> {
        self.read_all(limit, |reader| {
            reader.next_line(|reader| {
                let (arrival, hash_ids) = reader.parse()?;
                let tokens = arrival.input;
                Ok((arrival, hash_ids.map(|hash_ids| Prompt { tokens, hash_ids })))
            })
        })
    }

    /// Calls `next` until it returns `None`, at most `limit` times, and collects the results.
    fn read_all<T>(
        &mut self,
        limit: usize,
        mut next: impl FnMut(&mut Self) -> Option<Result<T, TraceError>>,
    ) -> Result<Vec<T>, TraceError> {
        let most = limit.min(MAX_REQUESTS as usize + 1);
        let all = std::iter::from_fn(|| next(self)).take(most).collect::<Result<Vec<_>, _>>()?;
        let problem = match all.len() {
            0 => Problem::Empty,
            requests if requests > MAX_REQUESTS as usize => Problem::ManyRequests,
            _ => return Ok(all),
        };
        Err(self.located(problem))
    }

    /// Reads the next line and applies `parse` to it; `None` at the end of the trace.
    fn next_line<T>(
        &mut self,
        parse: impl FnOnce(&mut Self) -> Result<T, Problem>,
    ) -> Option<Result<T, TraceError>> {
        let read = self.read_line();
        if let Ok(false) = read {
            return None;
        }
        self.line += 1;
        Some(read.and_then(|_| parse(self)).map_err(|problem| self.located(problem)))
    }

    /// Reads the next line; false at the end of the trace.
    fn read_line(&mut self) -> Result<bool, Problem> {
        self.text.clear();
        let longest = MAX_LINE_BYTES as u64 + 1;
        if self.from.by_ref().take(longest).read_until(b'\n', &mut self.text)? == 0 {
            return Ok(false);
        }
        if self.text.last() == Some(&b'\n') {
            self.text.pop();
        }
        if self.text.len() > MAX_LINE_BYTES { Err(Problem::LongLine) } else { Ok(true) }
    }

    /// Adds the file and the line to an error. An error of reading (a folder, a failing disk) gets no line, as it is
    /// not an error of that line.
    fn located(&self, problem: Problem) -> TraceError {
        let line = if matches!(problem, Problem::Read(_)) { 0 } else { self.line };
        TraceError { path: self.path.clone(), line, problem }
    }

    fn parse<I: DeserializeOwned>(&mut self) -> Result<(Arrival, Option<Vec<I>>), Problem> {
        let line: Line<I> = serde_json::from_slice(&self.text)?;
        let (input, output) = (line.input_length, line.output_length);
        for (field, length) in [("input_length", input), ("output_length", output)] {
            if length == 0 {
                return Err(Problem::ZeroLength { field });
            }
        }
        input.checked_add(output).ok_or(Problem::TooLong)?;
        let expected = input.div_ceil(HASH_TOKENS);
        let found = line.hash_ids.as_ref().map(Vec::len);
        if let Some(found) = found.filter(|&found| found != expected as usize) {
            return Err(Problem::HashCount { found, expected, input });
        }
        if line.timestamp < self.last {
            return Err(Problem::Backwards { now: line.timestamp, last: self.last });
        }
        self.last = line.timestamp;
        let first = *self.first.get_or_insert(line.timestamp);
        Ok((Arrival { at_ms: (line.timestamp - first) as f64, input, output }, line.hash_ids))
    }
}

impl<R: BufRead> Iterator for TraceReader<R> {
    type Item = Result<Arrival, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_line(|reader| Ok(reader.parse::<IgnoredAny>()?.0))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn read(lines: &[&str]) -> Result<Vec<Arrival>, String> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(lines.join("\n").as_bytes()).unwrap();
        let read = TraceReader::open(file.path()).and_then(|reader| reader.read(usize::MAX));
        read.map_err(|error| {
            let path = file.path().display().to_string();
            error.to_string().strip_prefix(&path).expect("the path comes first").to_owned()
        })
    }

    const GOOD: &str =
        r#"{"timestamp": 100, "input_length": 513, "output_length": 7, "hash_ids": [0, 1]}"#;

    #[test]
    fn requests_are_read_in_order_and_counted_from_the_first() {
        let second = r#"{"timestamp":250,"input_length":1,"output_length":2,"extra":null}"#;
        let expected = [
            Arrival { at_ms: 0.0, input: 513, output: 7 },
            Arrival { at_ms: 150.0, input: 1, output: 2 },
        ];
        assert_eq!(read(&[GOOD, second]).unwrap(), expected);
    }

    #[test]
    fn prompts_have_their_hash_ids() {
        let prompts =
            |text: &str| TraceReader::new(Path::new("t"), text.as_bytes()).read_prompts(9);
        let found = prompts(GOOD).unwrap();
        assert_eq!(found, [Prompt { tokens: 513, hash_ids: vec![0, 1] }]);
        let without = r#"{"timestamp": 100, "input_length": 4, "output_length": 1}"#;
        let error = prompts(&format!("{GOOD}\n{without}")).unwrap_err().to_string();
        assert!(error.starts_with("t:2: it has no hash_ids"), "{error}");
    }

    #[test]
    fn a_request_has_a_prompt_where_its_line_has_hash_ids() {
        let without = r#"{"timestamp": 100, "input_length": 4, "output_length": 1}"#;
        let text = format!("{GOOD}\n{without}");
        let reader = TraceReader::new(Path::new("t"), text.as_bytes());
        let found = reader.read_requests(9).unwrap();
        let prompts: Vec<_> = found.into_iter().map(|(_, prompt)| prompt).collect();
        assert_eq!(prompts, [Some(Prompt { tokens: 513, hash_ids: vec![0, 1] }), None]);
    }

    #[test]
    fn each_fault_is_told_with_its_line() {
        let faults = [
            (
                r#"{"timestamp": 100, "input_length": 4}"#,
                "column 37: missing field `output_length`",
            ),
            (r#"{"timestamp": 100, "input_length": 0, "output_length": 1}"#, "input_length is 0"),
            (r#"{"timestamp": 100, "input_length": 1, "output_length": 0}"#, "output_length is 0"),
            (r#"{"timestamp": 99, "input_length": 1, "output_length": 1}"#, "99 comes after 100"),
            (
                r#"{"timestamp": 100, "input_length": 513, "output_length": 1, "hash_ids": [5]}"#,
                "hash_ids has 1 elements; 513 input tokens make 2",
            ),
            (
                r#"{"timestamp": 100, "input_length": 4294967295, "output_length": 1}"#,
                "is over 4294967295",
            ),
            (r#"{"timestamp": -1, "input_length": 1, "output_length": 1}"#, "invalid value"),
            ("{", "EOF while parsing"),
            ("", "EOF while parsing"),
        ];
        for (line, message) in faults {
            let error = read(&[GOOD, line, GOOD]).unwrap_err();
            assert!(error.starts_with(":2: ") && error.contains(message), "{line}: {error}");
        }
    }

    #[test]
    fn a_line_of_the_longest_length_is_read_and_a_longer_one_is_not() {
        let padded = |bytes: usize| format!("{GOOD}{}", " ".repeat(bytes - GOOD.len()));
        for end in ["", "\n", "\r\n"] {
            let longest = padded(MAX_LINE_BYTES - end.len().saturating_sub(1)) + end;
            assert_eq!(read(&[&longest]).map(|requests| requests.len()), Ok(1));
        }
        let error = read(&[GOOD, &padded(MAX_LINE_BYTES + 1)]).unwrap_err();
        assert!(
            error.starts_with(":2: ") && error.contains("longer than 1048576 bytes"),
            "{error}"
        );
    }

    #[test]
    fn bytes_that_are_no_text_are_an_error() {
        let trace = TraceReader::new(Path::new("t"), &b"{\"timestamp\": \xff}"[..]);
        assert!(trace.read(1).is_err_and(|error| error.to_string().starts_with("t:1: column")));
    }

    #[test]
    fn an_empty_trace_and_a_missing_file_are_errors() {
        assert!(read(&[]).unwrap_err().starts_with(": the trace has no requests"));
        let missing = TraceReader::open(Path::new("no/such/trace.jsonl")).err();
        let missing = missing.expect("an error").to_string();
        assert!(missing.starts_with("no/such/trace.jsonl: No such file"), "{missing}");
    }

    #[test]
    fn a_folder_is_an_error_of_the_file_and_of_no_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let error = TraceReader::open(path).and_then(|reader| reader.read(1)).unwrap_err();
        let expected = format!("{}: Is a directory", path.display());
        assert!(error.to_string().starts_with(&expected), "{error}");
    }

    #[test]
    fn shrinking_divides_lengths_and_times_and_leaves_at_least_a_token() {
        let arrival = Arrival { at_ms: 640.0, input: 129, output: 3 };
        let expected = Arrival { at_ms: 5.0, input: 3, output: 1 };
        assert_eq!(arrival.shrunk(64.0, 2.0), Ok(expected));
    }

    #[test]
    fn a_request_that_grows_too_long_is_an_error() {
        let arrival = Arrival { at_ms: 0.0, input: 3_000_000_000, output: 5 };
        let message = arrival.shrunk(0.5, 1.0).expect_err("6 billion tokens").to_string();
        let expected =
            "input_length 3000000000 and output_length 5, divided by 0.5, pass 4294967295";
        assert!(message.starts_with(expected), "{message}");
        let half = Arrival { at_ms: 0.0, input: u32::MAX / 2, output: 1 };
        assert_eq!(
            half.shrunk(0.5, 1.0).map(|a| a.input),
            Err(TooLong { input: half.input, output: 1, factor: 0.5 })
        );
        assert_eq!(half.shrunk(1.0, 1.0), Ok(half));
        for factor in [f64::INFINITY, f64::NAN, -1.0] {
            let least = half.shrunk(factor, 1.0).expect("short");
            assert_eq!((least.input, least.output, least.cached_tokens()), (1, 1, 1));
        }
    }
}
