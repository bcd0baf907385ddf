//! A decode process, as seen from the prefill process.

use std::io::{BufReader, BufWriter};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use anyhow::{Context, Result, anyhow};
use dsv4_kv_transfer::Source;

use super::super::moves::Decoded;
use super::message::{ToDecode, ToPrefill, Way, receive, send};

/// Messages to the process. The loop sends some, and the thread that answers claims sends others.
type Input = Arc<Mutex<BufWriter<ChildStdin>>>;

/// A decode process.
pub struct Link {
    number: u32,
    child: Child,
    to: Input,
    /// Returns the work of the process.
    reader: Option<JoinHandle<Result<Decoded>>>,
}

impl Link {
    /// Starts this program again as decode process `number`, with the same options and as much memory as this process.
    /// `claims` answers whether the process may enter a request.
    pub fn start(
        (number, memory): (u32, u64),
        way: &Way,
        claims: impl Fn(Source) -> bool + Send + 'static,
    ) -> Result<Self> {
        let program = std::env::current_exe().context("where this program is")?;
        let mut command = Command::new(program);
        command
            .args(std::env::args_os().skip(1))
            .args(["--peer", &number.to_string(), "--peer-memory", &memory.to_string()])
            // UCX, which NIXL uses, would write warnings to standard output, which carries the messages.
            .env("UCX_LOG_FILE", std::env::var_os("UCX_LOG_FILE").unwrap_or("stderr".into()));
        let link = Self::of(number, &mut command, claims)?;
        link.send(&ToDecode::Begin(way.clone()))?;
        Ok(link)
    }

    /// Starts `command` as decode process `number`.
    pub(super) fn of(
        number: u32,
        command: &mut Command,
        claims: impl Fn(Source) -> bool + Send + 'static,
    ) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // A terminal's interrupt should reach only the first process, which then tells the others to stop.
            .process_group(0)
            .spawn()
            .context("a decode process")?;
        let stdin = child.stdin.take().context("its input is a pipe")?;
        let from = child.stdout.take().context("its output is a pipe")?;
        let to = Arc::new(Mutex::new(BufWriter::new(stdin)));
        let answers = Arc::clone(&to);
        let reader = std::thread::spawn(move || read(from, &answers, &claims));
        Ok(Self { number, child, to, reader: Some(reader) })
    }

    /// Sends a message.
    pub fn send(&self, message: &ToDecode) -> Result<()> {
        let sent = send(&mut *lock(&self.to), message);
        sent.map_err(|error| anyhow!("decode process {}: {error:#}", self.number))
    }

    /// Fails if the process has ended.
    pub fn check(&self) -> Result<()> {
        let has_ended = self.reader.as_ref().is_none_or(JoinHandle::is_finished);
        if has_ended { Err(anyhow!("decode process {} has ended", self.number)) } else { Ok(()) }
    }

    /// Waits for its end. Returns its work.
    pub fn wait(&mut self) -> Result<Decoded> {
        let reader = self.reader.take().context("it is waited for once")?;
        let decoded = reader.join().map_err(|_| anyhow!("its reader has panicked"))?;
        let status = self.child.wait()?;
        let number = self.number;
        let decoded = decoded.map_err(|error| anyhow!("decode process {number}: {error:#}"))?;
        anyhow::ensure!(status.success(), "decode process {}: {status}", self.number);
        Ok(decoded)
    }
}

fn lock(to: &Input) -> MutexGuard<'_, BufWriter<ChildStdin>> {
    to.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads its messages and answers its claims, until it is done.
fn read(from: ChildStdout, to: &Input, claims: &dyn Fn(Source) -> bool) -> Result<Decoded> {
    let mut from = BufReader::new(from);
    while let Some(message) = receive(&mut from)? {
        match message {
            ToPrefill::Claim { epoch, lease } => {
                let held = claims(Source { epoch, lease });
                send(&mut *lock(to), &ToDecode::Claimed(held))?;
            }
            ToPrefill::Done(decoded) => return Ok(*decoded),
        }
    }
    Err(anyhow!("it ended before it was done"))
}

impl Drop for Link {
    fn drop(&mut self) {
        // Fails only if the process has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
