//! A payload belongs to one request at one position, to one source, and to one cache.

use std::time::Duration;

use dsv4_kv::transfer::{MoveError, PartLayout, Positions};
use dsv4_kv_tests::fed::{Padding, Part};
use dsv4_kv_transfer::image::decode_manifest;
use dsv4_kv_transfer::protocol::NotOffered;
use dsv4_kv_transfer::transport::{Fabric, Loopback};
use dsv4_kv_transfer::{ImageError, Receiver, Sender, TransferError};

use crate::world::{MAX_BYTES, NEVER, World, deadlines};

fn at(tokens: u32) -> Positions {
    Positions { trunk: tokens, draft: tokens }
}

/// An open transfer takes only parts of its own request, until the request has advanced past it. It can be offered when it has
/// all parts.
pub fn a_payload_is_of_one_position() {
    let mut world = World::new();
    let fabric = Fabric::default();
    let mut sender = Sender::new(Loopback::new(&fabric), MAX_BYTES);
    let (id, other) = (world.samples[2].id, world.samples[1].id);
    let World { source, story, fingerprint, .. } = &mut world;
    let stream = source.fed.stream.clone();
    let tokens: Vec<u32> = (0..134).collect();
    let mut transfer = source.open(&mut sender, (id, *fingerprint), (at(134), &tokens));
    // Two tokens before the end: the full block is final, the state is not.
    let mut export = source.fed.manager.export(&stream, &mut source.staging, id).unwrap();
    let ready = sender.take(&mut transfer, &mut export).unwrap();
    assert_eq!((ready.bytes, transfer.is_whole()), (export.layout().block_bytes(), false));
    // Refused: a number of tokens that differs from the position, and a position that the request has passed.
    let refused = sender.open(&export, *fingerprint, (at(134), &tokens[1..])).unwrap_err();
    assert!(matches!(refused, TransferError::Image(ImageError::Tokens { .. })), "{refused}");
    let refused = sender.open(&export, *fingerprint, (at(129), &tokens[..129])).unwrap_err();
    assert!(matches!(refused, TransferError::MovedOn { .. }), "{refused}");
    let NotOffered(mut transfer, refused) = sender.offer(transfer, NEVER).unwrap_err();
    assert!(matches!(refused, TransferError::NotWhole { there: 1, .. }), "{refused}");
    let mut export = source.fed.manager.export(&stream, &mut source.staging, other).unwrap();
    let refused = sender.take(&mut transfer, &mut export).unwrap_err();
    assert!(matches!(refused, TransferError::OtherRequest { .. }), "{refused}");
    source.fed.step(&[Part::new(id, story, 132..138)], Padding::None);
    let mut export = source.fed.manager.export(&stream, &mut source.staging, id).unwrap();
    let refused = sender.take(&mut transfer, &mut export).unwrap_err();
    let is_past = matches!(refused, TransferError::MovedOn { found, .. } if found == at(138));
    assert!(is_past, "{refused}");
    sender.abandon(*transfer).unwrap();
    let is_left = (0..100_000).any(|id| fabric.write(id, 0, &[]));
    assert!(sender.offers() == 0 && !is_left, "the memory was given up");
}

/// A call that fails while parts are copied leaves the transfer as it was.
pub fn an_open_transfer_outlives_failures() {
    let mut world = World::new();
    let mut sender = Sender::new(Loopback::new(&Fabric::default()), MAX_BYTES);
    let sample = &world.samples[2];
    let of = (sample.id, world.fingerprint);
    let mut transfer = world.source.open(&mut sender, of, (sample.at, &sample.tokens));
    let (stream, staging) = (world.source.fed.stream.clone(), &mut world.target.staging);
    // Staging memory of another cache.
    let refused = world.source.fed.manager.export(&stream, staging, sample.id).unwrap_err();
    assert!(matches!(refused, MoveError::ForeignStaging), "{refused}");
    // A stream of another device.
    let (other, staging) = (world.target.fed.stream.clone(), &mut world.source.staging);
    let refused = world.source.fed.manager.export(&other, staging, sample.id).unwrap_err();
    assert!(refused.to_string().contains("stream"), "{refused}");
    let mut export = world.source.fed.manager.export(&stream, staging, sample.id).unwrap();
    sender.take(&mut transfer, &mut export).unwrap();
    let offer = sender.offer(transfer, NEVER).unwrap();
    assert_eq!(decode_manifest(&offer.manifest).unwrap().0.sections.len(), {
        let layout: &PartLayout = &world.layout;
        layout.parts(sample.at).len()
    });
}

/// A sender does not hold the offers of its predecessor at the same address, although both number leases from 1.
pub fn a_sender_that_restarts_holds_nothing() {
    let mut world = World::new();
    let fabric = Fabric::default();
    let [first, second] = [(); 2].map(|()| {
        let mut sender = Sender::new(Loopback::new(&fabric), MAX_BYTES);
        let offer = world.offer(&mut sender, 2);
        (sender, decode_manifest(&offer.manifest).unwrap().0.source)
    });
    assert_eq!(first.1.lease, second.1.lease);
    let mut restarted = second.0;
    assert!(!restarted.claim(first.1), "another sender offered that");
    assert!(restarted.claim(second.1) && !restarted.claim(second.1));
}

/// A request that is longer than the target's cache allows is not read.
pub fn a_request_that_is_too_long_is_not_read() {
    let mut world = World::new();
    let fabric = Fabric::default();
    let mut sender = Sender::new(Loopback::new(&fabric), MAX_BYTES);
    let offer = world.offer(&mut sender, 2);
    let mut receiver = Receiver::new(Loopback::new(&fabric), deadlines(), 1 << 30);
    let short = dsv4_kv_transfer::Expected { max_context: 129, ..world.expected() };
    let refused = receiver.begin(Duration::ZERO, &offer, &short).unwrap_err();
    let is_long = matches!(
        refused,
        TransferError::Image(ImageError::TooLong { at, limit: 129 }) if at.trunk == 132
    );
    assert!(is_long && receiver.taken_bytes() == 0, "{refused}");
}

/// Requests without tokens also count against the receiver's memory, which bounds how many can be opened.
pub fn requests_without_tokens_are_bounded() {
    let mut world = World::new();
    let fabric = Fabric::default();
    let mut sender = Sender::new(Loopback::new(&fabric), MAX_BYTES);
    let mut receiver = Receiver::new(Loopback::new(&fabric), deadlines(), 256 << 10);
    let id = world.source.fed.manager.admit().unwrap();
    let fingerprint = world.fingerprint;
    let opened: Vec<_> = (0..5)
        .map(|_| {
            let transfer = world.source.open(&mut sender, (id, fingerprint), (at(0), &[]));
            receiver.open(Duration::ZERO, &transfer.opening(), &world.expected())
        })
        .collect();
    assert!(opened[..4].iter().all(Result::is_ok), "{opened:?}");
    let refused = opened[4].as_ref().unwrap_err();
    assert!(matches!(refused, TransferError::NoMemory { .. }), "{refused}");
    assert!(refused.to_string().contains("`Receiver::clear_quarantine`"), "{refused}");
}
