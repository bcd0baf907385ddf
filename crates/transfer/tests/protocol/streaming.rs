//! Blocks are read while the rest of their prompt is computed.

use std::ops::Range;
use std::time::Duration;

use dsv4_kv::RequestId;
use dsv4_kv::device::Backend;
use dsv4_kv::transfer::Positions;
use dsv4_kv_tests::fed::{Padding, Part};
use dsv4_kv_tests::stories::{STEP_TOKENS, Story};
use dsv4_kv_transfer::image::{Fact, decode_manifest, decode_opening};
use dsv4_kv_transfer::mistake::{Mistake, make};
use dsv4_kv_transfer::protocol::{NotOffered, Offer, Opening, Ready, ReceiverStats};
use dsv4_kv_transfer::transport::{Fabric, Files, Loopback};
use dsv4_kv_transfer::{
    Deadlines, Fingerprint, ImageError, OpenTransfer, Receiver, Sender, Source, Target,
    TransferError, TransferId, Transport, Verified,
};

use crate::faulty::{Fault, Line};
use crate::transports::private_directory;
use crate::world::{self, BLOCKS, Direct, MAX_BYTES, NEVER, Site, World};

/// Tokens of a prompt, of which two blocks are full.
pub const PROMPT: usize = 300;

/// Tokens of a prompt, and tokens of each chunk, after which final blocks are sent.
#[derive(Clone, Copy)]
pub struct Plan {
    pub prompt: usize,
    pub chunk: usize,
}

/// The short prompt.
pub const SHORT: Plan = Plan { prompt: PROMPT, chunk: 100 };

/// A prompt that is sent while it is computed.
pub struct Prefill {
    pub id: RequestId,
    plan: Plan,
    transfer: OpenTransfer,
    done: usize,
}

impl Prefill {
    /// A prefill of the short prompt.
    pub fn new<B: Backend, T: Transport>(
        site: &mut Site<B>,
        sender: &mut Sender<T>,
        fingerprint: Fingerprint,
    ) -> Self {
        Self::planned(site, sender, (fingerprint, SHORT))
    }

    pub fn planned<B: Backend, T: Transport>(
        site: &mut Site<B>,
        sender: &mut Sender<T>,
        (fingerprint, plan): (Fingerprint, Plan),
    ) -> Self {
        let id = site.fed.manager.admit().unwrap();
        let prompt = plan.prompt as u32;
        let at = Positions { trunk: prompt, draft: prompt };
        let tokens: Vec<u32> = (0..prompt).collect();
        let transfer = site.open(sender, (id, fingerprint), (at, &tokens));
        Self { id, plan, transfer, done: 0 }
    }

    pub fn opening(&self) -> Opening {
        self.transfer.opening()
    }

    /// Computes a chunk, and takes the parts that are final afterwards.
    pub fn step<B: Backend, T: Transport>(
        &mut self,
        site: &mut Site<B>,
        story: &Story,
        sender: &mut Sender<T>,
    ) -> Ready {
        let end = (self.done + self.plan.chunk).min(self.plan.prompt);
        while self.done < end {
            let step: Range<usize> = self.done..end.min(self.done + STEP_TOKENS as usize);
            self.done = step.end;
            site.fed.step(&[Part::new(self.id, story, step)], Padding::None);
        }
        let stream = site.fed.stream.clone();
        let mut export = site.fed.manager.export(&stream, &mut site.staging, self.id).unwrap();
        sender.take(&mut self.transfer, &mut export).unwrap()
    }

    pub fn is_whole(&self) -> bool {
        self.transfer.is_whole()
    }

    pub fn offer<T: Transport>(self, sender: &mut Sender<T>) -> Offer {
        sender.offer(self.transfer, NEVER).map_err(|NotOffered(_, error)| error).unwrap()
    }
}

const MILLI: Duration = Duration::from_millis(1);
const DEADLINES: Deadlines = Deadlines {
    read: Duration::from_millis(100),
    fence: Duration::from_millis(400),
    quiet: Duration::from_millis(200),
};

