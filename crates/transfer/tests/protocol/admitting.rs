//! Each check at admission, and what is admitted without it.

use std::time::Duration;

use dsv4_kv::CacheConfig;
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::transfer::{PartLayout, Positions};
use dsv4_kv_transfer::image::Fact;
use dsv4_kv_transfer::mistake::{Mistake, make};
use dsv4_kv_transfer::protocol::Offer;
use dsv4_kv_transfer::transport::{Fabric, Loopback, Region};
use dsv4_kv_transfer::{
    Expected, Fingerprint, ImageError, ImageKind, Manifest, Receiver, Section, Sender, Source,
    Target, TransferError, Transport, Verified,
};

use crate::world::{self, Answers, MAX_BYTES, Site, World, deadlines, emulated, settings};

/// A source that says yes.
struct Anybody;

impl Answers for Anybody {
    fn claim(&mut self, _source: Source) -> Result<bool, String> {
        Ok(true)
    }
}

fn read(world: &mut World) -> Verified {
    let fabric = Fabric::default();
    let mut sender = Sender::new(Loopback::new(&fabric), MAX_BYTES);
    let offer = world.offer(&mut sender, 2);
    receive(&fabric, &offer, &world.expected())
}

fn receive(fabric: &Fabric, offer: &Offer, expected: &Expected<'_>) -> Verified {
    let mut receiver = Receiver::new(Loopback::new(fabric), deadlines(), 1 << 30);
    receiver.begin(Duration::ZERO, offer, expected).unwrap();
    receiver.poll(Duration::ZERO).remove(0).1.unwrap()
}

/// Admits a payload to a reservation for the positions `reserved`. Returns its positions or the error, and releases it.
fn admit(
    site: &mut Site,
    verified: &Verified,
    reserved: Positions,
) -> Result<Positions, TransferError> {
    let reserved = site.fed.manager.reserve(reserved).unwrap();
    let stream = &site.fed.stream.clone();
    let mut target = Target {
        cache: &mut site.fed.manager,
        stream,
        staging: &mut site.staging,
        weights: crate::world::weights(),
    };
    let admitted = world::admit(&mut target, verified, reserved, &mut Anybody);
    let at = admitted.map(|id| {
        let at = site.fed.manager.positions(id).unwrap();
        site.fed.manager.release(id).unwrap();
        at
    });
    let ledger = site.fed.manager.ledger();
    let is_free = (ledger.free_blocks(), ledger.live_requests());
    assert_eq!(is_free, (ledger.total_blocks(), 0), "the reservation is ended");
    at
}

/// Checks that `admit` succeeds with a mistake, and returns its error without.
fn refused(
    mistake: Mistake,
    mut admit: impl FnMut() -> Result<Positions, TransferError>,
) -> TransferError {
    make(mistake);
    let wrong = admit();
    make(Mistake::Nothing);
    assert!(wrong.is_ok(), "{mistake:?} is what the check is against: {wrong:?}");
    admit().unwrap_err()
}

/// In a model with another rotary embedding the parts have the same sizes; only the fingerprint differs.
pub fn a_payload_is_of_one_model() {
    let mut world = World::new();
    let verified = read(&mut world);
    let config = settings(3, 2, 6);
    let model = ModelConfig { rope_theta: 1e6, ..config.model };
    let mut other = Site::new(&emulated(), CacheConfig { model, ..config });
    let at = verified.manifest().at;
    let error = refused(Mistake::ShapeIgnored, || admit(&mut other, &verified, at));
    let is_shape =
        matches!(error, TransferError::Image(ImageError::Foreign { fact: Fact::Shape, .. }));
    assert!(is_shape, "{error}");
}

/// A cache of the same model with other, fine-tuned weights.
pub fn a_payload_is_of_one_set_of_weights() {
    let mut world = World::new();
    let fabric = Fabric::default();
    let mut sender = Sender::new(Loopback::new(&fabric), MAX_BYTES);
    world.fingerprint = Fingerprint::new(&settings(3, 2, 6), b"fine-tuned", b"salt", b"").unwrap();
    let offer = world.offer(&mut sender, 2);
    let verified = receive(&fabric, &offer, &world.expected());
    let (at, target) = (verified.manifest().at, &mut world.target);
    let error = refused(Mistake::WeightsIgnored, || admit(target, &verified, at));
    let is_weights =
        matches!(error, TransferError::Image(ImageError::Foreign { fact: Fact::Weights, .. }));
    assert!(is_weights, "{error}");
}

/// A reservation for another position can have the same number of bytes.
pub fn room_is_for_one_position() {
    let mut world = World::new();
    let (verified, again) = (read(&mut world), read(&mut world));
    let (at, later) = (verified.manifest().at, Positions { trunk: 136, draft: 136 });
    assert_eq!(world.layout.bytes(later), world.layout.bytes(at));
    let target = &mut world.target;
    let error = refused(Mistake::ReservationIgnored, || admit(target, &verified, later));
    let is_other = matches!(
        error,
        TransferError::OtherReservation { reserved, request } if (reserved, request) == (later, at)
    );
    assert!(is_other, "{error}");
    // With the right one it is admitted.
    assert_eq!(admit(target, &again, at).unwrap(), at);
}

/// A receiver that was given the layout of another cache accepts parts in another order.
pub fn sections_are_those_of_the_cache() {
    let mut world = World::new();
    let sample = &world.samples[2];
    let own = settings(3, 2, 6);
    let mut layers = own.model.layers.clone();
    layers.swap(1, 2);
    let model = ModelConfig { layers, ..own.model.clone() };
    let layout = PartLayout::new(&CacheConfig { model, ..own });
    assert_eq!(layout.bytes(sample.at), world.layout.bytes(sample.at), "as many, of other parts");
    let mut rest = &sample.payload[..];
    let parts = layout.parts(sample.at).into_iter();
    let sections =
        parts.map(|part| Section::of(part, rest.split_off(..part.bytes as usize).unwrap()));
    let manifest = Manifest {
        kind: ImageKind::Request,
        fingerprint: world.fingerprint,
        at: sample.at,
        source: Source::default(),
        tokens: sample.tokens.clone(),
        sections: sections.collect(),
    };
    let fabric = Fabric::default();
    let mut source = Loopback::new(&fabric);
    let mut region = Region::new(sample.payload.len()).unwrap();
    region.bytes_mut().copy_from_slice(&sample.payload);
    let memory = source.register(region).unwrap();
    let payload = source.publish(&memory).unwrap();
    let offer = Offer { manifest: manifest.encode(), payload };
    let expected = Expected { layout: &layout, ..world.expected() };
    let (verified, at) = (receive(&fabric, &offer, &expected), sample.at);
    let target = &mut world.target;
    let error = refused(Mistake::SectionsIgnored, || admit(target, &verified, at));
    let is_section = matches!(error, TransferError::Image(ImageError::Section { .. }));
    assert!(is_section, "{error}");
}
