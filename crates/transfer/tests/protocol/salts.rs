//! The same tokens under different salts or adapters: no owner gets another owner's request, neither by its manifest
//! nor over a transport.

use std::time::{Duration, Instant};

use dsv4_kv::CacheConfig;
use dsv4_kv::transfer::{PartLayout, Positions};
use dsv4_kv_transfer::image::{Fact, decode_manifest};
use dsv4_kv_transfer::mistake::{Mistake, make};
use dsv4_kv_transfer::transport::{Fabric, Loopback};
use dsv4_kv_transfer::{
    Expected, Fingerprint, ImageError, ImageKind, Manifest, Receiver, Section, Sender, Source,
    Target, TransferError,
};
use kv_layout::config::ModelConfig;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::world::{BLOCKS, Direct, MAX_BYTES, World, admit, deadlines};

/// The owner of a request: a salt and an adapter.
type Owner = [Vec<u8>; 2];

fn text(random: &mut SmallRng) -> Vec<u8> {
    let letters = [b'a', b'b', 0, 1];
    (0..random.random_range(0..10)).map(|_| letters[random.random_range(0..4)]).collect()
}

/// Two owners. In every other pair, salt and adapter are equal when they are concatenated.
fn owners(random: &mut SmallRng) -> [Owner; 2] {
    loop {
        let one = [text(random), text(random)];
        let mut other = [text(random), text(random)];
        if random.random() {
            let joined = one.concat();
            let (salt, adapter) = joined.split_at(random.random_range(0..=joined.len()));
            other = [salt.to_vec(), adapter.to_vec()];
        }
        if one != other {
            return [one, other];
        }
    }
}

fn fingerprint(config: &CacheConfig, [salt, adapter]: &Owner) -> Fingerprint {
    Fingerprint::new(config, b"weights", salt, adapter).unwrap()
}

/// Checks `count` manifests, each against its owner and against another one. Returns how many were accepted wrongly,
/// and how many rightly.
fn manifests(count: u32) -> (u32, u32) {
    let config = CacheConfig::new(ModelConfig::preset("tiny").unwrap());
    let (layout, at) = (PartLayout::new(&config), Positions { trunk: 3, draft: 2 });
    let sections: Vec<_> =
        layout.parts(at).into_iter().map(|part| Section { part, digest: 7 }).collect();
    let (mut random, mut wrong, mut right) = (SmallRng::seed_from_u64(29), 0, 0);
    for _ in 0..count {
        let [own, other] = owners(&mut random).map(|owner| fingerprint(&config, &owner));
        let tokens: Vec<u32> = (0..at.trunk).map(|_| random.random_range(0..4)).collect();
        let (source, sections) = (Source::default(), sections.clone());
        let manifest = Manifest {
            kind: ImageKind::Request,
            fingerprint: own,
            at,
            source,
            tokens: tokens.clone(),
            sections,
        };
        let bytes = manifest.encode();
        let (came, _) = decode_manifest(&bytes).unwrap();
        let asked = |fingerprint| {
            let (layout, tokens) = (&layout, Some(&tokens[..]));
            came.check(&Expected { fingerprint, layout, tokens, max_context: 8 })
        };
        right += u32::from(asked(&own).is_ok());
        let is_refused =
            matches!(asked(&other), Err(ImageError::Foreign { fact: Fact::Owner, .. }));
        wrong += u32::from(!is_refused);
    }
    (wrong, right)
}

pub fn no_manifest_is_anothers() {
    assert_eq!(manifests(10_000), (0, 10_000));
}

pub fn no_manifest_is_anothers_a_million_times() {
    let begun = Instant::now();
    assert_eq!(manifests(1_000_000), (0, 1_000_000));
    println!("1,000,000 pairs in {:.1?}", begun.elapsed());
}

pub fn owners_that_are_ignored_are_found() {
    make(Mistake::OwnerIgnored);
    let (wrong, _) = manifests(10);
    make(Mistake::Nothing);
    assert_eq!(wrong, 10);
}

/// Moves `count` requests. Another owner asks for each first and is refused; then its owner gets every byte.
fn imports(count: u32) {
    let fabric = Fabric::default();
    let (mut world, mut random) = (World::new(), SmallRng::seed_from_u64(31));
    let mut sender = Sender::new(Loopback::new(&fabric), MAX_BYTES);
    let mut receiver = Receiver::new(Loopback::new(&fabric), deadlines(), 8 << 20);
    let (stream, now) = (world.target.fed.stream.clone(), Duration::ZERO);
    for number in 0..count {
        let sample = random.random_range(0..world.samples.len());
        let owners = owners(&mut random);
        let [own, other] =
            owners.map(|owner| fingerprint(world.target.fed.manager.config(), &owner));
        let offer = world.offer_as(&mut sender, sample, own);
        let expected = |fingerprint| Expected { fingerprint, ..world.expected() };
        let refused = receiver.begin(now, &offer, &expected(&other)).unwrap_err();
        assert!(
            matches!(refused, TransferError::Image(ImageError::Foreign { fact: Fact::Owner, .. })),
            "request {number}: {refused}"
        );
        receiver.begin(now, &offer, &expected(&own)).unwrap();
        let verified = receiver.poll(now).remove(0).1.unwrap();
        let reserved = world.target.fed.manager.reserve(verified.manifest().at).unwrap();
        let cache = &mut world.target.fed.manager;
        let mut target = Target {
            cache,
            stream: &stream,
            staging: &mut world.target.staging,
            weights: crate::world::weights(),
        };
        let id = admit(&mut target, &verified, reserved, &mut Direct(&mut sender)).unwrap();
        let (_, bytes) = world.target.export(id);
        assert!(bytes == world.samples[sample].payload);
        world.target.fed.manager.release(id).unwrap();
    }
    let (stats, ledger) = (receiver.stats(), world.target.fed.manager.ledger());
    assert_eq!((stats.begun, stats.verified), (u64::from(count), u64::from(count)), "{stats:?}");
    assert_eq!((ledger.free_blocks(), sender.offers()), (BLOCKS, 0));
}

pub fn no_request_is_anothers() {
    imports(200);
}

pub fn no_request_is_anothers_thousands_of_times() {
    let begun = Instant::now();
    imports(5_000);
    println!("5,000 requests in {:.1?}", begun.elapsed());
}
