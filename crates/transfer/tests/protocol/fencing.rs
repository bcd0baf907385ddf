//! Fences: after failed reads too, while other reads go on, and when the transport cannot be reopened.

use std::time::Duration;

use dsv4_kv_transfer::mistake::{Mistake, make};
use dsv4_kv_transfer::protocol::{Ready, ReceiverStats};
use dsv4_kv_transfer::transport::Loopback;
use dsv4_kv_transfer::{Deadlines, Receiver, TransferError, TransferId};

use crate::faulty::{Fault, Line};
use crate::streaming::Prefill;
use crate::world::{MOST, NEVER, World};

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
    let mut prefill =
        Prefill::new(&mut line.world.source, &mut line.sender, line.world.fingerprint);
    let transfer =
        line.receiver.open(line.now, &prefill.opening(), &line.world.expected()).unwrap();
    let mut step = |line: &mut Line| {
        let World { source, story, .. } = &mut line.world;
        let ready: Ready = prefill.step(source, story, &mut line.sender);
        line.receiver.ready(line.now, transfer, &ready).unwrap();
        assert!(line.settle(MILLI).is_empty());
    };
    (0..2).for_each(|_| step(&mut line));
    let before = line.receiver.stats().bytes;
    assert_eq!(before, line.world.layout.block_bytes());
    line.fail();
    assert!(line.settle(DEADLINES.fence).is_empty());
    let stats = line.receiver.stats();
    assert_eq!((stats.fences, stats.bytes, line.receiver.quarantined_bytes()), (1, before, 0));
    step(&mut line);
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

/// The id of a transfer is unknown to another receiver, even if both read the same offer.
pub fn transfers_are_of_one_receiver() {
    for mistake in [Mistake::IdsRepeat, Mistake::Nothing] {
        make(mistake);
        let mut line = Line::new(DEADLINES);
        let mut other = Receiver::new(Loopback::new(&line.fabric), DEADLINES, MOST);
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
