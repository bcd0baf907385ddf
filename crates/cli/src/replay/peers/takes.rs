//! Receives requests with their bytes.

use std::collections::{HashMap, VecDeque};
use std::io::Stdout;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use dsv4_kv::RequestId;
use dsv4_kv::device::Backend;
use dsv4_kv::transfer::{PartLayout, TransferStaging};
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

/// Deadlines are long, because a step of the emulator and a prompt take long.
const DEADLINES: Deadlines = Deadlines {
    read: Duration::from_secs(60),
    fence: Duration::from_secs(120),
    quiet: Duration::from_secs(24 * 3600),
};

/// Time in which the other process must answer a claim.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// A request that is arriving.
#[derive(Default)]
struct Coming {
    transfer: Option<TransferId>,
    reused: u32,
    /// Time of its offer, once it was offered.
    at_ms: Option<f64>,
    verified: Option<Verified>,
}

/// The target of requests with their bytes.
pub struct BytesIn<B: Backend, T: Transport> {
    staging: TransferStaging<B>,
    receiver: Receiver<T>,
    fingerprint: Fingerprint,
    layout: PartLayout,
    max_context: u32,
    coming: HashMap<usize, Coming>,
    /// Offers that found no memory when they were opened.
    late: VecDeque<(usize, Offer)>,
    start: Instant,
    answers: mpsc::Receiver<bool>,
}

