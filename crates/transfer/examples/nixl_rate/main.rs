//! Measures how fast the payload of a long prompt is read from another process of this machine: by reads of NIXL alone,
//! and by the protocol with its digests, in turn.
//!
//! ```bash
//! export DSV4_NIXL=DIRECTORY/libnixl_capi.so
//! cargo run --release -p dsv4-kv-transfer --features nixl --example nixl_rate -- [--tokens N] [--rounds N] [--cuda] [--json]
//! ```
//!
//! The payload has the size and the parts of a request of V4-Flash with N tokens. Its bytes are a pattern, so that no
//! cache and no kernels are needed. With `--cuda` the payload is in host memory or on GPU 0, and is read to host memory
//! or to the last GPU.

mod options;
mod payload;
mod source;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use dsv4_kv_transfer::protocol::Offer;
use dsv4_kv_transfer::transport::{Descriptor, Nixl, NixlOptions, NotPosted, Polled, Storage};
use dsv4_kv_transfer::{Deadlines, Receiver, Transport};

use options::Options;
use payload::Payload;
use source::Peer;

/// The deadline for a payload.
const DEADLINE: Duration = Duration::from_secs(8);

/// Consecutive rounds of one kind.
const ROUNDS: u32 = 5;

/// Bytes per second of each round.
#[derive(Default)]
struct Rates {
    raw: Vec<f64>,
    protocol: Vec<f64>,
}

fn median(rates: &[f64]) -> f64 {
    let mut sorted = rates.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

fn main() -> Result<()> {
    if let Some(kind) = source::kind() {
        return source::run(&kind);
    }
    let options = Options::parse()?;
    let payload = Payload::new(options.tokens);
    if !options.json {
        println!(
            "{} bytes in {} parts: {} tokens of V4-Flash, {} rounds",
            payload.bytes(),
            payload.parts.len(),
            options.tokens,
            options.rounds
        );
    }
    let kinds: &[&str] = if options.cuda { &["host", "cuda"] } else { &["host"] };
    for from in kinds {
        for to in kinds {
            match measure(&options, &payload, (from, to)) {
                Ok(rates) => print(&options, &payload, (from, to), &rates),
                // Other combinations may work.
                Err(error) if options.cuda => println!("{from} to {to}: {error:#}"),
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}

fn print(options: &Options, payload: &Payload, (from, to): (&str, &str), rates: &Rates) {
    let (raw, protocol) = (median(&rates.raw), median(&rates.protocol));
    let share = protocol / raw;
    if options.json {
        let (tokens, bytes, rounds) = (options.tokens, payload.bytes(), options.rounds);
        println!(
            r#"{{"from":"{from}","to":"{to}","tokens":{tokens},"bytes":{bytes},"rounds":{rounds},"raw_gb_s":{:.3},"protocol_gb_s":{:.3},"share":{share:.3}}}"#,
            raw / 1e9,
            protocol / 1e9
        );
        return;
    }
    let best = |rates: &[f64]| rates.iter().copied().fold(0.0, f64::max) / 1e9;
    println!(
        "{from} to {to}: reads alone {:.2} GB/s (best {:.2}), with the protocol {:.2} GB/s (best {:.2}): {:.0} %",
        raw / 1e9,
        best(&rates.raw),
        protocol / 1e9,
        best(&rates.protocol),
        100.0 * share
    );
}

/// Measures both kinds in turn: a few rounds of one, then as many of the other, each time after a warm-up round. The
/// agent of one kind is dropped before that of the other is created, because each agent has a progress thread.
fn measure(options: &Options, payload: &Payload, (from, to): (&str, &str)) -> Result<Rates> {
    let storage = payload::storage(to, payload::last_gpu())?;
    let mut peer = Peer::start(from, options.tokens)?;
    let offer = peer.offer()?;
    let rate = |time: Duration| payload.bytes() as f64 / time.as_secs_f64();
    let mut rates = Rates::default();
    let mut left = options.rounds;
    while left > 0 {
        let rounds = left.min(ROUNDS);
        left -= rounds;
        let mut reads = Reads::new(payload, &storage)?;
        reads.once(&offer.payload)?;
        for _ in 0..rounds {
            rates.raw.push(rate(reads.once(&offer.payload)?));
        }
        reads.check(payload)?;
        let mut receiver = receiver(payload, &storage)?;
        transfer(&mut receiver, &offer, payload)?;
        for _ in 0..rounds {
            rates.protocol.push(rate(transfer(&mut receiver, &offer, payload)?));
        }
    }
    Ok(rates)
}

fn receiver(payload: &Payload, storage: &Storage) -> Result<Receiver<Nixl>> {
    let nixl = Nixl::open(&NixlOptions::default())?;
    let quiet = Duration::from_secs(3600);
    let deadlines = Deadlines { read: DEADLINE, fence: 2 * DEADLINE, quiet };
    let most = 4 * payload.bytes() as u64;
    Ok(Receiver::with_storage(nixl, deadlines, (storage.clone(), most)))
}

/// Reads alone, to memory that is registered once.
struct Reads {
    nixl: Nixl,
    memory: Option<dsv4_kv_transfer::transport::Registered>,
    bytes: usize,
}

impl Reads {
    fn new(payload: &Payload, storage: &Storage) -> Result<Self> {
        let mut nixl = Nixl::open(&NixlOptions::default())?;
        let memory = nixl.register(storage.region(payload.bytes())?)?;
        Ok(Self { nixl, memory: Some(memory), bytes: payload.bytes() })
    }

    fn once(&mut self, from: &Descriptor) -> Result<Duration> {
        let memory = self.memory.take().context("a read before has failed")?;
        let start = Instant::now();
        let posted = self.nixl.post(memory, 0..self.bytes, from);
        let mut read = posted.map_err(|NotPosted(_, error)| error)?;
        loop {
            match self.nixl.poll(read) {
                Polled::Done(memory) => {
                    self.memory = Some(memory);
                    return Ok(start.elapsed());
                }
                Polled::Failed(_, error) => return Err(error.into()),
                Polled::Pending(_) if start.elapsed() > DEADLINE => {
                    bail!("a read has not ended within {DEADLINE:?}")
                }
                Polled::Pending(pending) => read = pending,
            }
        }
    }

    /// Checks that the bytes are those of the other process.
    fn check(mut self, payload: &Payload) -> Result<()> {
        let memory = self.memory.take().context("a read before has failed")?;
        let region = self.nixl.deregister(memory)?;
        let mut got = vec![0; payload.bytes()];
        region.read(0, &mut got)?;
        ensure!(got == payload.pattern(), "other bytes came than were sent");
        Ok(())
    }
}

/// The time from the offer to the verified payload.
fn transfer(receiver: &mut Receiver<Nixl>, offer: &Offer, payload: &Payload) -> Result<Duration> {
    let start = Instant::now();
    receiver.begin(start.elapsed(), offer, &payload.expected())?;
    loop {
        if let Some((_, ended)) = receiver.poll(start.elapsed()).pop() {
            let (time, verified) = (start.elapsed(), ended?);
            ensure!(verified.bytes() == payload.bytes(), "all of it");
            return Ok(time);
        }
        ensure!(start.elapsed() < 2 * DEADLINE, "a transfer does not end: {:?}", receiver.stats());
    }
}
