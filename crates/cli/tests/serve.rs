//! The `serve` command from outside: where it listens, signals and exit codes. In builds with the feature `serve`.
#![cfg(feature = "serve")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use assert_cmd::cargo::cargo_bin;

/// A server that was started, and where it listens.
struct Serving {
    program: Child,
    address: String,
}

fn command(options: &str) -> Command {
    let checkpoint = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/e2e/hash");
    let mut command = Command::new(cargo_bin("dsv4-kv"));
    command.args(["serve", "--device", "cpu", "--checkpoint"]).arg(checkpoint);
    command.args(options.split_whitespace());
    command
}

fn start(options: &str) -> Serving {
    let options = format!("--listen 127.0.0.1:0 --context 1024 --max-requests 2 {options}");
    let mut program = command(&options).stdout(Stdio::piped()).spawn().expect("a program");
    let mut line = String::new();
    let stdout = program.stdout.take().expect("a pipe");
    BufReader::new(stdout).read_line(&mut line).expect("a line");
    let address = line.split("http://").nth(1).and_then(|rest| rest.split(' ').next());
    let address = address.unwrap_or_else(|| panic!("no address in {line:?}")).to_owned();
    assert!(line.starts_with("serving `hash` at "), "{line}");
    Serving { program, address }
}

impl Serving {
    /// Sends a completion of so many tokens, as a stream, and waits for its first bytes.
    fn stream(&self, tokens: u32) -> TcpStream {
        let mut connection = TcpStream::connect(&self.address).expect("a connection");
        connection.set_read_timeout(Some(Duration::from_secs(100))).expect("a limit");
        let body = format!(
            r#"{{"model": "hash", "prompt": "a", "max_tokens": {tokens}, "stream": true}}"#
        );
        let length = body.len();
        let head = "POST /v1/completions HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\
                    content-type: application/json\r\n";
        write!(connection, "{head}content-length: {length}\r\n\r\n{body}").expect("it is sent");
        let mut first = [0; 12];
        connection.read_exact(&mut first).expect("a status");
        assert_eq!(first, *b"HTTP/1.1 200");
        connection
    }

    fn signal(&self, name: &str) {
        let pid = self.program.id().to_string();
        let sent = Command::new("kill").args(["-s", name, &pid]).status().expect("kill");
        assert!(sent.success());
    }

    fn exit_code(mut self) -> Option<i32> {
        self.program.wait().expect("an end").code()
    }
}

#[test]
fn a_signal_ends_a_server_when_all_is_done() {
    for signal in ["TERM", "INT"] {
        let serving = start("");
        let mut connection = serving.stream(20);
        serving.signal(signal);
        let mut answer = String::new();
        connection.read_to_string(&mut answer).expect("the stream ends");
        assert!(answer.contains("data: [DONE]"), "{answer}");
        assert_eq!(serving.exit_code(), Some(0));
    }
}

#[test]
fn what_takes_too_long_is_cut_and_a_second_signal_ends_at_once() {
    let serving = start("--shutdown-timeout 0");
    let mut connection = serving.stream(1000);
    serving.signal("TERM");
    let mut answer = String::new();
    connection.read_to_string(&mut answer).expect("the stream ends");
    assert!(answer.contains("shutting_down") && !answer.contains("[DONE]"), "{answer}");
    assert_eq!(serving.exit_code(), Some(130));

    for (signal, code) in [("TERM", 143), ("INT", 130)] {
        let serving = start("--shutdown-timeout 1000");
        let _connection = serving.stream(1000);
        serving.signal("TERM");
        // The two must not become one.
        std::thread::sleep(Duration::from_millis(300));
        serving.signal(signal);
        assert_eq!(serving.exit_code(), Some(code));
    }
}

#[test]
fn what_cannot_be_served_is_refused() {
    let refusals = [
        ("--step-tokens 1 --max-requests 2", "steps of 1 tokens do not hold one of each of 2"),
        ("--listen 256.0.0.1:1", "the address to listen at"),
        ("--context 1048577", "1048577"),
        ("--max-requests 0", "--max-requests"),
    ];
    for (options, message) in refusals {
        let output = command(options).output().expect("a program");
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{options}: {error}");
        assert!(error.contains(message), "{options}: {error}");
        assert!(output.stdout.is_empty());
    }
}
