//! Bytes of requests that come.

use std::collections::{HashMap, VecDeque};
use std::io::Stdout;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use dsv4_kv::RequestId;
use dsv4_kv::device::Backend;
use dsv4_kv::transfer::{PartLayout, Port};
use dsv4_kv_transfer::protocol::{Offer, Opening, Ready};
use dsv4_kv_transfer::transport::{Descriptor, MemoryKind};
use dsv4_kv_transfer::{
    Claimed, Control, Deadlines, Expected, Fingerprint, Receiver, Source, Target, TransferError,
    TransferId, Transport, Verified,
};

use super::super::full::Full;
use super::super::setup::Setup;
use super::decode::{Came, Takes};
use super::message::{ToDecode, ToPrefill, now_ms, send};
use super::sends::{fingerprint, storage};

/// A step of the emulator takes long, and so does a prompt.
const DEADLINES: Deadlines = Deadlines {
    read: Duration::from_secs(60),
    fence: Duration::from_secs(120),
    quiet: Duration::from_secs(24 * 3600),
};

/// How long the other process may take to say whether a request may go on here.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// A request that comes.
#[derive(Default)]
struct Coming {
    transfer: Option<TransferId>,
    reused: u32,
    at_ms: f64,
    verified: Option<Verified>,
}

/// Requests come with their bytes.
pub struct BytesIn<B: Backend, T: Transport> {
    port: Port<B>,
    receiver: Receiver<T>,
    fingerprint: Fingerprint,
    layout: PartLayout,
    max_context: u32,
    coming: HashMap<usize, Coming>,
    /// Offers for which there was no memory when they were opened.
    late: VecDeque<(usize, Offer)>,
    start: Instant,
    answers: mpsc::Receiver<bool>,
}

impl<B: Backend, T: Transport> BytesIn<B, T> {
    /// They come to `cache` over `transport`; `answers` to claims come from the other process.
    pub fn new(
        cache: &Full<B>,
        transport: T,
        setup: &Setup,
        answers: mpsc::Receiver<bool>,
    ) -> Result<Self> {
        let (cache, config) = (cache.cache(), cache.cache().config());
        let storage = (storage(cache.device(), setup)?, setup.arrival_bytes);
        let port = cache.open_port()?;
        Ok(Self {
            receiver: Receiver::with_storage(transport, DEADLINES, storage),
            fingerprint: fingerprint(config, setup.seed),
            layout: port.layout().clone(),
            max_context: config.max_context,
            coming: HashMap::new(),
            late: VecDeque::new(),
            start: Instant::now(),
            port,
            answers,
        })
    }

    /// Begins or opens a read; `None` if there is no memory for it now.
    fn read(
        &mut self,
        begin: impl FnOnce(
            &mut Receiver<T>,
            Duration,
            &Expected<'_>,
        ) -> Result<TransferId, TransferError>,
    ) -> Result<Option<TransferId>> {
        let Self { fingerprint, layout, max_context, .. } = self;
        let max_context = *max_context;
        let expected = Expected { fingerprint, layout, tokens: None, max_context };
        match begin(&mut self.receiver, self.start.elapsed(), &expected) {
            Ok(id) => Ok(Some(id)),
            // What fits once others were admitted.
            Err(TransferError::NoMemory { needed, budget, .. }) if needed <= budget => Ok(None),
            Err(error @ TransferError::NoMemory { .. }) => {
                Err(anyhow!("{error}: raise --arrival-memory"))
            }
            Err(error) => Err(error.into()),
        }
    }

    fn coming(&mut self, index: usize) -> Result<&mut Coming> {
        self.coming.get_mut(&index).context("a request is opened before it comes")
    }
}

