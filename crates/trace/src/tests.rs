//! Traces with and without faults.

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
    let prompts = |text: &str| TraceReader::new(Path::new("t"), text.as_bytes()).read_prompts(9);
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
        (r#"{"timestamp": 100, "input_length": 4}"#, "column 37: missing field `output_length`"),
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
        (r#"{"timestamp": 100.5, "input_length": 1, "output_length": 1}"#, "invalid value"),
        (r#"{"timestamp": 1e300, "input_length": 1, "output_length": 1}"#, "invalid value"),
        ("{", "EOF while parsing"),
        ("[100, 513, 7, [0, 1]]", "it does not begin with `{`; a line is a JSON object"),
        ("7", "it does not begin with `{`"),
    ];
    for (line, message) in faults {
        let error = read(&[GOOD, line, GOOD]).unwrap_err();
        assert!(error.starts_with(":2: ") && error.contains(message), "{line}: {error}");
    }
}

#[test]
fn blank_lines_are_skipped_and_counted() {
    let requests = read(&["", GOOD, " \t\r", GOOD, "", ""]).unwrap();
    assert_eq!(requests.len(), 2);
    let error = read(&[GOOD, "", "{"]).unwrap_err();
    assert!(error.starts_with(":3: column 1: EOF"), "{error}");
    let error = read(&["", " "]).unwrap_err();
    assert!(error.starts_with(": the trace has no requests"), "{error}");
    // As many as a line may have bytes, and one more.
    let blank = "\n".repeat(MAX_LINE_BYTES);
    assert_eq!(read(&[&format!("{blank}{GOOD}")]).map(|requests| requests.len()), Ok(1));
    let error = read(&[&format!("\n{blank}{GOOD}")]).unwrap_err();
    assert!(error.starts_with(":1048577: the trace has more than 1048576 bytes of blank lines"));
}

#[test]
fn a_limit_of_no_requests_is_no_empty_trace() {
    for text in ["", GOOD] {
        let reader = || TraceReader::new(Path::new("t"), text.as_bytes());
        assert!(reader().read(0).is_ok_and(|requests| requests.is_empty()));
        assert!(reader().read_prompts(0).is_ok_and(|prompts| prompts.is_empty()));
        assert!(reader().read_requests(0).is_ok_and(|requests| requests.is_empty()));
    }
}

#[test]
fn a_timestamp_may_be_a_float_without_a_fraction() {
    let line =
        |at: &str| format!(r#"{{"timestamp": {at}, "input_length": 1, "output_length": 1}}"#);
    let requests = read(&[&line("1000.0"), &line("27.5e2"), &line("9007199254740992.0")]);
    let times: Vec<_> = requests.unwrap().iter().map(|request| request.at_ms).collect();
    assert_eq!(times, [0.0, 1750.0, 9_007_199_254_739_992.0]);
}

#[test]
fn a_line_of_the_longest_length_is_read_and_a_longer_one_is_not() {
    let padded = |bytes: usize| format!("{GOOD}{}", " ".repeat(bytes - GOOD.len()));
    for end in ["", "\n", "\r\n"] {
        let longest = padded(MAX_LINE_BYTES - end.len().saturating_sub(1)) + end;
        assert_eq!(read(&[&longest]).map(|requests| requests.len()), Ok(1));
    }
    let error = read(&[GOOD, &padded(MAX_LINE_BYTES + 1)]).unwrap_err();
    assert!(error.starts_with(":2: ") && error.contains("longer than 1048576 bytes"), "{error}");
}

/// Files that programs make of a trace, and that look like one.
#[test]
fn a_compressed_file_and_a_byte_order_mark_are_named() {
    let marked = format!("\u{feff}{GOOD}");
    for (bytes, word) in [
        (&[0x1f, 0x8b, 0x08, 0x00, b'\n', 0x03][..], "compressed by gzip: unpack it"),
        (marked.as_bytes(), "a byte order mark: remove it"),
    ] {
        let error = TraceReader::new(Path::new("t"), bytes).read(1).unwrap_err().to_string();
        assert!(error.starts_with("t:1: ") && error.contains(word), "{error}");
    }
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
    let expected = "input_length 3000000000 and output_length 5, divided by 0.5, pass 4294967295";
    assert!(message.starts_with(expected), "{message}");
    let half = Arrival { at_ms: 0.0, input: u32::MAX / 2, output: 1 };
    assert_eq!(
        half.shrunk(0.5, 1.0).map(|a| a.input),
        Err(TooLong { input: half.input, output: 1, factor: 0.5 })
    );
    assert_eq!(half.shrunk(1.0, 1.0), Ok(half));
    for factor in [f64::INFINITY, f64::NAN, -1.0] {
        let least = half.shrunk(factor, 1.0).expect("short");
        assert_eq!((least.input, least.output, least.context_tokens()), (1, 1, 1));
    }
}