impl<B: Backend, T: Transport> BytesIn<B, T> {
    /// Requests arrive in `cache` over `transport`. `answers` are the other process's answers to claims.
    pub fn new(
        cache: &Full<B>,
        transport: T,
        setup: &Setup,
        answers: mpsc::Receiver<bool>,
    ) -> Result<Self> {
        let (cache, config) = (cache.cache(), cache.cache().config());
        let storage = (storage(cache.device(), setup)?, setup.arrival_bytes);
        let staging = cache.new_transfer_staging()?;
        Ok(Self {
            receiver: Receiver::with_storage(transport, DEADLINES, storage),
            fingerprint: fingerprint(config, setup.seed),
            layout: staging.layout().clone(),
            max_context: config.max_context,
            coming: HashMap::new(),
            late: VecDeque::new(),
            start: Instant::now(),
            staging,
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
            // It fits after other requests were admitted.
            Err(TransferError::NoMemory { needed, budget, .. }) if needed <= budget => Ok(None),
            Err(error @ TransferError::NoMemory { .. }) => {
                Err(anyhow!("{error}: raise --arrival-memory"))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Takes the memory of prompts that are still being computed, unless a request with memory has been offered. Such
    /// requests free their memory by themselves. But a prompt in computation may depend on the requests that wait here,
    /// and would then hold its memory forever.
    fn make_room(&mut self) -> Result<()> {
        let has_room = |coming: &Coming| coming.transfer.is_some() && coming.at_ms.is_some();
        if !self.coming.values().any(has_room) {
            for transfer in self.coming.values_mut().filter_map(|coming| coming.transfer.take()) {
                self.receiver.give_up(transfer)?;
            }
        }
        Ok(())
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
                // Requests that were opened earlier come first. If one of them is whole already, the other process may
                // compute nothing until it has been entered here.
                let none_waits = self.coming.values().all(|coming| coming.transfer.is_some());
                let transfer = if none_waits { self.read(open)? } else { None };
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
                coming.at_ms = Some(at_ms);
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
                    self.make_room()?;
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
        let (Self { staging, answers, start, fingerprint, .. }, mut entered_ms) = (self, 0.0);
        let id = cache.arrive(index, (tokens, coming.reused), |cache, stream| {
            let reserved = cache.reserve(at)?;
            let mut target = Target { cache, stream, staging, weights: fingerprint.weights };
            let mut channel = Channel { to: std::io::stdout(), answers };
            let until = start.elapsed() + ANSWER_TIMEOUT;
            let mut claim = target.load(&verified, reserved, until, &mut channel)?;
            let id = loop {
                claim = match target.settle(start.elapsed(), claim, &mut channel)? {
                    Claimed::Admitted(id) => break id,
                    Claimed::Waits(claim) => claim,
                };
                // Polling need not be fast: no step runs before the request is admitted.
                std::thread::sleep(Duration::from_micros(50));
            };
            entered_ms = now_ms();
            Ok(id)
        })?;
        let at_ms = coming.at_ms.context("what is admitted was offered")?;
        let bytes = verified.bytes() as u64;
        let on_device = verified.kind() != MemoryKind::Host;
        Ok((id, Came { at_ms, entered_ms, bytes, on_device }))
    }

    fn early_bytes(&self) -> u64 {
        self.receiver.stats().early_bytes
    }
}

/// The connection to the other process.
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

    /// Any failure here ends the replay, and with it the other process.
    fn give_up(&mut self, _source: Source) {}
}

#[cfg(test)]
mod tests {
    use dsv4_kv::StepRequest;
    use dsv4_kv::device::{EmuDevice, EmuOptions, Emulator};
    use dsv4_kv::transfer::Positions;
    use dsv4_kv_transfer::transport::{Fabric, Loopback};
    use dsv4_kv_transfer::{OpenTransfer, Sender};

    use super::*;
    use crate::replay::ReplayArgs;
    use crate::replay::execute::Execute as _;
    use crate::replay::open::full_on;
    use crate::replay::place::Place;

    /// Tokens of each prompt.
    const TOKENS: u32 = 5;

    /// Prompts that were computed, and a process with memory for the bytes of one of them.
    struct Moves {
        source: Full<Emulator>,
        staging: TransferStaging<Emulator>,
        sender: Sender<Loopback>,
        takes: BytesIn<Emulator, Loopback>,
        seed: u64,
        open: HashMap<usize, (RequestId, OpenTransfer)>,
    }

    impl Moves {
        fn new() -> Self {
            let line = "replay --device cpu --gpu-mem 300MiB --requests 4 --max-requests 8 --peers 2 --verify 0";
            let args = ReplayArgs::of_line(line);
            let mut setup = Setup::new(&args, &Place::Cpu).unwrap();
            let options = EmuOptions { memory: 2 * setup.memory, ..EmuOptions::default() };
            let device = EmuDevice::new(options);
            let full = || full_on(device.clone(), &setup, setup.config.clone()).unwrap();
            let (source, target) = (full(), full());
            let staging = source.cache().new_transfer_staging().unwrap();
            let at = Self::end(&staging);
            setup.arrival_bytes = staging.layout().bytes(at);
            let (fabric, (_, answers)) = (Fabric::default(), mpsc::channel());
            let takes = BytesIn::new(&target, Loopback::new(&fabric), &setup, answers).unwrap();
            let sender = Sender::new(Loopback::new(&fabric), u64::MAX);
            let (seed, open) = (setup.seed, HashMap::new());
            Self { source, staging, sender, takes, seed, open }
        }

        fn end(staging: &TransferStaging<Emulator>) -> Positions {
            let draft = if staging.layout().has_draft_layers() { TOKENS } else { 0 };
            Positions { trunk: TOKENS, draft }
        }

        /// Opens a prompt. Returns whether there is memory for it.
        fn open(&mut self, index: usize) -> bool {
            let tokens: Vec<_> = (0..TOKENS).collect();
            let id = self.source.admit(index, Some(&tokens)).unwrap().0;
            let fingerprint = fingerprint(self.source.cache().config(), self.seed);
            let end = Self::end(&self.staging);
            let (cache, stream) = self.source.parts();
            let export = cache.export(stream, &mut self.staging, id).unwrap();
            let transfer = self.sender.open(&export, fingerprint, (end, &tokens)).unwrap();
            let Opening { manifest, payload } = transfer.opening();
            let payload = payload.0;
            self.takes.hear(ToDecode::Open { index, reused: 0, manifest, payload }).unwrap();
            self.open.insert(index, (id, transfer));
            self.takes.coming[&index].transfer.is_some()
        }

        /// Computes the prompt, and offers it.
        fn offer(&mut self, index: usize) {
            let (id, mut transfer) = self.open.remove(&index).unwrap();
            let tokens: Vec<_> = (0..TOKENS).collect();
            self.source.step(&[StepRequest { id, start: 0, tokens: TOKENS }], &tokens).unwrap();
            let (cache, stream) = self.source.parts();
            let mut export = cache.export(stream, &mut self.staging, id).unwrap();
            self.sender.take(&mut transfer, &mut export).unwrap();
            let Offer { manifest, payload } = self.sender.offer(transfer, Duration::MAX).unwrap();
            let (payload, at_ms) = (payload.0, 1.0);
            self.takes.hear(ToDecode::Offer { index, manifest, payload, at_ms }).unwrap();
            self.source.release(id).unwrap();
        }

        /// Polls until requests have arrived, and takes them.
        fn come(&mut self) -> Vec<usize> {
            let polls = (0..10).map(|_| self.takes.poll().unwrap());
            let came = polls.into_iter().find(|came| !came.is_empty()).unwrap_or_default();
            for index in &came {
                let coming = self.takes.coming.remove(index).unwrap();
                assert!(coming.verified.is_some() && coming.at_ms == Some(1.0));
            }
            came
        }
    }

    /// A prompt gets memory only after those that were opened before it.
    #[test]
    fn memory_is_taken_in_order() {
        let mut moves = Moves::new();
        assert!(moves.open(0) && !moves.open(1), "there is memory for one");
        moves.takes.hear(ToDecode::Forget { index: 0 }).unwrap();
        assert!(!moves.open(2), "the first of those without memory is computed still");
        moves.offer(1);
        assert!(!moves.open(3));
        assert_eq!(moves.come(), [1]);
        // Among requests without memory, the first that is offered arrives first.
        moves.offer(3);
        assert_eq!(moves.come(), [3]);
        moves.offer(2);
        assert_eq!(moves.come(), [2]);
        assert!(moves.takes.is_idle() && moves.open(4));
    }

    /// A prompt that has all memory gives it up for requests that are whole, since its computation may need them to be
    /// entered first.
    #[test]
    fn prompts_give_their_memory_to_offers() {
        let mut moves = Moves::new();
        assert!(moves.open(0) && !moves.open(1) && !moves.open(2));
        moves.offer(1);
        moves.offer(2);
        assert_eq!(moves.come(), [1]);
        assert_eq!(moves.come(), [2]);
        moves.offer(0);
        assert_eq!(moves.come(), [0]);
        assert!(moves.takes.is_idle());
        assert_eq!(moves.takes.receiver.taken_bytes(), 0);
    }
}
