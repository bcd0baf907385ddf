//! Fences: after failed reads too, while other reads go on, and when the transport cannot be reopened.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use dsv4_kv_transfer::mistake::{Mistake, make};
use dsv4_kv_transfer::protocol::{Ready, ReceiverStats};
use dsv4_kv_transfer::transport::{Loopback, Storage};
use dsv4_kv_transfer::{Deadlines, Receiver, TransferError, TransferId};

use crate::faulty::{Fault, Faulty, Line};
use crate::streaming::Prefill;
use crate::world::{MAX_BYTES, NEVER, World, emulated};

const MILLI: Duration = Duration::from_millis(1);
const DEADLINES: Deadlines = Deadlines {
    read: Duration::from_millis(100),
    fence: Duration::from_millis(400),
    quiet: Duration::from_millis(5000),
};

impl Line {
    /// Begins a read with this fault.
    fn begin(&mut self, sample: usize, fault: Fault) -> Result<TransferId, TransferError> {
        let (source, offer) = self.world.offer_until(&mut self.sender, sample, NEVER);
        self.plan.next.set(Some(fault));
        let begun = self.receiver.begin(self.now, &offer, &self.world.expected());
        if begun.is_err() {
            self.sender.give_up(source);
        }
        begun
    }

    /// The results of the transfers that have ended `time` later. Their payloads are dropped and their sources given
    /// up.
    fn settle(&mut self, time: Duration) -> Vec<Result<(), TransferError>> {
        let ended = self.wait(time);
        let settle = |(id, result): (TransferId, Result<_, _>)| {
            self.sender.give_up(id.source());
            result.map(drop)
        };
        ended.into_iter().map(settle).collect()
    }

    /// Opens a prompt, and computes it until its first block is ready, whose read gets this fault.
    fn open_block(&mut self, fault: Fault) -> (Prefill, TransferId) {
        let Self { world, sender, receiver, now, .. } = self;
        let mut prefill = Prefill::new(&mut world.source, sender, world.fingerprint);
        let transfer = receiver.open(*now, &prefill.opening(), &world.expected()).unwrap();
        self.compute(&mut prefill, transfer);
        self.compute(&mut prefill, transfer);
        self.plan.next.set(Some(fault));
        assert!(self.settle(MILLI).is_empty());
        assert_eq!(self.receiver.stats().bytes, self.world.layout.block_bytes());
        (prefill, transfer)
    }

    /// Computes a chunk of a prompt.
    fn compute(&mut self, prefill: &mut Prefill, transfer: TransferId) {
        let World { source, story, .. } = &mut self.world;
        let ready: Ready = prefill.step(source, story, &mut self.sender);
        self.receiver.ready(self.now, transfer, &ready).unwrap();
    }

    /// A read that fails; its memory is quarantined.
    fn fail(&mut self) {
        self.begin(2, Fault::Error(50 * MILLI)).unwrap();
        let ended = self.settle(MILLI);
        assert!(matches!(ended[..], [Err(TransferError::Transport(_))]), "{ended:?}");
        assert_eq!(self.receiver.quarantined_bytes(), self.world.samples[2].payload.len() as u64);
    }
}

/// The result of uninterrupted traffic.
struct Traffic {
    /// When the memory of an earlier failed read was free again.
    freed: Option<Duration>,
    errors: usize,
    stats: ReceiverStats,
}

/// For a second, a read of 30 ms begins every 10 ms.
fn traffic(mistake: Mistake) -> Traffic {
    let mut line = Line::new(DEADLINES);
    line.fail();
    make(mistake);
    let (mut freed, mut errors) = (None, 0);
    for _ in 0..100 {
        line.begin(1, Fault::Delay(30 * MILLI)).unwrap();
        assert!(line.receiver.reads() > 0, "traffic without a pause");
        line.plan.next.set(Some(Fault::Delay(30 * MILLI)));
        errors += line.settle(10 * MILLI).iter().filter(|ended| ended.is_err()).count();
        if line.receiver.quarantined_bytes() == 0 {
            freed.get_or_insert(line.now);
        }
    }
    make(Mistake::Nothing);
    assert!(mistake != Mistake::Nothing || line.plan.outside.get() == 0);
    Traffic { freed, errors, stats: line.receiver.stats() }
}

