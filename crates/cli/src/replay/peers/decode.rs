//! The loop of a decode process: requests arrive with their prompts computed, and run to their end.

use std::collections::HashMap;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use dsv4_kv::{RequestId, StepRequest};

use super::super::execute::Execute;
use super::super::latency::Latency;
use super::super::moves::Decoded;
use super::super::scheduler::{Job, Part, Scheduler};
use super::super::setup::Setup;
use super::message::{ToDecode, now_ms};
use crate::interrupt::Interrupt;

/// A request that arrived.
#[derive(Clone, Copy, Debug)]
pub struct Came {
    /// Time at which its prompt was computed, by the machine's clock.
    pub at_ms: f64,
    /// Time at which it was entered here.
    pub entered_ms: f64,
    /// Its bytes.
    pub bytes: u64,
    /// Whether the bytes arrived in device memory.
    pub on_device: bool,
}

/// The way in which requests arrive in a cache.
pub trait Takes<E> {
    /// Handles a message of the prefill process.
    fn hear(&mut self, message: ToDecode) -> Result<()>;

    /// Requests that have arrived completely since the last call.
    fn poll(&mut self) -> Result<Vec<usize>>;

    /// Whether no request is arriving or waiting.
    fn is_idle(&self) -> bool;

    /// Enters an arrived request into `cache`.
    fn admit(&mut self, cache: &mut E, index: usize) -> Result<(RequestId, Came)>;

    /// Bytes that arrived while prompts were still being computed.
    fn early_bytes(&self) -> u64;
}

/// A request that runs here.
struct Going {
    id: RequestId,
    came: Came,
    /// Whether it has run a step here.
    stepped: bool,
}

/// A decode process.
pub struct Decode<'s, E, T> {
    cache: E,
    takes: T,
    setup: &'s Setup,
    scheduler: Scheduler,
    going: HashMap<usize, Going>,
    latency: Latency,
    decoded: Decoded,
    /// Whether the last request was announced.
    is_last: bool,
    /// Whether the replay was interrupted.
    is_stopped: bool,
}

impl<'s, E: Execute, T: Takes<E>> Decode<'s, E, T> {
    /// A decode process that runs the requests of `takes` in `cache`.
    pub fn new(cache: E, takes: T, setup: &'s Setup) -> Self {
        let scheduler = Scheduler::new(setup.limits());
        let (latency, decoded) = (Latency::default(), Decoded::default());
        let (going, is_last, is_stopped) = (HashMap::new(), false, false);
        Self { cache, takes, setup, scheduler, going, latency, decoded, is_last, is_stopped }
    }

    /// Runs until all requests have arrived and ended. Returns its work.
    pub fn run(
        mut self,
        inbox: &mpsc::Receiver<ToDecode>,
        interrupt: &Interrupt,
    ) -> Result<Decoded> {
        let mut parts = Vec::new();
        while !interrupt.is_requested() && !self.is_stopped {
            while let Ok(message) = inbox.try_recv() {
                self.hear(message)?;
            }
            self.admit()?;
            self.scheduler.plan(&mut parts);
            if !parts.is_empty() {
                self.step(&parts)?;
            } else if self.is_last && self.takes.is_idle() {
                break;
            } else {
                match inbox.recv_timeout(Duration::from_micros(500)) {
                    Ok(message) => self.hear(message)?,
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) if self.is_last => {}
                    Err(RecvTimeoutError::Disconnected) => {
                        anyhow::bail!("the process that computes prompts has ended")
                    }
                }
            }
        }
        self.end()
    }

    fn hear(&mut self, message: ToDecode) -> Result<()> {
        match message {
            ToDecode::End => self.is_last = true,
            ToDecode::Stop => self.is_stopped = true,
            message => self.takes.hear(message)?,
        }
        Ok(())
    }

    /// Queues the requests that have arrived, and admits those that fit.
    fn admit(&mut self) -> Result<()> {
        for index in self.takes.poll()? {
            let arrival = self.setup.load.get(index).context("a place of the load")?.arrival;
            let tokens = arrival.context_tokens();
            let blocks = self.cache.ledger().blocks_of(tokens);
            let job = Job { index, input: arrival.input, tokens, blocks };
            ensure!(self.scheduler.submit(job), "request {index} never fits here");
            self.latency.submit(index);
        }
        while let Some(job) = self.scheduler.admit() {
            let (id, came) = self.takes.admit(&mut self.cache, job.index)?;
            self.scheduler.skip(job.input);
            self.latency.admit(job.index);
            self.latency.prompt_done(job.index);
            self.decoded.arrived += 1;
            self.decoded.bytes += came.bytes;
            self.decoded.device_bytes += if came.on_device { came.bytes } else { 0 };
            self.decoded.move_ms.push((came.entered_ms - came.at_ms) as f32);
            self.going.insert(job.index, Going { id, came, stepped: false });
        }
        Ok(())
    }

    fn step(&mut self, parts: &[Part]) -> Result<()> {
        let (mut step, mut tokens) = (Vec::new(), Vec::new());
        for &Part { index, start, tokens: count, .. } in parts {
            let going = self.going.get(&index).context("a request in the step was admitted")?;
            step.push(StepRequest { id: going.id, start, tokens: count });
            let texts = self.setup.texts;
            tokens.extend((start..start + count).map(|at| texts.own_token(index as u64, at)));
        }
        let told: &[u32] = if self.cache.reads_tokens() { &tokens } else { &[] };
        let before = self.cache.kernel_ms();
        let prepare = self.cache.step(&step, told)?;
        let kernels = self.cache.kernel_ms() - before;
        self.latency.step(kernels + prepare.as_secs_f64() * 1e3);
        self.decoded.tokens += tokens.len() as u64;
        for part in parts {
            let going = self.going.get_mut(&part.index).context("it is in the step")?;
            if !std::mem::replace(&mut going.stepped, true) {
                self.decoded.next_token_ms.push((now_ms() - going.came.at_ms) as f32);
            }
        }
        let mut finished = Vec::new();
        self.scheduler.complete(parts, |index| finished.push(index));
        for index in finished {
            let output = self.setup.load[index].arrival.output;
            self.latency.finish(index, output);
            self.decoded.finished += 1;
            let going = self.going.remove(&index).context("it is in the step")?;
            self.cache.release(going.id)?;
        }
        Ok(())
    }

    fn end(self) -> Result<Decoded> {
        let Self { cache, takes, latency, mut decoded, .. } = self;
        let work = cache.finish()?;
        decoded.early_bytes = takes.early_bytes();
        (decoded.time, decoded.per_token) = (latency.now(), latency.per_token);
        (decoded.entries, decoded.kernel_ms) = (work.entries, work.kernel_ms);
        decoded.verification = work.verification;
        Ok(decoded)
    }
}