/// Moves one request, from the first chunk to its admission, and polls the receiver after each chunk.
fn stream<T: Transport>(world: &mut World, source: T, target: T) -> ReceiverStats {
    let (mut sender, mut now) = (Sender::new(source, MAX_BYTES), Duration::ZERO);
    let mut receiver = Receiver::new(target, DEADLINES, 64 << 20);
    let mut prefill = Prefill::new(&mut world.source, &mut sender, world.fingerprint);
    let (id, opening) = (prefill.id, prefill.opening());
    let transfer = receiver.open(now, &opening, &world.expected()).unwrap();
    let block = world.layout.block_bytes();
    let mut read = Vec::new();
    while !prefill.is_whole() {
        now += 50 * MILLI;
        let ready = prefill.step(&mut world.source, &world.story, &mut sender);
        receiver.ready(now, transfer, &ready).unwrap();
        assert!(receiver.poll(now).is_empty(), "it was not offered yet");
        read.push(receiver.stats().bytes);
    }
    let all = world.layout.bytes(Positions { trunk: PROMPT as u32, draft: PROMPT as u32 });
    assert_eq!(read, [0, block, all], "as blocks became full, and all of it in the end");
    let offer = prefill.offer(&mut sender);
    receiver.offered(now, transfer, &offer).unwrap();
    let (ended, verified) = receiver.poll(now).remove(0);
    assert_eq!(ended, transfer);
    let verified = verified.unwrap();
    let got = admit(world, &verified, &mut sender);
    let (at, want) = world.source.export(id);
    assert!(got == want && verified.manifest().at == at, "every byte of one that did not move");
    let late =
        receiver.ready(now, transfer, &Ready { source: verified.manifest().source, bytes: 0 });
    assert!(matches!(late, Err(TransferError::NoSuchTransfer { .. })));
    world.source.fed.manager.release(id).unwrap();
    receiver.stats()
}

/// Admits a request, and returns its bytes.
fn admit<T: Transport>(world: &mut World, verified: &Verified, sender: &mut Sender<T>) -> Vec<u8> {
    let Site { fed, staging } = &mut world.target;
    let (reserved, stream) =
        (fed.manager.reserve(verified.manifest().at).unwrap(), fed.stream.clone());
    let mut target = Target {
        cache: &mut fed.manager,
        stream: &stream,
        staging,
        weights: crate::world::weights(),
    };
    let id = world::admit(&mut target, verified, reserved, &mut Direct(sender)).unwrap();
    let (_, bytes) = world.target.export(id);
    world.target.fed.manager.release(id).unwrap();
    bytes
}

pub fn blocks_come_before_the_prompt_is_computed() {
    let mut world = World::new();
    let fabric = Fabric::default();
    let stats = stream(&mut world, Loopback::new(&fabric), Loopback::new(&fabric));
    assert_eq!((stats.verified, stats.early_bytes), (1, stats.bytes), "the offer came last");
    let directory = private_directory();
    let files = || Files::new(directory.path()).unwrap();
    assert_eq!(stream(&mut world, files(), files()), stats);
    assert_eq!(world.target.fed.manager.ledger().free_blocks(), BLOCKS);
}

impl Line {
    fn open(&mut self) -> (Prefill, TransferId) {
        let Self { world, sender, receiver, .. } = self;
        let prefill = Prefill::new(&mut world.source, sender, world.fingerprint);
        let transfer = receiver.open(self.now, &prefill.opening(), &world.expected()).unwrap();
        (prefill, transfer)
    }

    /// Computes a chunk, whose read gets this fault.
    fn step(&mut self, prefill: &mut Prefill, transfer: TransferId, fault: Fault) {
        let Self { world, sender, receiver, .. } = self;
        let ready = prefill.step(&mut world.source, &world.story, sender);
        receiver.ready(self.now, transfer, &ready).unwrap();
        self.plan.next.set(Some(fault));
    }

    /// Checks at the end that all memory is free, and that nothing was written to free memory.
    fn ends(mut self, prefill: RequestId) {
        self.wait(Duration::from_secs(1));
        assert!(self.receiver.clear_quarantine().unwrap());
        assert_eq!((self.receiver.taken_bytes(), self.plan.outside.get()), (0, 0));
        self.world.source.fed.manager.release(prefill).unwrap();
    }
}