/// The memory of a failed read is freed under uninterrupted traffic, after its second deadline and the first deadline
/// of the reads under way. No other read is lost.
pub fn failed_reads_end_under_traffic() {
    let Traffic { freed, errors, stats } = traffic(Mistake::Nothing);
    let freed = freed.expect("its room is free");
    assert!(freed >= DEADLINES.fence && freed <= DEADLINES.fence + DEADLINES.read, "{freed:?}");
    assert_eq!((errors, stats.fences), (0, 1), "{stats:?}");
    assert!(stats.verified > 80, "{stats:?}");
    assert!(traffic(Mistake::FailedStay).freed.is_none(), "without a second deadline");
    assert!(traffic(Mistake::ReadsWhileDraining).freed.is_none(), "without a pause");
    let lost = traffic(Mistake::FenceWithoutDraining);
    assert!(lost.errors > 0, "without waiting for those under way");
}

/// A fence costs a request that waits for its source nothing: no byte is read again.
pub fn what_waits_keeps_its_bytes() {
    let mut line = Line::new(DEADLINES);
    let (mut prefill, transfer) = line.open_block(Fault::None);
    let before = line.receiver.stats().bytes;
    line.fail();
    assert!(line.settle(DEADLINES.fence).is_empty());
    let stats = line.receiver.stats();
    assert_eq!((stats.fences, stats.bytes, line.receiver.quarantined_bytes()), (1, before, 0));
    line.compute(&mut prefill, transfer);
    let (id, offer) = (prefill.id, prefill.offer(&mut line.sender));
    line.receiver.offered(line.now, transfer, &offer).unwrap();
    line.now += MILLI;
    let verified = line.receiver.poll(line.now).remove(0).1.unwrap();
    let (_, want) = line.world.source.export(id);
    assert!(verified.payload() == want, "every byte");
    assert_eq!(line.receiver.stats().bytes, want.len() as u64, "each was read once");
}

/// A transport that cannot be reopened is tried again. Meanwhile requests are refused with the reason; afterwards they
/// are read.
pub fn a_transport_is_made_again() {
    let mut line = Line::new(DEADLINES);
    line.fail();
    line.plan.fences_fail.set(3);
    // A request that was opened is lost with the transport, and its memory is free.
    let prefill = Prefill::new(&mut line.world.source, &mut line.sender, line.world.fingerprint);
    line.receiver.open(line.now, &prefill.opening(), &line.world.expected()).unwrap();
    let ended = line.settle(DEADLINES.fence);
    assert!(matches!(ended[..], [Err(TransferError::NoTransport { tries: 1, .. })]), "{ended:?}");
    let quarantined = line.receiver.quarantined_bytes();
    assert!(quarantined > 0 && line.receiver.taken_bytes() == quarantined, "it may be written yet");
    for tries in [1, 2] {
        let error = line.begin(1, Fault::None).unwrap_err();
        let is_it = matches!(&error, TransferError::NoTransport { tries: found, why } if *found == tries && why.contains("no agent"));
        assert!(is_it, "{error}");
        // The next attempt comes only after a while.
        assert!(line.settle(99 * MILLI).is_empty());
        assert_eq!(line.receiver.stats().failed_fences, u64::from(tries));
        make(Mistake::FenceOnce);
        line.settle(MILLI);
        assert_eq!(line.receiver.stats().failed_fences, u64::from(tries), "what trying is for");
        make(Mistake::Nothing);
        assert!(line.settle(Duration::ZERO).is_empty());
        assert_eq!(line.receiver.stats().failed_fences, u64::from(tries) + 1);
    }
    // An explicit call tries at once.
    assert!(line.receiver.clear_quarantine().unwrap());
    let stats = line.receiver.stats();
    assert_eq!((stats.fences, stats.failed_fences, line.receiver.taken_bytes()), (1, 3, 0));
    line.begin(2, Fault::None).unwrap();
    let ended = line.settle(MILLI);
    assert!(matches!(ended[..], [Ok(())]), "{ended:?}");
    // Again, without an explicit call, by polling alone.
    line.fail();
    line.plan.fences_fail.set(1);
    line.settle(DEADLINES.fence);
    line.begin(1, Fault::None).unwrap_err();
    line.settle(100 * MILLI);
    line.begin(1, Fault::None).unwrap();
    assert!(matches!(line.settle(MILLI)[..], [Ok(())]));
    assert_eq!(line.plan.outside.get(), 0);
}

