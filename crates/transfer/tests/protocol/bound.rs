//! Bytes are bound to their position, their source and the cache that they were verified for.

use std::time::Duration;

use dsv4_kv::CacheConfig;
use dsv4_kv::device::{Device, EmuOptions, Emulator};
use dsv4_kv::transfer::Positions;
use dsv4_kv_tests::fed::Fed;
use dsv4_kv_transfer::image::{Fact, decode_manifest};
use dsv4_kv_transfer::transport::{Fabric, Loopback};
use dsv4_kv_transfer::{
    Control, Deadlines, ImageError, Offer, Receiver, Sender, Source, Target, TransferError,
};
use kv_layout::index_row::IndexFormat;

use crate::world::World;

const SECOND: Duration = Duration::from_secs(1);

/// Offers a sample as one that is at `at` and has these tokens.
fn offer(
    sender: &mut Sender<Loopback>,
    world: &World,
    (at, tokens): (Positions, &[u32]),
) -> Result<Offer, TransferError> {
    let sample = &world.samples[2];
    let mut draft = sender.draft(&world.layout, sample.at).unwrap();
    sender.fill(&mut draft, |bytes| bytes.copy_from_slice(&sample.payload)).unwrap();
    sender.offer(draft, (world.fingerprint, &world.layout), (at, tokens))
}

/// A payload is offered for the position that it was made for, with its tokens, or given up.
pub fn a_payload_is_of_one_position() {
    let world = World::new();
    let fabric = Fabric::default();
    let mut sender = Sender::new(Loopback::new(&fabric));
    // As many bytes, of other rows.
    let [own, later] = [132, 136].map(|end| Positions { trunk: end, draft: end });
    let bytes = |at| world.layout.parts(at).iter().map(|part| part.bytes).sum::<u64>();
    assert_eq!(bytes(later), bytes(own));
    let draft = sender.draft(&world.layout, own).unwrap();
    let of = (world.fingerprint, &world.layout);
    let error = sender.offer(draft, of, (later, &[7; 136])).unwrap_err();
    let is_other = matches!(
        error,
        TransferError::OtherDraft { drafted, offered } if (drafted, offered) == (own, later)
    );
    assert!(is_other, "{error}");
    let (at, tokens) = (world.samples[2].at, [7; 131]);
    let error = offer(&mut sender, &world, (at, &tokens)).unwrap_err();
    assert!(matches!(error, TransferError::Image(ImageError::Tokens { .. })), "{error}");
    let is_left = (0..100_000).any(|id| fabric.write(id, 0, &[]));
    assert!(sender.offers() == 0 && !is_left, "the memory was given up");
}

/// What a sender offered, its successor at the same address does not hold, although it counts from one again.
pub fn a_sender_that_restarts_holds_nothing() {
    let world = World::new();
    let fabric = Fabric::default();
    let sample = &world.samples[2];
    let [first, second] = [(); 2].map(|()| {
        let mut sender = Sender::new(Loopback::new(&fabric));
        let offer = offer(&mut sender, &world, (sample.at, &sample.tokens)).unwrap();
        (sender, decode_manifest(&offer.manifest).unwrap().0.source)
    });
    assert_eq!(first.1.lease, second.1.lease);
    let mut restarted = second.0;
    assert!(!restarted.claim(first.1), "another sender offered that");
    assert!(restarted.claim(second.1) && !restarted.claim(second.1));
}

struct Nobody;

impl Control for Nobody {
    fn claim(&mut self, _source: Source) -> Result<bool, String> {
        Err("nobody is asked before the bytes are written".to_owned())
    }
}

/// A payload that was verified for one cache is refused by another, of other formats or for room at another position.
pub fn a_payload_is_of_one_cache() {
    let mut world = World::new();
    let fabric = Fabric::default();
    let sample = &world.samples[2];
    let mut sender = Sender::new(Loopback::new(&fabric));
    let offer = offer(&mut sender, &world, (sample.at, &sample.tokens)).unwrap();
    let deadlines = Deadlines { read: SECOND, fence: SECOND };
    let mut receiver = Receiver::new(Loopback::new(&fabric), deadlines, 1 << 30);
    receiver.begin(Duration::ZERO, &offer, &world.expected()).unwrap();
    let verified = receiver.poll(Duration::ZERO).remove(0).1.unwrap();
    let at = verified.manifest().at;
    let config = world.target.manager.config().clone();
    let device = Device::from_backend(Emulator::new(EmuOptions::default()));
    let mut other = Fed::new(&device, CacheConfig { index_format: IndexFormat::Fp8, ..config });
    let mut port = other.manager.open_port().unwrap();
    let room = other.manager.reserve(at).unwrap();
    let stream = &other.stream.clone();
    let mut target = Target { cache: &mut other.manager, stream, port: &mut port };
    let error = target.admit(&verified, room, &mut Nobody).unwrap_err();
    let is_foreign = matches!(error, TransferError::Image(ImageError::Foreign(Fact::Shape)));
    assert!(is_foreign, "{error}");
    assert_eq!(other.manager.ledger().live_requests(), 0, "the room is free");
    let nearer = world.target.manager.reserve(Positions { trunk: 129, draft: 129 }).unwrap();
    let (cache, stream) = (&mut world.target.manager, &world.target.stream.clone());
    let mut target = Target { cache, stream, port: &mut world.port };
    let error = target.admit(&verified, nearer, &mut Nobody).unwrap_err();
    assert!(matches!(error, TransferError::OtherRoom { request, .. } if request == at), "{error}");
}