/// Every fault in the read of one chunk is noticed, at the end at the latest, and costs no memory.
pub fn a_fault_in_one_chunk_is_seen() {
    let late = 250 * MILLI;
    let faults =
        [Fault::Stale, Fault::Partial, Fault::Error(late), Fault::Delay(late), Fault::Never(late)];
    for (fault, chunk) in faults.into_iter().zip([1, 2, 1, 2, 1]) {
        let mut faults = Line::new(DEADLINES);
        let (mut prefill, transfer) = faults.open();
        let id = prefill.id;
        let mut ended = Vec::new();
        for at in 0..3 {
            let now = if at == chunk { fault } else { Fault::None };
            faults.step(&mut prefill, transfer, now);
            ended.extend(faults.wait(MILLI));
            ended.extend(faults.wait(120 * MILLI));
            if !ended.is_empty() {
                break;
            }
        }
        if ended.is_empty() {
            let offer = prefill.offer(&mut faults.sender);
            faults.receiver.offered(faults.now, transfer, &offer).unwrap();
            ended = faults.wait(MILLI);
        }
        let (_, result) = ended.remove(0);
        let error = result.expect_err("its bytes are not the source's");
        let is_known = match fault {
            Fault::Stale | Fault::Partial => {
                matches!(error, TransferError::Image(ImageError::Digest { .. }))
            }
            Fault::Error(_) => matches!(error, TransferError::Transport(_)),
            _ => matches!(error, TransferError::Deadline { .. }),
        };
        assert!(is_known, "{fault:?}: {error}");
        faults.ends(id);
    }
}

/// If a source falls silent, or a client leaves, memory stays taken only for a limited time: until the fence if anything
/// was read into it.
pub fn silence_and_giving_up_free_memory() {
    let mut faults = Line::new(DEADLINES);
    let (prefill, transfer) = faults.open();
    assert!(faults.receiver.taken_bytes() > 0 && faults.wait(199 * MILLI).is_empty());
    let error = faults.wait(MILLI).remove(0).1.unwrap_err();
    let TransferError::Quiet { source_of, done: 0, needed: 1.., .. } = error else {
        panic!("{error}")
    };
    assert_eq!(source_of, transfer.source());
    assert_eq!((faults.receiver.taken_bytes(), faults.receiver.stats().quiet), (0, 1));
    assert!(faults.receiver.idle_bytes() > 0, "nothing was read, and so the next one has it");
    // The deadline counts from the last message, not from the opening.
    let id = prefill.id;
    faults.sender.abandon(prefill.transfer).unwrap();
    faults.world.source.fed.manager.release(id).unwrap();
    let (mut prefill, transfer) = faults.open();
    for _ in 0..2 {
        faults.step(&mut prefill, transfer, Fault::None);
        assert!(faults.wait(150 * MILLI).is_empty());
    }
    faults.receiver.give_up(transfer).unwrap();
    let bytes = faults.receiver.taken_bytes();
    assert!(bytes > 0, "its reads have ended, but no byte was compared");
    assert_eq!((faults.receiver.quarantined_bytes(), faults.receiver.idle_bytes()), (bytes, 0));
    assert!(matches!(
        faults.receiver.give_up(transfer),
        Err(TransferError::NoSuchTransfer { id }) if id == transfer
    ));
    faults.wait(DEADLINES.fence);
    assert_eq!((faults.receiver.taken_bytes(), faults.receiver.stats().fences), (0, 1));
    // Given up while a read goes on: it ends in quarantine, and is not compared either.
    let id = prefill.id;
    faults.sender.abandon(prefill.transfer).unwrap();
    faults.world.source.fed.manager.release(id).unwrap();
    let (mut prefill, transfer) = faults.open();
    (0..2).for_each(|_| {
        faults.step(&mut prefill, transfer, Fault::Delay(50 * MILLI));
        faults.wait(MILLI);
    });
    faults.receiver.give_up(transfer).unwrap();
    let bytes = faults.receiver.taken_bytes();
    assert!(bytes > 0 && faults.receiver.quarantined_bytes() == bytes);
    faults.wait(60 * MILLI);
    assert_eq!((faults.receiver.taken_bytes(), faults.receiver.stats().ended_late), (bytes, 1));
    faults.wait(DEADLINES.fence);
    assert_eq!((faults.receiver.taken_bytes(), faults.receiver.stats().fences), (0, 2));
    faults.ends(prefill.id);
}

