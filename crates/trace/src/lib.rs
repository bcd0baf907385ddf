//! Mooncake-format traces: one JSON object a line, read as a stream.
//!
//! | field | unit | |
//! |---|---|---|
//! | `timestamp` | ms | a whole number, also if written as `5.0`; never decreases |
//! | `input_length` | tokens | at least 1 |
//! | `output_length` | tokens | at least 1 |
//! | `hash_ids` | one per 512 input tokens | may be absent, except where [`Prompt`]s are read; equal ids at equal indices are equal tokens |
//!
//! A line has at most [`MAX_LINE_BYTES`]. Lines of only white space are skipped; together they have no more bytes than
//! that either. A trace that is read as a whole has at most [`MAX_REQUESTS`].
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
//! assert_eq!((arrival.at_ms, arrival.input, arrival.context_tokens()), (2000.0, 900, 904)); // times count from the first
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

use serde::de::{DeserializeOwned, Error as _, IgnoredAny, Unexpected};
use serde::{Deserialize, Deserializer};

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
    /// Number of tokens in the cache when the request ends: prompt and output without the last generated token, which
    /// is never fed back.
    #[must_use]
    pub fn context_tokens(&self) -> u32 {
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
    #[error("{what}; a line is a JSON object with timestamp, input_length and output_length")]
    NoObject { what: &'static str },
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
    #[error(
        "the trace has more than {MAX_LINE_BYTES} bytes of blank lines; a trace has one JSON object a line"
    )]
    BlankLines,
    #[error("the trace has no requests; it needs at least one")]
    Empty,
}

/// The message without serde's line number. Each line is a JSON document of its own, so that number is always 1.
fn without_location(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let location = format!(" at line {} column {}", error.line(), error.column());
    text.strip_suffix(&location).map_or(text.clone(), str::to_owned)
}

/// What a line is that does not begin as an object. Serde would take a list for one, with the fields in order.
fn no_object(line: &[u8]) -> Option<&'static str> {
    match line {
        [b'{', ..] => None,
        [0x1f, 0x8b, ..] => Some("the file is compressed by gzip: unpack it first"),
        [0xef, 0xbb, 0xbf, ..] => Some("it begins with a byte order mark: remove it"),
        _ => Some("it does not begin with `{`"),
    }
}

#[derive(Deserialize)]
struct Line<I> {
    #[serde(deserialize_with = "milliseconds")]
    timestamp: u64,
    input_length: u32,
    output_length: u32,
    hash_ids: Option<Vec<I>>,
}

/// A whole number of milliseconds. Some programs write it as a float.
fn milliseconds<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    let number = serde_json::Number::deserialize(from)?;
    // Up to 2^53 every whole number is a float.
    let is_whole =
        |float: &f64| float.fract() == 0.0 && (0.0..=9_007_199_254_740_992.0).contains(float);
    let float = || number.as_f64().filter(is_whole).map(|float| float as u64);
    number.as_u64().or_else(float).ok_or_else(|| {
        let found = number.to_string();
        D::Error::invalid_value(Unexpected::Other(&found), &"a whole number of milliseconds")
    })
}

/// The requests of a trace, in order; times count from the first.
pub struct TraceReader<R = BufReader<File>> {
    path: PathBuf,
    from: R,
    /// The line being read.
    text: Vec<u8>,
    line: u64,
    /// Bytes of the blank lines so far.
    blank: usize,
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
        let path = path.into();
        Self { path, from, text: Vec::new(), line: 0, blank: 0, first: None, last: 0 }
    }

    /// Reads the first `limit` requests, or all if there are fewer.
    ///
    /// # Errors
    /// [`TraceError`] of the first line that is not a request; also if `limit` is not 0 and the trace has no request, or
    /// if it has more than [`MAX_REQUESTS`] requests within `limit`.
    pub fn read(mut self, limit: usize) -> Result<Vec<Arrival>, TraceError> {
        self.read_all(limit, Self::next)
    }

    /// Reads the prompts of the first `limit` requests, or of all if there are fewer.
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

    /// Reads the first `limit` requests, or all if there are fewer. A request also has its prompt if its line has
    /// `hash_ids`.
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
            0 if limit > 0 => Problem::Empty,
            requests if requests > MAX_REQUESTS as usize => Problem::ManyRequests,
            _ => return Ok(all),
        };
        Err(self.located(problem))
    }

    /// Reads the next line that is not blank and applies `parse` to it; `None` at the end of the trace.
    fn next_line<T>(
        &mut self,
        parse: impl FnOnce(&mut Self) -> Result<T, Problem>,
    ) -> Option<Result<T, TraceError>> {
        let read = self.read_line().transpose()?;
        Some(read.and_then(|()| parse(self)).map_err(|problem| self.located(problem)))
    }

    /// Reads the next line that is not blank; `None` at the end of the trace.
    fn read_line(&mut self) -> Result<Option<()>, Problem> {
        while self.read_any_line()? {
            if !self.text.trim_ascii().is_empty() {
                return Ok(Some(()));
            }
            // An endless file of line ends must end with an error.
            self.blank += self.text.len() + 1;
            if self.blank > MAX_LINE_BYTES {
                return Err(Problem::BlankLines);
            }
        }
        Ok(None)
    }

    /// Reads the next line; false at the end of the trace.
    fn read_any_line(&mut self) -> Result<bool, Problem> {
        self.text.clear();
        let longest = MAX_LINE_BYTES as u64 + 1;
        if self.from.by_ref().take(longest).read_until(b'\n', &mut self.text)? == 0 {
            return Ok(false);
        }
        self.line += 1;
        if self.text.last() == Some(&b'\n') {
            self.text.pop();
        }
        if self.text.len() > MAX_LINE_BYTES { Err(Problem::LongLine) } else { Ok(true) }
    }

    /// Adds the file and the line to an error. An error of reading (a folder, a failing disk) and an empty trace get no
    /// line, as they are not errors of one.
    fn located(&self, problem: Problem) -> TraceError {
        let of_no_line = matches!(problem, Problem::Read(_) | Problem::Empty);
        let line = if of_no_line { 0 } else { self.line };
        TraceError { path: self.path.clone(), line, problem }
    }

    fn parse<I: DeserializeOwned>(&mut self) -> Result<(Arrival, Option<Vec<I>>), Problem> {
        if let Some(what) = no_object(self.text.trim_ascii_start()) {
            return Err(Problem::NoObject { what });
        }
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
mod tests;