/// Memory that the transport does not give back is freed by a fence.
pub fn kept_memory_comes_back() {
    let mut line = Line::new(DEADLINES);
    line.begin(2, Fault::None).unwrap();
    line.plan.keeps.set(true);
    assert!(matches!(line.settle(MILLI)[..], [Err(TransferError::Transport(_))]));
    line.plan.keeps.set(false);
    assert!(line.receiver.quarantined_bytes() > 0);
    line.settle(DEADLINES.fence);
    assert_eq!((line.receiver.taken_bytes(), line.receiver.stats().fences), (0, 1));
}

/// A transport reports too early that a read has ended: the later bytes are written to memory that is still
/// quarantined.
pub fn success_that_is_too_early() {
    let mut line = Line::new(DEADLINES);
    let bytes = line.world.samples[2].payload.len() as u64;
    line.begin(2, Fault::Early(50 * MILLI)).unwrap();
    let ended = line.settle(MILLI);
    assert!(matches!(ended[..], [Err(TransferError::Image(_))]), "{ended:?}");
    let receiver = &line.receiver;
    assert_eq!((receiver.quarantined_bytes(), receiver.idle_bytes()), (bytes, 0));
    // Other requests are read meanwhile.
    line.begin(2, Fault::None).unwrap();
    assert!(matches!(line.settle(60 * MILLI)[..], [Ok(())]));
    assert_eq!((line.plan.late.get(), line.plan.outside.get()), (1, 0));
    assert_eq!(line.receiver.taken_bytes(), bytes);
    line.settle(DEADLINES.fence);
    assert_eq!((line.receiver.taken_bytes(), line.receiver.stats().fences), (0, 1));
}

/// Memory that is used again has the bytes of an earlier payload, here all of the right ones. A read into it that is
/// reported done too early is noticed nevertheless, and its later bytes do not hit the next payload.
pub fn leftovers_are_not_taken_for_bytes() {
    let storages = || [Storage::host(), Storage::device(&emulated(), 0).unwrap()];
    for mistake in [Mistake::LeftoversStay, Mistake::Nothing] {
        for storage in storages() {
            let mut line = Line::new(DEADLINES);
            let transport = Faulty::new(&line.fabric, &line.plan);
            line.receiver = Receiver::with_storage(transport, DEADLINES, (storage, MAX_BYTES));
            line.begin(2, Fault::None).unwrap();
            assert!(matches!(line.settle(MILLI)[..], [Ok(())]));
            assert!(line.receiver.idle_bytes() > 0, "it is used again");
            make(mistake);
            line.begin(2, Fault::Early(50 * MILLI)).unwrap();
            let ended = line.settle(MILLI);
            make(Mistake::Nothing);
            line.settle(60 * MILLI);
            let outside = u32::from(mistake != Mistake::Nothing);
            assert_eq!((line.plan.late.get(), line.plan.outside.get()), (1, outside));
            match &ended[..] {
                [Ok(())] => assert_eq!(mistake, Mistake::LeftoversStay),
                [Err(TransferError::Image(_))] => assert_eq!(mistake, Mistake::Nothing),
                other => panic!("{other:?}"),
            }
        }
    }
}

/// How a transfer ends whose first block was read, and was not compared with a digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    GivenUp,
    /// The source falls silent.
    Silent,
    /// The source frees its memory before the rest is read.
    Gone,
}

/// Ends a transfer of whose payload the first block was read and reported done too early. Checks what becomes of its
/// memory.
fn end_uncompared(mistake: Mistake, end: End) {
    let mut line = Line::new(DEADLINES);
    let late = if end == End::Silent { DEADLINES.quiet + 100 * MILLI } else { 100 * MILLI };
    let (mut prefill, transfer) = line.open_block(Fault::Early(late));
    let bytes = line.receiver.taken_bytes();
    make(mistake);
    let ended = match end {
        End::GivenUp => {
            line.receiver.give_up(transfer).unwrap();
            Vec::new()
        }
        End::Silent => line.settle(DEADLINES.quiet),
        End::Gone => {
            line.compute(&mut prefill, transfer);
            prefill.offer(&mut line.sender);
            assert!(line.sender.give_up(transfer.source()));
            line.settle(MILLI)
        }
    };
    make(Mistake::Nothing);
    assert_eq!(ended.iter().filter(|ended| ended.is_err()).count(), ended.len());
    assert_eq!(ended.len(), usize::from(end != End::GivenUp), "{ended:?}");
    line.settle(150 * MILLI);
    let is_reused = mistake == Mistake::UncomparedReused;
    let writes = (line.plan.late.get(), line.plan.outside.get());
    assert_eq!(writes, (1, u32::from(is_reused)), "{end:?}");
    assert_eq!(line.receiver.quarantined_bytes(), if is_reused { 0 } else { bytes }, "{end:?}");
    line.settle(DEADLINES.fence);
    assert_eq!(line.receiver.taken_bytes(), 0, "{end:?}");
}