/// Messages about another source, or about more bytes than the payload has, change nothing. An offer of another owner's
/// request than was opened is refused; with the mistake it is admitted.
pub fn an_offer_is_of_what_was_opened() {
    let mut faults = Line::new(DEADLINES);
    let (mut prefill, transfer) = faults.open();
    let source = decode_opening(&prefill.opening().manifest).unwrap().source;
    let other = Source { lease: source.lease + 1, ..source };
    let now = faults.now;
    let refused = faults.receiver.ready(now, transfer, &Ready { source: other, bytes: 1 });
    assert!(matches!(refused, Err(TransferError::OtherSource { .. })));
    let refused = faults.receiver.ready(now, transfer, &Ready { source, bytes: 1 << 40 });
    assert!(matches!(refused, Err(TransferError::Image(ImageError::Length { .. }))));
    let opening = prefill.opening();
    let as_offer = Offer { manifest: opening.manifest.clone(), payload: opening.payload.clone() };
    let refused = faults.receiver.offered(now, transfer, &as_offer).unwrap_err();
    assert!(matches!(refused, TransferError::Image(ImageError::Flags { found: 1, needed: 0 })));
    (0..3).for_each(|_| faults.step(&mut prefill, transfer, Fault::None));
    let id = prefill.id;
    let right = prefill.offer(&mut faults.sender);
    let as_opening = Opening { manifest: right.manifest.clone(), payload: right.payload.clone() };
    let refused = faults.receiver.open(now, &as_opening, &faults.world.expected()).unwrap_err();
    assert!(matches!(refused, TransferError::Image(ImageError::Flags { found: 0, needed: 1 })));
    let mut manifest = decode_manifest(&right.manifest).unwrap().0;
    let config = faults.world.target.fed.manager.config();
    manifest.fingerprint = Fingerprint::new(config, b"weights", b"another's salt", b"").unwrap();
    let refused = faults.world.expected();
    let foreign = manifest.check(&refused).unwrap_err();
    let is_owner = matches!(foreign, ImageError::Foreign { fact: Fact::Owner, .. });
    assert!(is_owner, "nobody would have opened it: {foreign}");
    let wrong = Offer { manifest: manifest.encode(), ..right.clone() };
    let refused = faults.receiver.offered(now, transfer, &wrong).unwrap_err();
    assert!(matches!(refused, TransferError::Image(ImageError::OtherThanOpened { .. })));
    make(Mistake::OpeningIgnored);
    faults.receiver.offered(now, transfer, &wrong).unwrap();
    make(Mistake::Nothing);
    let admitted = faults.wait(MILLI).remove(0).1.expect("only the opening tells");
    assert_eq!(admitted.manifest().fingerprint, manifest.fingerprint);
    drop(admitted);
    faults.ends(id);
}

/// Memory that a transport cannot give back counts as taken until the transport is fenced.
pub fn memory_that_stays_with_the_transport_counts() {
    let mut faults = Line::new(DEADLINES);
    let offer = faults.world.offer(&mut faults.sender, 2);
    faults.receiver.begin(faults.now, &offer, &faults.world.expected()).unwrap();
    faults.plan.keeps.set(true);
    let error = faults.wait(MILLI).remove(0).1.unwrap_err();
    assert!(matches!(error, TransferError::Transport(_)), "{error}");
    let bytes = faults.world.samples[2].payload.len() as u64;
    assert_eq!(
        (faults.receiver.taken_bytes(), faults.receiver.quarantined_bytes()),
        (bytes, bytes)
    );
    // The same holds for an opening that is given up.
    let (prefill, transfer) = faults.open();
    faults.receiver.give_up(transfer).unwrap();
    assert!(faults.receiver.quarantined_bytes() > bytes);
    assert_eq!(faults.receiver.stats().fences, 0);
    faults.ends(prefill.id);
}
