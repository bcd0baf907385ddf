//! A sender holds no more bytes than its limit, and no offer longer than its lease.

use std::rc::Rc;
use std::time::Duration;

use dsv4_kv_transfer::mistake::{Mistake, make};
use dsv4_kv_transfer::protocol::NotOffered;
use dsv4_kv_transfer::transport::{Fabric, Loopback};
use dsv4_kv_transfer::{Receiver, Sender, Source, TransferError};

use crate::faulty::{Faulty, Plan};
use crate::world::{MAX_BYTES, World, deadlines};

const SECOND: Duration = Duration::from_secs(1);
/// How long memory lingers.
const LINGER: Duration = Duration::from_secs(10);

/// Bytes of a sample's payload.
fn bytes(world: &World, sample: usize) -> u64 {
    world.samples[sample].payload.len() as u64
}

/// Open transfers and offers count from the moment when their memory is registered until it is given back.
pub fn a_sender_has_a_limit() {
    let mut world = World::new();
    let (one, two) = (bytes(&world, 2), bytes(&world, 1));
    let fabric = Fabric::default();
    let limit = 2 * one - 1;
    let mut sender = Sender::new(Loopback::new(&fabric), limit);
    let of = (world.samples[2].id, world.fingerprint);
    let (at, tokens) = (world.samples[2].at, world.samples[2].tokens.clone());
    let transfer = world.source.open(&mut sender, of, (at, &tokens));
    assert_eq!(sender.held_bytes(), one);
    let stream = world.source.fed.stream.clone();
    let again = |world: &mut World, sender: &mut Sender<Loopback>| {
        let (manager, staging) = (&mut world.source.fed.manager, &mut world.source.staging);
        let export = manager.export(&stream, staging, of.0).unwrap();
        sender.open(&export, of.1, (at, &tokens))
    };
    let refused = again(&mut world, &mut sender).unwrap_err();
    let is_full = matches!(
        refused,
        TransferError::SenderFull { needed, held, limit: most } if (needed, held, most) == (one, one, limit)
    );
    assert!(is_full && sender.held_bytes() == one, "{refused}");
    make(Mistake::LimitIgnored);
    let too_much = again(&mut world, &mut sender).unwrap();
    make(Mistake::Nothing);
    assert!(sender.held_bytes() > limit, "what the limit is against");
    sender.abandon(too_much).unwrap();
    // A smaller one fits in addition.
    let (small, _) = world.offer_until(&mut sender, 1, SECOND);
    assert_eq!(sender.held_bytes(), one + two);
    assert!(sender.claim(small));
    sender.abandon(transfer).unwrap();
    assert_eq!(sender.held_bytes(), 0);
    again(&mut world, &mut sender).map(|transfer| sender.abandon(transfer)).unwrap().unwrap();
}

/// A sender offers only transfers of its own: another sender's transfer could take the place of one of its own, and be claimed
/// for it.
pub fn an_open_transfer_is_its_senders() {
    let (mut world, fabric) = (World::new(), Fabric::default());
    let [mut own, mut other] = [(); 2].map(|()| Sender::new(Loopback::new(&fabric), MAX_BYTES));
    let (held, _) = world.offer_until(&mut other, 1, SECOND);
    let transfer = world.take(&mut own, 2, world.fingerprint);
    let source = transfer.source();
    assert_eq!(source.lease, held.lease, "each counts from the same number");
    let NotOffered(transfer, why) = other.offer(transfer, SECOND).unwrap_err();
    assert!(matches!(why, TransferError::NotHeld { source_of } if source_of == source), "{why}");
    assert_eq!((other.offers(), other.held_bytes()), (1, bytes(&world, 1)));
    own.offer(*transfer, SECOND).unwrap();
    // Nor does it abandon another sender's transfer, whose bytes would then be counted as given back.
    let transfer = world.take(&mut own, 2, world.fingerprint);
    let (foreign, held_bytes) = (transfer.source(), own.held_bytes());
    let why = other.abandon(transfer).unwrap_err();
    assert!(matches!(why, TransferError::NotHeld { source_of } if source_of == foreign), "{why}");
    assert_eq!((other.held_bytes(), own.held_bytes()), (bytes(&world, 1), held_bytes));
    assert!(own.claim(source) && other.claim(held));
    assert_eq!(
        (own.held_bytes(), other.held_bytes()),
        (bytes(&world, 2), 0),
        "an open transfer that is lost"
    );
}

/// Memory that the transport does not give back still counts after its lease is over.
pub fn memory_that_is_not_given_back_is_held() {
    let (mut world, fabric, plan) = (World::new(), Fabric::default(), Rc::new(Plan::default()));
    let mut sender = Sender::new(Faulty::new(&fabric, &plan), bytes(&world, 2));
    let (source, _) = world.offer_until(&mut sender, 2, SECOND);
    plan.keeps.set(true);
    assert!(sender.take_back(source.lease) && !sender.claim(source));
    assert_eq!((sender.offers(), sender.held_bytes()), (0, bytes(&world, 2)));
}

