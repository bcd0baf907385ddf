//! Requests that leave for a decode worker, and that arrive from a prefill worker.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use dsv4_kv::RequestId;
use dsv4_kv::device::Backend;
use dsv4_kv::transfer::{PartLayout, Port};
use dsv4_kv_model::Engine;
use dsv4_kv_transfer::transport::Files;
use dsv4_kv_transfer::{
    Claim, Claimed, Deadlines, Expected, Fingerprint, Receiver, Sender, Target, TransferError,
    Verified,
};

use crate::args::Options;
use crate::questions::{ANSWER_TIMEOUT, Answers, Question, answer_all, wake};
use crate::ticket::{Asks, Remote, Ticket, asked};

/// How long an offer is kept that is not claimed.
const OFFER_LIFETIME: Duration = Duration::from_secs(60);
/// Most bytes of all offers together.
const HELD: u64 = 16 << 30;
/// Deadlines of reads.
const DEADLINES: Deadlines = Deadlines {
    read: Duration::from_secs(10),
    fence: Duration::from_secs(30),
    quiet: Duration::from_secs(30),
};

/// The offers of a prefill worker, and the address of the threads that answer claims.
pub struct Offers {
    held: Mutex<Held>,
    control: SocketAddr,
}

struct Held {
    sender: Sender<Files>,
    /// The instant from which the times of offers count.
    start: Instant,
}

impl Offers {
    /// Starts to listen for claims.
    ///
    /// # Errors
    /// A directory or an address that is not available.
    pub fn listen(options: &Options) -> Result<Arc<Self>> {
        let sender = Sender::new(Files::new(&options.exchange)?, HELD);
        let control = &options.control;
        let listener =
            TcpListener::bind(control).with_context(|| format!("--control {control}"))?;
        let held = Mutex::new(Held { sender, start: Instant::now() });
        let offers = Arc::new(Self { held, control: listener.local_addr()? });
        answer_all(listener, &Arc::downgrade(&offers))?;
        Ok(offers)
    }

    /// Number of offers that were not claimed yet.
    pub fn open(&self) -> usize {
        self.lock().sender.offers()
    }

    /// Takes back offers whose lifetime has ended.
    pub fn expire(&self) {
        let Held { sender, start } = &mut *self.lock();
        for source in sender.expire(start.elapsed()) {
            tracing::warn!(lease = source.lease, "nobody has claimed a request");
        }
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Answers for Offers {
    fn answer(&self, question: Question) -> bool {
        match asked(question) {
            Some((Asks::Claim, source)) => self.lock().sender.claim(source),
            Some((Asks::GivesUp, source)) => self.lock().sender.give_up(source),
            None => false,
        }
    }
}

impl Drop for Offers {
    fn drop(&mut self) {
        wake(&self.control);
    }
}

/// Offers a request at its current position. `tokens` has its tokens, at least up to that position.
///
/// # Errors
/// Any error of the device, the cache or the transport; nothing is offered then.
pub fn offer<B: Backend>(
    engine: &mut Engine<B>,
    port: &mut Port<B>,
    offers: &Offers,
    fingerprint: Fingerprint,
    (id, tokens): (RequestId, &[u32]),
) -> Result<Ticket> {
    let (cache, stream) = engine.moves();
    let mut export = cache.export(stream, port, id)?;
    let at = export.positions();
    let Held { sender, start } = &mut *offers.lock();
    let mut transfer = sender.open(&export, fingerprint, (at, &tokens[..at.trunk as usize]))?;
    if let Err(error) = sender.take(&mut transfer, &mut export) {
        sender.abandon(transfer)?;
        return Err(error.into());
    }
    let offer = match sender.offer(transfer, start.elapsed() + OFFER_LIFETIME) {
        Ok(offer) => offer,
        Err(refused) => {
            sender.abandon(*refused.0)?;
            return Err(refused.1.into());
        }
    };
    Ok(Ticket::new(offers.control, &offer))
}

/// Reads and verifies the request of a ticket, which must have all tokens of `prompt` but the last. Waits for the read.
///
/// # Errors
/// A request of another owner or another model, a damaged request, or a read that fails or is late.
pub fn fetch(
    exchange: &Path,
    ticket: &Ticket,
    (fingerprint, layout, max_context): (&Fingerprint, &PartLayout, u32),
    prompt: &[u32],
) -> Result<Verified> {
    let offer = ticket.offer().context("the ticket is no offer")?;
    // No limit is needed: the receiver refuses payloads that do not fit the layout and `max_context`.
    let mut receiver = Receiver::new(Files::new(exchange)?, DEADLINES, u64::MAX);
    let tokens = &prompt[..prompt.len() - 1];
    let expected = Expected { fingerprint, layout, tokens: Some(tokens), max_context };
    let begun = Instant::now();
    receiver.begin(begun.elapsed(), &offer, &expected)?;
    loop {
        if let Some((_, ended)) = receiver.poll(begun.elapsed()).pop() {
            return Ok(ended?);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A request that was loaded, and whose prefill worker was asked for it.
pub struct Asked {
    claim: Claim,
    remote: Remote,
    begun: Instant,
    /// The digest of the weights that run here.
    weights: [u8; 32],
}

/// Loads a verified request, and asks its prefill worker for it.
///
/// # Errors
/// As [`Target::load`]; an error if the cache has no room.
pub fn load<B: Backend>(
    engine: &mut Engine<B>,
    port: &mut Port<B>,
    (verified, ticket, weights): (&Verified, &Ticket, [u8; 32]),
) -> Result<Asked, TransferError> {
    let (cache, stream) = engine.moves();
    let room = cache.reserve(verified.manifest().at)?;
    let (mut remote, begun) = (Remote::new(ticket.control), Instant::now());
    // Connecting and answering may each take `ANSWER_TIMEOUT`.
    let until = 2 * ANSWER_TIMEOUT;
    let claim = Target { cache, stream, port, weights }.load(verified, room, until, &mut remote)?;
    Ok(Asked { claim, remote, begun, weights })
}

/// Admits a request if its prefill worker has said yes. Returns the request, or `Asked` if the answer is outstanding.
///
/// # Errors
/// As [`Target::settle`].
pub fn settle<B: Backend>(
    engine: &mut Engine<B>,
    port: &mut Port<B>,
    Asked { claim, mut remote, begun, weights }: Asked,
) -> Result<Result<RequestId, Asked>, TransferError> {
    let (cache, stream) = engine.moves();
    match (Target { cache, stream, port, weights }).settle(begun.elapsed(), claim, &mut remote)? {
        Claimed::Admitted(id) => Ok(Ok(id)),
        Claimed::Waits(claim) => Ok(Err(Asked { claim, remote, begun, weights })),
    }
}

/// Gives a request up that was asked for.
pub fn give_up<B: Backend>(engine: &mut Engine<B>, port: &mut Port<B>, asked: Asked) {
    let (cache, stream) = engine.moves();
    let Asked { claim, mut remote, weights, .. } = asked;
    // This fails only for a claim of another cache.
    let _ = Target { cache, stream, port, weights }.give_up(claim, &mut remote);
}
