//! Requests that leave for a decode worker, and that arrive from a prefill worker.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use dsv4_kv::RequestId;
use dsv4_kv::device::Backend;
use dsv4_kv::transfer::{PartLayout, TransferStaging};
use dsv4_kv_model::Engine;
use dsv4_kv_transfer::image::decode_manifest;
use dsv4_kv_transfer::transport::Files;
use dsv4_kv_transfer::{
    Claim, Claimed, Control, Deadlines, Expected, Fingerprint, Offer, Receiver, Sender, Source,
    Target, TransferError, Verified,
};
use tokio::sync::OwnedSemaphorePermit;

use crate::args::Options;
use crate::offers::{Kept, Offers};
use crate::questions::ANSWER_TIMEOUT;
use crate::ticket::{Remote, Ticket};

/// Most bytes of all offers together. Each is in memory twice, in the sender's and in its file in `/dev/shm`.
const HELD: u64 = 16 << 30;
/// Bytes of a permit for the memory of payloads that are fetched.
const PERMIT: u64 = 64 << 10;
/// Permits for all payloads together that are being read, or that wait for their admission: 4 GiB.
pub const PERMITS: usize = (4 << 30) / PERMIT as usize;
/// Deadlines of reads.
const DEADLINES: Deadlines = Deadlines {
    read: Duration::from_secs(10),
    fence: Duration::from_secs(30),
    quiet: Duration::from_secs(30),
};

/// The payloads of a prefill worker's offers. Only the engine's thread has them, so that claims are answered while it
/// copies one.
pub struct Payloads {
    sender: Sender<Files>,
    offers: Arc<Offers>,
}

impl Payloads {
    /// No payloads; listens for claims.
    ///
    /// # Errors
    /// A directory or an address that is not available.
    pub fn new(options: &Options) -> Result<Self> {
        let sender = Sender::new(Files::new(&options.exchange)?, HELD);
        Ok(Self { sender, offers: Offers::listen(&options.control)? })
    }

    /// The offers that can be claimed.
    #[must_use]
    pub fn offers(&self) -> &Arc<Offers> {
        &self.offers
    }

    /// Frees the payloads of offers that were claimed, given up or taken back, or whose lifetime is over.
    pub fn free_ended(&mut self) {
        for source in self.offers.take_ended() {
            self.sender.take_back(source.lease);
        }
    }
}

/// Offers a request at its current position. `tokens` has its tokens, at least up to that position. Returns the ticket,
/// and what takes the offer back unless the ticket is handed over.
///
/// # Errors
/// Any error of the device, the cache or the transport; nothing is offered then.
pub fn offer<B: Backend>(
    engine: &mut Engine<B>,
    staging: &mut TransferStaging<B>,
    payloads: &mut Payloads,
    fingerprint: Fingerprint,
    (id, tokens): (RequestId, &[u32]),
) -> Result<(Ticket, Kept)> {
    payloads.free_ended();
    let Payloads { sender, offers } = payloads;
    let (cache, stream) = engine.moves();
    let mut export = cache.export(stream, staging, id)?;
    let at = export.positions();
    let mut transfer = sender.open(&export, fingerprint, (at, &tokens[..at.trunk as usize]))?;
    let source = transfer.source();
    if let Err(error) = sender.take(&mut transfer, &mut export) {
        sender.abandon(transfer)?;
        return Err(error.into());
    }
    // The list of offers says when it expires.
    let offer = match sender.offer(transfer, Duration::MAX) {
        Ok(offer) => offer,
        Err(refused) => {
            sender.abandon(*refused.0)?;
            return Err(refused.1.into());
        }
    };
    Ok((Ticket::new(offers.control(), &offer), offers.enter(source)))
}

/// Sources of the offers that this process takes, until their requests are admitted or given up.
static TAKEN: LazyLock<Mutex<HashSet<Source>>> = LazyLock::new(Mutex::default);

fn taken() -> MutexGuard<'static, HashSet<Source>> {
    TAKEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An offer that this process takes. If it is dropped before it was loaded, for whatever reason, its prefill worker is told,
/// which frees the memory.
struct Lease {
    control: SocketAddr,
    source: Source,
    is_told: bool,
}