/// An offer expires, and its request belongs to the source again: it can be neither claimed nor read.
pub fn offers_end_by_themselves() {
    let (mut world, fabric) = (World::new(), Fabric::default());
    let mut sender = Sender::new(Loopback::new(&fabric), MAX_BYTES);
    let (early, offer) = world.offer_until(&mut sender, 2, SECOND);
    let (late, _) = world.offer_until(&mut sender, 2, 3 * SECOND);
    assert!(sender.expire(SECOND).is_empty() && sender.offers() == 2, "it is not over yet");
    make(Mistake::LeaseIgnored);
    assert!(sender.expire(10 * SECOND).is_empty() && sender.offers() == 2);
    make(Mistake::Nothing);
    assert_eq!(sender.expire(2 * SECOND), [early]);
    assert_eq!((sender.offers(), sender.held_bytes()), (1, bytes(&world, 2)));
    let mut receiver = Receiver::new(Loopback::new(&fabric), deadlines(), 1 << 30);
    let error = receiver.begin(Duration::ZERO, &offer, &world.expected()).unwrap_err();
    assert!(matches!(error, TransferError::Transport(_)), "{error}");
    assert!(!sender.claim(early) && sender.claim(late));
    assert!(sender.expire(10 * SECOND).is_empty(), "what was claimed has no end");
}

/// Memory of an offer that ended without a claim can be read for as long as it lingers, and counts meanwhile. Memory that
/// was claimed is free at once.
pub fn memory_lingers() {
    type End = fn(&mut Sender<Loopback>, Source);
    let ends: [End; 3] = [
        |sender, source| assert!(sender.give_up(source)),
        |sender, source| assert!(sender.take_back(source.lease)),
        |sender, source| assert_eq!(sender.expire(2 * SECOND), [source]),
    ];
    for end in ends {
        let (mut world, fabric) = (World::new(), Fabric::default());
        let mut sender = Sender::new(Loopback::new(&fabric), MAX_BYTES).with_linger(LINGER);
        let (claimed, _) = world.offer_until(&mut sender, 1, SECOND);
        assert!(sender.claim(claimed));
        assert_eq!(sender.held_bytes(), 0);
        let (source, offer) = world.offer_until(&mut sender, 2, SECOND);
        end(&mut sender, source);
        assert_eq!((sender.offers(), sender.held_bytes()), (0, bytes(&world, 2)));
        let read = |sender: &mut Sender<Loopback>| {
            let mut receiver = Receiver::new(Loopback::new(&fabric), deadlines(), 1 << 30);
            receiver.begin(Duration::ZERO, &offer, &world.expected())?;
            let (_, ended) = receiver.poll(Duration::ZERO).remove(0);
            assert!(!sender.claim(source), "it is over");
            ended.map(drop)
        };
        for now in [2 * SECOND, LINGER] {
            assert!(sender.expire(now).is_empty());
            read(&mut sender).unwrap();
        }
        assert!(sender.expire(2 * SECOND + LINGER).is_empty() && sender.held_bytes() == 0);
        let error = read(&mut sender).unwrap_err();
        assert!(matches!(error, TransferError::Transport(_)), "{error}");
    }
}

/// Memory of an open transfer that is abandoned lingers too, since a target may read its parts, and takes the room of another
/// payload. Memory without any part is free at once.
pub fn abandoned_memory_lingers() {
    let (mut world, fabric) = (World::new(), Fabric::default());
    let one = bytes(&world, 2);
    let mut sender = Sender::new(Loopback::new(&fabric), one).with_linger(LINGER);
    let (of, at) = ((world.samples[2].id, world.fingerprint), world.samples[2].at);
    let tokens = world.samples[2].tokens.clone();
    let empty = world.source.open(&mut sender, of, (at, &tokens));
    sender.abandon(empty).unwrap();
    assert_eq!(sender.held_bytes(), 0);
    let transfer = world.take(&mut sender, 2, world.fingerprint);
    let (opening, ready) = (transfer.opening(), transfer.ready());
    assert_eq!(ready.bytes, one);
    sender.abandon(transfer).unwrap();
    // The bytes that a target reads, or its error.
    let read = |world: &World| {
        let mut receiver = Receiver::new(Loopback::new(&fabric), deadlines(), 1 << 30);
        let id = receiver.open(Duration::ZERO, &opening, &world.expected()).unwrap();
        receiver.ready(Duration::ZERO, id, &ready).unwrap();
        match receiver.poll(Duration::ZERO).pop() {
            Some((_, ended)) => ended.map(|_| 0),
            None => Ok(receiver.stats().bytes),
        }
    };
    let stream = world.source.fed.stream.clone();
    for now in [2 * SECOND, LINGER] {
        assert!(sender.expire(now).is_empty());
        assert_eq!((sender.held_bytes(), read(&world).unwrap()), (one, one));
        let (manager, staging) = (&mut world.source.fed.manager, &mut world.source.staging);
        let export = manager.export(&stream, staging, of.0).unwrap();
        let refused = sender.open(&export, of.1, (at, &tokens)).unwrap_err();
        assert!(matches!(refused, TransferError::SenderFull { .. }), "{refused}");
    }
    assert!(sender.expire(2 * SECOND + LINGER).is_empty() && sender.held_bytes() == 0);
    let error = read(&world).unwrap_err();
    assert!(matches!(error, TransferError::Transport(_)), "{error}");
}

/// A target can give up an offer of this sender once, and no offer of another sender.
pub fn targets_give_up_what_is_theirs() {
    let (mut world, fabric) = (World::new(), Fabric::default());
    let mut sender = Sender::new(Loopback::new(&fabric), MAX_BYTES);
    let (source, _) = world.offer_until(&mut sender, 2, SECOND);
    let of_another = Source { epoch: source.epoch ^ 1, ..source };
    assert!(!sender.give_up(of_another) && sender.offers() == 1);
    assert!(sender.give_up(source) && !sender.give_up(source) && !sender.claim(source));
    assert_eq!(sender.held_bytes(), 0);
}
