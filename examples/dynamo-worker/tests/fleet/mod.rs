//! A frontend and its workers.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// How long processes may take to find each other, and to answer.
const TIMEOUT: Duration = Duration::from_secs(120);
const MODEL: &str = "hash";

/// Processes that are killed on drop.
pub struct Fleet {
    processes: Vec<Child>,
    port: u16,
    directory: tempfile::TempDir,
}

/// An answer to a client.
#[derive(Debug)]
pub struct Answer {
    pub text: String,
    /// Prompt tokens that the answering worker did not compute.
    pub cached: usize,
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// A checkpoint with the tokenizer files that the frontend needs.
fn checkpoint(directory: &Path) -> std::io::Result<PathBuf> {
    let to = directory.join("model");
    std::fs::create_dir(&to)?;
    for (from, names) in [
        ("../../tests/e2e/hash", &["config.json", "model.safetensors"][..]),
        ("model", &["tokenizer.json", "tokenizer_config.json", "generation_config.json"]),
    ] {
        for name in names {
            std::fs::copy(Path::new(from).join(name), to.join(name))?;
        }
    }
    Ok(to)
}

impl Fleet {
    /// Starts a frontend with this routing mode, and a worker of each mode. Returns after a first answer.
    pub fn start(router: &str, modes: &[&str]) -> Result<Self, String> {
        let python = std::env::var("DSV4_DYNAMO_PYTHON").map_err(|error| error.to_string())?;
        let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
        let model = checkpoint(directory.path()).map_err(|error| error.to_string())?;
        let free = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr());
        let port = free.map_err(|error| error.to_string())?.port();
        let mut fleet = Self { processes: Vec::new(), port, directory };
        let mut frontend = Command::new(python);
        frontend.args(["-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port"]);
        frontend.args([&port.to_string(), "--router-mode", router, "--kv-cache-block-size", "128"]);
        fleet.spawn(&mut frontend)?;
        for mode in modes {
            let mut worker = Command::new(env!("CARGO_BIN_EXE_dynamo-worker"));
            worker.arg("--model").arg(&model).args(["--model-name", MODEL, "--revision", "1"]);
            worker.arg("--exchange").arg(fleet.directory.path().join("exchange"));
            if *mode != "agg" {
                worker.args(["--disaggregation-mode", mode]);
            }
            fleet.spawn(&mut worker)?;
        }
        fleet.wait(modes.len())?;
        Ok(fleet)
    }

    fn spawn(&mut self, command: &mut Command) -> Result<(), String> {
        let local = "127.0.0.1";
        let started = command
            .env("DYN_DISCOVERY_BACKEND", "file")
            .env("DYN_FILE_KV", self.directory.path().join("discovery"))
            .env("DYN_REQUEST_PLANE", "tcp")
            .env("DYN_EVENT_PLANE", "zmq")
            .env("DYN_TCP_RPC_HOST", local)
            .env("DYN_TCP_RESPONSE_STREAM_HOST", local)
            .env("DYN_EVENT_PLANE_HOST", local)
            .stdin(Stdio::null())
            .spawn();
        self.processes.push(started.map_err(|error| format!("{command:?}: {error}"))?);
        Ok(())
    }

    /// Waits until the frontend knows all workers, and one has answered.
    fn wait(&mut self, workers: usize) -> Result<(), String> {
        let since = Instant::now();
        loop {
            let why = match self.request("GET", "/health", None) {
                Ok(health) if generators(&health) >= workers => match self.try_ask("?", 1) {
                    Ok(_) => return Ok(()),
                    Err(why) => why,
                },
                Ok(health) => format!("not all are there: {health}"),
                Err(why) => why,
            };
            let ended = |process: &mut Child| process.try_wait().is_ok_and(|ended| ended.is_some());
            if self.processes.iter_mut().any(ended) {
                return Err(format!("a process has ended; {why}"));
            }
            if since.elapsed() > TIMEOUT {
                return Err(why);
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// The fleet's answer to a prompt.
    pub fn ask(&self, prompt: &str, tokens: u32) -> Answer {
        self.try_ask(prompt, tokens).unwrap()
    }

    fn try_ask(&self, prompt: &str, tokens: u32) -> Result<Answer, String> {
        let body =
            json!({"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0});
        let answer = self.request("POST", "/v1/completions", Some(&body))?;
        let text = answer["choices"][0]["text"].as_str();
        let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
        match (text, cached) {
            (Some(text), Some(cached)) => {
                Ok(Answer { text: text.to_owned(), cached: cached as usize })
            }
            _ => Err(format!("no answer: {answer}")),
        }
    }

    /// A minimal HTTP request.
    fn request(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value, String> {
        let body = body.map(Value::to_string).unwrap_or_default();
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.0\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
        );
        let exchange = || {
            let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
            stream.set_read_timeout(Some(TIMEOUT))?;
            stream.write_all((head + &body).as_bytes())?;
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer)?;
            Ok::<_, std::io::Error>(answer)
        };
        let answer = exchange().map_err(|error| error.to_string())?;
        let answer = String::from_utf8_lossy(&answer).into_owned();
        let (head, body) = answer.split_once("\r\n\r\n").ok_or("no answer")?;
        if !head.contains(" 200 ") {
            return Err(format!("{head}\n{body}"));
        }
        serde_json::from_str(body).map_err(|error| format!("{error}: {body}"))
    }
}

/// Number of workers' endpoints that generate.
fn generators(health: &Value) -> usize {
    let instances = health["instances"].as_array().into_iter().flatten();
    instances.filter(|instance| instance["endpoint"] == "generate").count()
}