impl Lease {
    /// `None` if this process takes the offer already: a ticket may come twice. The source belongs to the first copy then,
    /// and is not given up.
    fn take(control: SocketAddr, source: Source) -> Option<Self> {
        taken().insert(source).then_some(Self { control, source, is_told: false })
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if !self.is_told {
            Remote::new(self.control).give_up(self.source);
        }
        taken().remove(&self.source);
    }
}

/// An offer that this worker can take, and that was not read yet.
pub struct Offered {
    offer: Offer,
    lease: Lease,
    permits: u32,
}

impl Offered {
    /// The offer of a ticket, which must have all tokens of `prompt` but the last. Reads no payload.
    ///
    /// # Errors
    /// A ticket that is no offer, or whose offer is taken already; a request of another owner or another model, or one that
    /// is too large.
    pub fn new(ticket: &Ticket, own: Own<'_>, prompt: &[u32]) -> Result<Self> {
        let offer = ticket.offer().context("the ticket is no offer")?;
        let (manifest, _) = decode_manifest(&offer.manifest)?;
        let lease = Lease::take(ticket.control, manifest.source);
        let lease = lease.context("the ticket has come before, and its request is on its way")?;
        manifest.check(&own.expected(prompt))?;
        let bytes = manifest.payload_bytes();
        let permits = u32::try_from(bytes.max(1).div_ceil(PERMIT)).unwrap_or(u32::MAX);
        let most = PERMITS as u64 * PERMIT;
        anyhow::ensure!(bytes <= most, "a payload of {bytes} bytes; at most {most} may be read");
        Ok(Self { offer, lease, permits })
    }

    /// Permits that its payload needs, at most [`PERMITS`].
    #[must_use]
    pub fn permits(&self) -> u32 {
        self.permits
    }
}

/// What a request that arrives must have in common with this worker.
#[derive(Clone, Copy)]
pub struct Own<'o> {
    /// Model, formats, weights and owner.
    pub fingerprint: &'o Fingerprint,
    /// The layout of parts of the cache.
    pub layout: &'o PartLayout,
    /// Most tokens of a request.
    pub max_context: u32,
}

