//! A server in a thread, and a client of plain HTTP/1.1.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use dsv4_kv_device::Backend;
use dsv4_kv_model::Engine;
use dsv4_kv_model::text::Text;
use dsv4_kv_server::scheduler::SchedulerLimits;
use dsv4_kv_server::{Ended, Server, ServerError, Settings};
use serde_json::Value;

use crate::small::{self, HASH};

/// Longest wait of a test.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A running server.
pub struct Running {
    pub address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Ended, ServerError>>,
}

/// The settings of the servers in these tests.
pub fn settings() -> Settings {
    Settings {
        cold: None,
        model: "small/hash".into(),
        end: Vec::new(),
        drafts: 2,
        scheduler: SchedulerLimits { chunk: 24, waiting: 8 },
        body_bytes: 4096,
        keep_alive: None,
        shutdown_timeout: TIMEOUT,
    }
}

impl Running {
    /// A server of the small model with `requests` slots.
    pub fn start(requests: u32, settings: Settings) -> Self {
        let limits = small::limits(requests, 16);
        Self::of(small::engine(&small::emulated(), &HASH, limits), settings)
    }

    /// A server of an engine.
    pub fn of<B: Backend>(engine: Engine<B>, settings: Settings) -> Self {
        let server = Server::bind("127.0.0.1:0", engine, Text::Bytes, settings);
        let server = server.expect("a server");
        let address = server.address().expect("an address");
        let stop = Arc::new(AtomicBool::new(false));
        let asked = Arc::clone(&stop);
        let thread = thread::spawn(move || server.run(|| asked.load(Ordering::Relaxed)));
        Self { address, stop, thread }
    }

    /// Requests a shutdown.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Waits until the server ends by itself, at most for `most`.
    pub fn ended_within(self, most: Duration) -> Result<Ended, ServerError> {
        let begin = Instant::now();
        while !self.thread.is_finished() {
            assert!(begin.elapsed() < most, "it does not end");
            thread::sleep(Duration::from_millis(20));
        }
        self.thread.join().expect("no panic")
    }

    /// Requests a shutdown, and waits for it.
    pub fn ended(self) -> Ended {
        self.stop();
        self.thread.join().expect("no panic").expect("no failure")
    }

    /// Sends a request and reads the answer's head.
    pub fn send(&self, method: &str, path: &str, body: &str) -> Answer {
        self.send_as("application/json", method, path, body)
    }

    pub fn send_as(&self, kind: &str, method: &str, path: &str, body: &str) -> Answer {
        let connection = self.begin(kind, method, path, body);
        Answer::read(connection)
    }

    /// A connection.
    pub fn connect(&self) -> TcpStream {
        let connection = TcpStream::connect(self.address).expect("a connection");
        connection.set_read_timeout(Some(TIMEOUT)).expect("a limit");
        connection
    }

    /// Sends a request.
    pub fn begin(&self, kind: &str, method: &str, path: &str, body: &str) -> TcpStream {
        let mut connection = self.connect();
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-type: {kind}\r\n\
             content-length: {length}\r\n\r\n"
        );
        connection.write_all(head.as_bytes()).expect("the head is sent");
        // A server that refuses the head may not read the body.
        let _ = connection.write_all(body.as_bytes());
        connection
    }

    /// A completion, in one answer.
    pub fn complete(&self, body: &Value) -> Value {
        let answer = self.send("POST", "/v1/completions", &body.to_string());
        let (status, text) = (answer.status, answer.text());
        assert_eq!(status, 200, "{text}");
        serde_json::from_str(&text).expect("JSON")
    }

    /// A counter or gauge of `/metrics`.
    pub fn metric(&self, name: &str) -> u64 {
        let text = self.send("GET", "/metrics", "").text();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|value| value.parse::<f64>().ok()).unwrap_or_else(|| panic!("{text}")) as u64
    }

    /// Waits until a metric has a value.
    pub fn wait_for(&self, name: &str, expected: u64) {
        let begin = Instant::now();
        while self.metric(name) != expected {
            assert!(begin.elapsed() < TIMEOUT, "{name} never becomes {expected}");
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// An answer whose head was read.
pub struct Answer {
    pub status: u16,
    pub head: String,
    body: BufReader<TcpStream>,
}

impl Answer {
    pub fn read(connection: TcpStream) -> Self {
        let mut body = BufReader::new(connection);
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            let read = body.read_line(&mut head).expect("a head");
            assert!(read > 0, "the head ends early: {head}");
        }
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        Self { status: status.expect("a status"), head: head.to_lowercase(), body }
    }

    /// The whole body.
    pub fn text(mut self) -> String {
        let mut text = String::new();
        if self.head.contains("transfer-encoding: chunked") {
            while let Some(chunk) = self.chunk() {
                text += &chunk;
            }
        } else {
            self.body.read_to_string(&mut text).expect("a body");
        }
        text
    }

    /// The next chunk of the body.
    pub fn chunk(&mut self) -> Option<String> {
        let mut line = String::new();
        self.body.read_line(&mut line).expect("a length");
        let length = usize::from_str_radix(line.trim(), 16).ok()?;
        let mut chunk = vec![0; length + 2];
        self.body.read_exact(&mut chunk).expect("a chunk");
        chunk.truncate(length);
        (length > 0).then(|| String::from_utf8(chunk).expect("text"))
    }

    pub fn json(self) -> Value {
        serde_json::from_str(&self.text()).expect("JSON")
    }

    /// The data of a stream's events.
    pub fn events(self) -> Vec<String> {
        let text = self.text();
        let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
        data.map(Into::into).collect()
    }
}
