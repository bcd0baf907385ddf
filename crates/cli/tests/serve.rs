//! The command `serve`: its address, signals and exit codes. Only in builds with the feature `serve`.
#![cfg(feature = "serve")]

mod serving;

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant};

use serving::{Serving, checkpoint, command};

fn start(options: &str) -> Serving {
    Serving::start(&checkpoint(), options)
}

/// Requests a streamed completion of `tokens` tokens.
fn stream(serving: &Serving, tokens: u32) -> TcpStream {
    let body =
        format!(r#"{{"model": "hash", "prompt": "a", "max_tokens": {tokens}, "stream": true}}"#);
    serving.complete(&body)
}

/// Tokens of a completion during which a signal is sent: they take seconds.
const TOKENS: u32 = 40;

#[test]
fn a_signal_ends_a_server_when_all_is_done() {
    for signal in ["TERM", "INT"] {
        let serving = start("");
        let mut connection = stream(&serving, TOKENS);
        serving.signal(signal);
        wait_for_shutdown(&serving);
        let mut answer = arrived(&mut connection);
        assert!(!is_done(&answer), "the signal comes too late");
        connection.read_to_end(&mut answer).expect("the stream ends");
        assert!(is_done(&answer), "{}", String::from_utf8_lossy(&answer));
        assert_eq!(serving.exit_code(), Some(0));
    }
}

/// A signal ends a program that still reads its model.
#[test]
fn a_signal_ends_a_server_that_loads() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let config = folder.path().join("config.json");
    assert!(Command::new("mkfifo").arg(&config).status().expect("mkfifo").success());
    let mut program = command(folder.path(), "").spawn().expect("a program");
    // Opens when the program opens it to read, which then waits for its content.
    let _unfinished = File::options().write(true).open(&config).expect("a reader");
    let kill = Command::new("kill").args(["-s", "TERM", &program.id().to_string()]).status();
    assert!(kill.expect("kill").success());
    let deadline = Instant::now() + Duration::from_secs(20);
    let ended = loop {
        match program.try_wait().expect("a child") {
            None if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(20)),
            ended => break ended,
        }
    };
    let _ = program.kill();
    assert_eq!(ended.expect("the signal ends it").code(), None, "by the signal");
}

#[test]
fn what_takes_too_long_is_cut_and_a_second_signal_ends_at_once() {
    let serving = start("--shutdown-timeout 0");
    let mut connection = stream(&serving, 1000);
    serving.signal("TERM");
    let mut answer = String::new();
    connection.read_to_string(&mut answer).expect("the stream ends");
    assert!(answer.contains("shutting_down") && !answer.contains("[DONE]"), "{answer}");
    assert_eq!(serving.exit_code(), Some(130));

    for (signal, code) in [("TERM", 143), ("INT", 130)] {
        let serving = start("--shutdown-timeout 1000");
        let _connection = stream(&serving, 1000);
        serving.signal("TERM");
        // The two signals must not be merged into one.
        wait_for_shutdown(&serving);
        serving.signal(signal);
        assert_eq!(serving.exit_code(), Some(code));
    }
}

/// The bytes that have arrived on a connection, without waiting for more.
fn arrived(connection: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    connection.set_nonblocking(true).expect("a mode");
    let end = connection.read_to_end(&mut bytes).expect_err("the stream has not ended");
    assert_eq!(end.kind(), ErrorKind::WouldBlock);
    connection.set_nonblocking(false).expect("a mode");
    bytes
}

/// Whether a stream has ended as it should.
fn is_done(answer: &[u8]) -> bool {
    String::from_utf8_lossy(answer).contains("data: [DONE]")
}

/// Waits until a server has handled a signal, and refuses new requests.
fn wait_for_shutdown(serving: &Serving) {
    let begin = Instant::now();
    while !get(serving, "/health").starts_with("HTTP/1.1 503") {
        assert!(begin.elapsed() < Duration::from_secs(100), "the server does not shut down");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The answer to a GET of a path.
fn get(serving: &Serving, path: &str) -> String {
    let (mut connection, mut answer) = (serving.connect(), String::new());
    write!(connection, "GET {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n")
        .expect("it is sent");
    connection.read_to_string(&mut answer).expect("an answer");
    answer
}

/// A server reuses what an earlier server has computed, and gives the same answers.
#[test]
fn prefixes_outlive_a_server() {
    let directory = tempfile::tempdir().expect("a directory");
    let url = directory.path().display();
    let options = format!("--checkpoints 4 --host-cache 16MiB --cold-cache {url}");
    let prompt = "once upon a time ".repeat(8);
    let body =
        format!(r#"{{"model": "hash", "prompt": "{prompt}", "max_tokens": 4, "temperature": 0}}"#);
    let answers = [0, 128].map(|restored| {
        let serving = start(&options);
        let mut answer = String::new();
        serving.complete(&body).read_to_string(&mut answer).expect("an answer");
        let metrics = get(&serving, "/metrics");
        let counted = format!("dsv4_kv_cold_restored_tokens_total {restored}\n");
        assert!(metrics.contains(&counted), "{metrics}");
        serving.signal("TERM");
        assert_eq!(serving.exit_code(), Some(0));
        assert!(answer.contains(&format!(r#""cached_tokens":{restored}"#)), "{answer}");
        let text = answer.split(r#""text":"#).nth(1).expect("a text");
        text.split(r#","index":"#).next().expect("its end").to_owned()
    });
    assert_eq!(answers[0], answers[1]);
}

/// Graphs are not longer than the longest step.
#[test]
fn graphs_fit_the_steps() {
    // Two completions of eight tokens each would have 16.
    let serving = start("--graphs --draft 7 --max-step-tokens 8");
    let mut answer = String::new();
    let body = r#"{"model": "hash", "prompt": "abab", "max_tokens": 4, "temperature": 0}"#;
    serving.complete(body).read_to_string(&mut answer).expect("an answer");
    assert!(answer.contains(r#""completion_tokens":4"#), "{answer}");
    serving.signal("TERM");
    assert_eq!(serving.exit_code(), Some(0));
}

#[test]
fn what_cannot_be_served_is_refused() {
    let refusals = [
        ("--max-step-tokens 1 --max-requests 2", "steps of 1 tokens do not hold one of each of 2"),
        ("--listen 256.0.0.1:1", "--listen 256.0.0.1:1: "),
        ("--listen nowhere", "give an address and a port, as in 127.0.0.1:8000"),
        ("--host-cache 1GiB", "--host-cache 1.0 GiB needs --checkpoints"),
        ("--context 1048577", "from 1 to 1048576"),
        ("--max-requests 0", "from 1 to 65535"),
        ("--cold-cache /tmp", "--cold-cache needs --host-cache"),
        ("--cold-timeout 3", "--cold-cache <URL>"),
        ("--attention-cluster one-block", "--attention-cluster needs attention on the device"),
        (
            "--graphs --draft 3 --max-step-tokens 2 --max-requests 1",
            "--graphs needs --max-step-tokens of at least 4",
        ),
    ];
    for (options, message) in refusals {
        let output = command(&checkpoint(), options).output().expect("a program");
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{options}: {error}");
        assert!(error.contains(message), "{options}: {error}");
        assert!(output.stdout.is_empty());
    }
}