impl<B: Backend, T: Transport> Takes<Full<B>> for BytesIn<B, T> {
    fn hear(&mut self, message: ToDecode) -> Result<()> {
        let now = self.start.elapsed();
        match message {
            ToDecode::Open { index, reused, manifest, payload } => {
                let opening = Opening { manifest, payload: Descriptor(payload) };
                let open = |receiver: &mut Receiver<T>, now, expected: &Expected<'_>| {
                    receiver.open(now, &opening, expected)
                };
                // Offers that wait for memory come first: they are whole, and who waits for them computes nothing meanwhile.
                let transfer = if self.late.is_empty() { self.read(open)? } else { None };
                let coming = Coming { transfer, reused, ..Coming::default() };
                self.coming.insert(index, coming);
            }
            ToDecode::Ready { index, epoch, lease, bytes } => {
                let source = Source { epoch, lease };
                if let Some(transfer) = self.coming(index)?.transfer {
                    self.receiver.ready(now, transfer, &Ready { source, bytes })?;
                }
            }
            ToDecode::Offer { index, manifest, payload, at_ms } => {
                let offer = Offer { manifest, payload: Descriptor(payload) };
                let coming = self.coming(index)?;
                coming.at_ms = at_ms;
                match coming.transfer {
                    Some(transfer) => self.receiver.offered(now, transfer, &offer)?,
                    None => self.late.push_back((index, offer)),
                }
            }
            ToDecode::Forget { index } => {
                let forgotten = self.coming.remove(&index);
                if let Some(transfer) = forgotten.and_then(|coming| coming.transfer) {
                    self.receiver.give_up(transfer)?;
                }
            }
            other => anyhow::bail!("no request comes by {other:?}"),
        }
        Ok(())
    }

    fn poll(&mut self) -> Result<Vec<usize>> {
        while let Some((index, offer)) = self.late.pop_front() {
            let begin = |receiver: &mut Receiver<T>, now, expected: &Expected<'_>| {
                receiver.begin(now, &offer, expected)
            };
            match self.read(begin)? {
                Some(transfer) => self.coming(index)?.transfer = Some(transfer),
                None => {
                    self.late.push_front((index, offer));
                    break;
                }
            }
        }
        let mut came = Vec::new();
        for (transfer, verified) in self.receiver.poll(self.start.elapsed()) {
            let known =
                self.coming.iter_mut().find(|(_, coming)| coming.transfer == Some(transfer));
            let (&index, coming) = known.context("what has ended was begun")?;
            let verified = verified.map_err(|error| anyhow!("request {index}: {error}"))?;
            coming.verified = Some(verified);
            came.push(index);
        }
        Ok(came)
    }

    fn is_idle(&self) -> bool {
        self.coming.is_empty()
    }

    fn admit(&mut self, cache: &mut Full<B>, index: usize) -> Result<(RequestId, Came)> {
        let coming = self.coming.remove(&index).context("what is admitted has come")?;
        let verified = coming.verified.context("what is admitted was verified")?;
        let (at, tokens) = (verified.manifest().at, &verified.manifest().tokens);
        let (Self { port, answers, start, fingerprint, .. }, mut entered_ms) = (self, 0.0);
        let id = cache.arrive(index, (tokens, coming.reused), |cache, stream| {
            let room = cache.reserve(at)?;
            let mut target = Target { cache, stream, port, weights: fingerprint.weights };
            let mut channel = Channel { to: std::io::stdout(), answers };
            let until = start.elapsed() + ANSWER_TIMEOUT;
            let mut claim = target.load(&verified, room, until, &mut channel)?;
            let id = loop {
                claim = match target.settle(start.elapsed(), claim, &mut channel)? {
                    Claimed::Admitted(id) => break id,
                    Claimed::Waits(claim) => claim,
                };
                // Nothing here is in a hurry: the next step would be measured with what is admitted.
                std::thread::sleep(Duration::from_micros(50));
            };
            entered_ms = now_ms();
            Ok(id)
        })?;
        let (at_ms, bytes) = (coming.at_ms, verified.bytes() as u64);
        let on_device = verified.kind() != MemoryKind::Host;
        Ok((id, Came { at_ms, entered_ms, bytes, on_device }))
    }

    fn early_bytes(&self) -> u64 {
        self.receiver.stats().early_bytes
    }
}

/// The other process.
struct Channel<'c> {
    to: Stdout,
    answers: &'c mpsc::Receiver<bool>,
}

impl Control for Channel<'_> {
    fn ask(&mut self, source: Source) -> Result<(), String> {
        let Source { epoch, lease } = source;
        let asked = send(&mut self.to, &ToPrefill::Claim { epoch, lease });
        asked.map_err(|error| format!("{error:#}"))
    }

    fn answer(&mut self, _source: Source) -> Result<Option<bool>, String> {
        match self.answers.try_recv() {
            Ok(answer) => Ok(Some(answer)),
            Err(mpsc::TryRecvError::Empty) => Ok(None),
            Err(mpsc::TryRecvError::Disconnected) => Err("it has ended".to_owned()),
        }
    }

    /// What fails here ends the replay, and the other process with it.
    fn give_up(&mut self, _source: Source) {}
}