impl<'o> Own<'o> {
    fn expected(self, prompt: &'o [u32]) -> Expected<'o> {
        let Self { fingerprint, layout, max_context } = self;
        let tokens = prompt.split_last().map(|(_, tokens)| tokens);
        Expected { fingerprint, layout, tokens, max_context }
    }
}

/// A request that was read and verified. If it is dropped before it is loaded, its prefill worker is told.
pub struct Fetched {
    verified: Verified,
    lease: Lease,
    /// Last field: the memory is free when the permits are given back.
    _permits: OwnedSemaphorePermit,
}

impl Fetched {
    /// The payload.
    #[must_use]
    pub fn verified(&self) -> &Verified {
        &self.verified
    }
}

/// Reads and verifies an offer, into memory for which there are permits. Waits for the read.
///
/// # Errors
/// A damaged request, or a read that fails or is late. The prefill worker is told.
pub fn fetch(
    exchange: &Path,
    (offered, permits): (Offered, OwnedSemaphorePermit),
    own: Own<'_>,
    prompt: &[u32],
) -> Result<Fetched> {
    let Offered { offer, lease, permits: count } = offered;
    let most = u64::from(count) * PERMIT;
    let mut receiver = Receiver::new(Files::new(exchange)?, DEADLINES, most);
    let begun = Instant::now();
    receiver.begin(begun.elapsed(), &offer, &own.expected(prompt))?;
    loop {
        if let Some((_, ended)) = receiver.poll(begun.elapsed()).pop() {
            return Ok(Fetched { verified: ended?, lease, _permits: permits });
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
    /// Its prefill worker is told by the claim.
    lease: Lease,
}

/// Loads a verified request, asks its prefill worker for it, and frees the payload.
///
/// # Errors
/// As [`Target::load`]; an error if the cache has no room. The prefill worker is told.
pub fn load<B: Backend>(
    engine: &mut Engine<B>,
    staging: &mut TransferStaging<B>,
    (fetched, weights): (Fetched, [u8; 32]),
) -> Result<Asked, TransferError> {
    let (cache, stream) = engine.moves();
    let reserved = cache.reserve(fetched.verified.manifest().at)?;
    let Fetched { verified, mut lease, _permits } = fetched;
    // From here on the target tells the prefill worker.
    lease.is_told = true;
    let (mut remote, begun) = (Remote::new(lease.control), Instant::now());
    // Connecting and answering may each take `ANSWER_TIMEOUT`.
    let until = 2 * ANSWER_TIMEOUT;
    let mut target = Target { cache, stream, staging, weights };
    let claim = target.load(&verified, reserved, until, &mut remote);
    // Before the permits.
    drop(verified);
    Ok(Asked { claim: claim?, remote, begun, weights, lease })
}

/// Admits a request if its prefill worker has said yes. Returns the request, or `Asked` if the answer is outstanding.
///
/// # Errors
/// As [`Target::settle`].
pub fn settle<B: Backend>(
    engine: &mut Engine<B>,
    staging: &mut TransferStaging<B>,
    Asked { claim, mut remote, begun, weights, lease }: Asked,
) -> Result<Result<RequestId, Asked>, TransferError> {
    let (cache, stream) = engine.moves();
    match (Target { cache, stream, staging, weights }).settle(
        begun.elapsed(),
        claim,
        &mut remote,
    )? {
        Claimed::Admitted(id) => Ok(Ok(id)),
        Claimed::Waits(claim) => Ok(Err(Asked { claim, remote, begun, weights, lease })),
    }
}

/// Gives a request up that was asked for.
pub fn give_up<B: Backend>(engine: &mut Engine<B>, staging: &mut TransferStaging<B>, asked: Asked) {
    let (cache, stream) = engine.moves();
    let Asked { claim, mut remote, weights, lease: _lease, .. } = asked;
    // This fails only for a claim of another cache.
    let _ = Target { cache, stream, staging, weights }.give_up(claim, &mut remote);
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read};
    use std::net::TcpListener;

    use super::*;
    use crate::questions::Question;
    use crate::ticket::{Asks, asked};

    /// The engine's thread has the payloads while it copies one. Claims are answered meanwhile.
    #[test]
    fn a_claim_waits_for_no_copy() {
        let exchange = tempfile::tempdir().unwrap();
        let sender = Sender::new(Files::new(exchange.path().join("exchange")).unwrap(), HELD);
        let offers = Offers::listen("127.0.0.1:0").unwrap();
        let mut payloads = Payloads { sender, offers: Arc::clone(&offers) };
        let source = Source { epoch: 7, lease: 1 };
        offers.enter(source).hand_over();
        let claims = || {
            let mut remote = Remote::new(offers.control());
            remote.ask(source).unwrap();
            std::iter::repeat_with(|| remote.answer(source).unwrap()).find_map(|answer| answer)
        };
        let Payloads { sender: copies, .. } = &mut payloads;
        assert_eq!([claims(), claims()], [Some(true), Some(false)]);
        assert_eq!((copies.offers(), offers.open()), (0, 0));
        payloads.free_ended();
        assert!(offers.take_ended().is_empty(), "its end was not seen");
    }

    /// A second copy of a ticket is refused while the first one is on its way, and does not give its source up.
    #[test]
    fn a_ticket_that_comes_twice_is_taken_once() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let control = listener.local_addr().unwrap();
        let [source, other] = [1, 2].map(|lease| Source { epoch: 7, lease });
        let first = Lease::take(control, source).expect("the first copy");
        assert!(Lease::take(control, source).is_none(), "the second one");
        drop(Lease::take(control, other).expect("another offer"));
        // Only the other one was given up.
        let told = |listener: &TcpListener| {
            let (mut stream, _) = listener.accept().unwrap();
            let mut question: Question = [0; 17];
            stream.read_exact(&mut question).unwrap();
            asked(question)
        };
        assert_eq!(told(&listener), Some((Asks::GivesUp, other)));
        listener.set_nonblocking(true).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
        listener.set_nonblocking(false).unwrap();
        drop(first);
        assert_eq!(told(&listener), Some((Asks::GivesUp, source)));
        // It may be offered anew.
        let mut again = Lease::take(control, source).expect("the first one has ended");
        again.is_told = true;
    }
}