/// Bytes that were not compared may arrive after the read was reported done. So the memory of a transfer that ends
/// before its offer is not used again before the fence, if anything was read into it.
pub fn what_was_not_compared_is_not_used_again() {
    for end in [End::GivenUp, End::Silent, End::Gone] {
        end_uncompared(Mistake::UncomparedReused, end);
        end_uncompared(Mistake::Nothing, end);
    }
    // Nor is it freed with a transport that could not be reopened: reads may then go on.
    let mut line = Line::new(DEADLINES);
    line.open_block(Fault::None);
    line.fail();
    let taken = line.receiver.taken_bytes();
    line.plan.fences_fail.set(1);
    let ended = line.settle(DEADLINES.fence);
    assert!(matches!(ended[..], [Err(TransferError::NoTransport { .. })]), "{ended:?}");
    assert_eq!((line.receiver.taken_bytes(), line.receiver.quarantined_bytes()), (taken, taken));
    assert!(line.receiver.clear_quarantine().unwrap());
    assert_eq!(line.receiver.taken_bytes(), 0);
}

/// The memory of a read that ends in quarantine is free if all of its bytes are right. If they are not, they may still
/// come.
pub fn what_ends_late_is_compared() {
    for (fault, is_right) in [(Fault::Delay(20 * MILLI), true), (Fault::Early(50 * MILLI), false)] {
        let mut line = Line::new(DEADLINES);
        let bytes = line.world.samples[2].payload.len() as u64;
        let id = line.begin(2, fault).unwrap();
        line.receiver.give_up(id).unwrap();
        assert!(line.settle(30 * MILLI).is_empty());
        let receiver = &line.receiver;
        let found =
            (receiver.stats().ended_late, receiver.quarantined_bytes(), receiver.idle_bytes());
        assert_eq!(found, if is_right { (1, 0, bytes) } else { (1, bytes, 0) });
        line.settle(30 * MILLI);
        assert_eq!((line.plan.late.get(), line.plan.outside.get()), (1, 0));
        // Its deadline counts from the begin of the read.
        line.settle(DEADLINES.fence - 60 * MILLI);
        assert_eq!(
            (line.receiver.taken_bytes(), line.receiver.stats().fences),
            (0, u64::from(!is_right))
        );
    }
}

/// The id of a transfer is unknown to another receiver, even if both read the same offer.
pub fn transfers_are_of_one_receiver() {
    for mistake in [Mistake::IdsRepeat, Mistake::Nothing] {
        make(mistake);
        let mut line = Line::new(DEADLINES);
        let mut other = Receiver::new(Loopback::new(&line.fabric), DEADLINES, MAX_BYTES);
        let prefill =
            Prefill::new(&mut line.world.source, &mut line.sender, line.world.fingerprint);
        let opening = prefill.opening();
        let one = line.receiver.open(line.now, &opening, &line.world.expected()).unwrap();
        let two = other.open(line.now, &opening, &line.world.expected()).unwrap();
        make(Mistake::Nothing);
        let given_up = other.give_up(one);
        if mistake == Mistake::IdsRepeat {
            assert!(given_up.is_ok() && one == two, "what they differ for");
            continue;
        }
        let error = given_up.unwrap_err();
        assert!(matches!(error, TransferError::NoSuchTransfer { id } if id == one), "{error}");
        assert_eq!((other.reads(), one.source()), (1, two.source()));
        other.give_up(two).unwrap();
    }
}

/// A panic of a transport, which the program catches, loses the transfer that was polled, and no other.
pub fn a_panic_loses_one_transfer() {
    let mut line = Line::new(DEADLINES);
    let ids = [(2, Fault::None), (1, Fault::Panic), (2, Fault::None), (1, Fault::None)]
        .map(|(sample, fault)| line.begin(sample, fault).unwrap());
    assert!(catch_unwind(AssertUnwindSafe(|| line.wait(MILLI))).is_err());
    let ended: Vec<_> =
        line.wait(MILLI).into_iter().map(|(id, ended)| (id, ended.is_ok())).collect();
    assert_eq!(ended, [(ids[0], true), (ids[2], true), (ids[3], true)]);
}
