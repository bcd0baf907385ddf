//! Payloads that are read in several pieces, into memory that earlier payloads have used.

use std::rc::Rc;
use std::time::Duration;

use dsv4_kv_transfer::mistake::{Mistake, make};
use dsv4_kv_transfer::transport::{Fabric, Loopback};
use dsv4_kv_transfer::{
    Deadlines, ImageError, Receiver, Sender, TransferError, TransferId, Verified,
};

use crate::faulty::{Fault, Faulty, Plan};
use crate::world::{MAX_BYTES, World};

const MILLI: Duration = Duration::from_millis(1);
const DEADLINES: Deadlines =
    Deadlines { read: Duration::from_millis(100), fence: Duration::from_millis(400), quiet: MILLI };
/// Number of reads of a payload.
const PIECES: u32 = 5;
/// The index of the sample.
const SAMPLE: usize = 2;

struct Line {
    world: World,
    fabric: Fabric,
    plan: Rc<Plan>,
    sender: Sender<Loopback>,
    receiver: Receiver<Faulty>,
}

type Result = std::result::Result<Verified, TransferError>;

impl Line {
    fn new(most: u64) -> Self {
        let (fabric, plan, world) = (Fabric::default(), Rc::new(Plan::default()), World::new());
        let piece = world.samples[SAMPLE].payload.len().div_ceil(PIECES as usize);
        let receiver = Receiver::new(Faulty::new(&fabric, &plan), DEADLINES, most);
        let (receiver, sender) =
            (receiver.with_pieces(piece), Sender::new(Loopback::new(&fabric), MAX_BYTES));
        Self { world, fabric, plan, sender, receiver }
    }

    /// Begins a transfer with this fault in one piece.
    fn begin(&mut self, sample: usize, piece: u32, fault: Fault) -> TransferId {
        let offer = self.world.offer(&mut self.sender, sample);
        self.plan.skip.set(piece);
        self.plan.next.set(Some(fault));
        self.receiver.begin(self.plan.now.get(), &offer, &self.world.expected()).unwrap()
    }

    fn poll(&mut self, now: Duration) -> Vec<(TransferId, Result)> {
        self.plan.advance(&self.fabric, now);
        self.receiver.poll(now)
    }

    /// The result of a transfer with this fault.
    fn came(&mut self, sample: usize, piece: u32, fault: Fault) -> Result {
        let id = self.begin(sample, piece, fault);
        let (found, result) = self.poll(self.plan.now.get()).pop().expect("it has ended");
        assert_eq!(found, id);
        self.sender.give_up(id.source());
        result
    }
}

/// A payload with wrong or missing bytes in any piece is not verified; without digests it is.
pub fn a_fault_in_any_piece_is_seen() {
    let mut line = Line::new(MAX_BYTES);
    let payload = line.world.samples[SAMPLE].payload.clone();
    assert_eq!(line.came(SAMPLE, 0, Fault::None).unwrap().payload(), payload);
    assert_eq!(line.plan.reads.get(), PIECES);
    for piece in 0..PIECES {
        for fault in [Fault::Stale, Fault::Partial] {
            // The memory is used again, and has the right bytes of the same payload.
            drop(line.came(SAMPLE, piece, Fault::None).unwrap());
            assert!(line.receiver.idle_bytes() > 0);
            let refused = line.came(SAMPLE, piece, fault).unwrap_err();
            assert_eq!(
                line.receiver.idle_bytes(),
                0,
                "memory to which wrong bytes came is not used again"
            );
            let is_seen = matches!(refused, TransferError::Image(ImageError::Digest { .. }));
            assert!(is_seen, "{fault:?} in piece {piece}: {refused}");
        }
        make(Mistake::DigestIgnored);
        let came = line.came(SAMPLE, piece, Fault::Stale);
        make(Mistake::Nothing);
        assert!(came.unwrap().payload() != payload, "without digests wrong bytes are taken");
        let failed = line.came(SAMPLE, piece, Fault::Error(50 * MILLI)).unwrap_err();
        assert!(matches!(failed, TransferError::Transport(_)), "{failed}");
        assert!(line.receiver.quarantined_bytes() > 0);
        line.plan.advance(&line.fabric, line.plan.now.get() + 60 * MILLI);
        assert!(line.receiver.clear_quarantine().unwrap());
        assert_eq!((line.receiver.taken_bytes(), line.plan.outside.get()), (0, 0));
    }
}

/// Pieces that are each fast enough, but exceed the deadline together.
pub fn all_pieces_have_one_deadline() {
    let mut line = Line::new(MAX_BYTES);
    let id = line.begin(SAMPLE, 0, Fault::Delay(60 * MILLI));
    assert!(line.poll(59 * MILLI).is_empty());
    line.plan.next.set(Some(Fault::Delay(60 * MILLI)));
    assert!(line.poll(60 * MILLI).is_empty());
    assert!(line.poll(99 * MILLI).is_empty());
    let ended = line.poll(100 * MILLI);
    // The error names the source, and how far its payload has come.
    let all = line.world.samples[SAMPLE].payload.len() as u64;
    let [(_, Err(TransferError::Deadline { source_of, after, done, needed }))] = ended[..] else {
        panic!("{ended:?}")
    };
    assert_eq!((source_of, after), (id.source(), 100 * MILLI));
    assert_eq!((done, needed), (all.div_ceil(u64::from(PIECES)), all));
    assert!(line.receiver.quarantined_bytes() > 0);
    assert!(line.poll(120 * MILLI).is_empty());
    // The piece has ended, but others are missing, so that nothing can be compared before the fence.
    assert_eq!(line.receiver.stats().ended_late, 1);
    assert!(line.receiver.quarantined_bytes() > 0);
    assert!(line.poll(400 * MILLI).is_empty());
    assert_eq!((line.receiver.taken_bytes(), line.plan.outside.get()), (0, 0));
}

/// The memory of a dropped payload is reused for the next one, and no more is kept than the receiver may hold.
pub fn memory_is_used_again() {
    let most = 2 * World::new().samples[SAMPLE].payload.len() as u64;
    let mut line = Line::new(most);
    let first = line.came(SAMPLE, 0, Fault::None).unwrap();
    let address = first.payload().as_ptr();
    let second = line.came(SAMPLE, 0, Fault::None).unwrap();
    assert_ne!(second.payload().as_ptr(), address, "the first is there still");
    drop(first);
    let third = line.came(SAMPLE, 0, Fault::None).unwrap();
    assert_eq!(third.payload().as_ptr(), address);
    assert_eq!(third.payload(), line.world.samples[SAMPLE].payload);
    // Both are kept now. A payload of another size still finds room: kept memory makes way.
    drop((second, third));
    assert_eq!(line.receiver.taken_bytes(), 0);
    assert_eq!(line.receiver.idle_bytes(), most);
    let small = line.came(0, 0, Fault::None).unwrap();
    let idle = line.receiver.idle_bytes();
    assert!(
        idle > 0 && idle + line.receiver.taken_bytes() <= most,
        "{idle} of {most} bytes are kept"
    );
    drop(small);
}
