//! A server that a test starts as a program.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use assert_cmd::cargo::cargo_bin;

/// The small checkpoint whose routing has no selection by score.
pub fn checkpoint() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/e2e/hash")
}

/// The command `serve` on the CPU.
pub fn command(checkpoint: &Path, options: &str) -> Command {
    let mut command = Command::new(cargo_bin("dsv4-kv"));
    command.args(["serve", "--device", "cpu", "--model"]).arg(checkpoint);
    command.args(options.split_whitespace());
    command
}

/// A running server, and its address.
pub struct Serving {
    program: Child,
    address: String,
}

impl Serving {
    /// Starts a server of the checkpoint, under the name of its folder.
    pub fn start(checkpoint: &Path, options: &str) -> Self {
        let options = format!("--listen 127.0.0.1:0 --context 1024 --max-requests 2 {options}");
        let mut program =
            command(checkpoint, &options).stdout(Stdio::piped()).spawn().expect("a program");
        let mut line = String::new();
        let stdout = program.stdout.take().expect("a pipe");
        BufReader::new(stdout).read_line(&mut line).expect("a line");
        let address = line.split("http://").nth(1).and_then(|rest| rest.split(' ').next());
        let address = address.unwrap_or_else(|| panic!("no address in {line:?}")).to_owned();
        let name = checkpoint.file_name().expect("a name").to_string_lossy();
        assert!(line.starts_with(&format!("serving `{name}` at ")), "{line}");
        Self { program, address }
    }

    /// Sends a request for completions, and waits for the first bytes of the answer.
    pub fn complete(&self, body: &str) -> TcpStream {
        let mut connection = self.connect();
        let length = body.len();
        let head = "POST /v1/completions HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\
                    content-type: application/json\r\n";
        write!(connection, "{head}content-length: {length}\r\n\r\n{body}").expect("it is sent");
        let mut first = [0; 12];
        connection.read_exact(&mut first).expect("a status");
        assert_eq!(first, *b"HTTP/1.1 200");
        connection
    }

    /// A connection with a timeout that is long enough for an answer.
    pub fn connect(&self) -> TcpStream {
        let connection = TcpStream::connect(&self.address).expect("a connection");
        connection.set_read_timeout(Some(Duration::from_secs(100))).expect("a limit");
        connection
    }

    /// Sends a signal.
    pub fn signal(&self, name: &str) {
        let pid = self.program.id().to_string();
        let sent = Command::new("kill").args(["-s", name, &pid]).status().expect("kill");
        assert!(sent.success());
    }

    /// Waits for its end. Returns its exit code.
    pub fn exit_code(mut self) -> Option<i32> {
        self.program.wait().expect("an end").code()
    }
}

impl Drop for Serving {
    /// Ends the server with its test.
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}
