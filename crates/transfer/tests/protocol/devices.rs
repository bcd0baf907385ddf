//! Payloads in device memory: the bytes that arrive are those that left, whichever memory they passed through.

use std::time::Duration;

use dsv4_kv::device::{Backend, Device, Emulator};
use dsv4_kv_transfer::image::ImageError;
use dsv4_kv_transfer::transport::{Fabric, Files, Loopback, MemoryKind, Storage};
use dsv4_kv_transfer::{
    Receiver, Sender, Target, TransferError, Transport, TransportError, Verified,
};

use crate::streaming::Prefill;
use crate::transports::private_directory;
use crate::world::{self, Answers, BLOCKS, Direct, MAX_BYTES, Site, World, deadlines, emulated};

/// Admits a request, and returns its bytes.
pub fn admit<B: Backend>(
    world: &mut World<B>,
    verified: &Verified,
    source: &mut impl Answers,
) -> Result<Vec<u8>, TransferError> {
    let Site { fed, staging } = &mut world.target;
    let (reserved, stream) = (fed.manager.reserve(verified.manifest().at)?, fed.stream.clone());
    let mut target = Target {
        cache: &mut fed.manager,
        stream: &stream,
        staging,
        weights: crate::world::weights(),
    };
    let id = world::admit(&mut target, verified, reserved, source)?;
    let (_, bytes) = world.target.export(id);
    world.target.fed.manager.release(id).unwrap();
    Ok(bytes)
}

/// Moves each sample, and a prompt while it is computed.
fn moves<T: Transport>(
    world: &mut World,
    (source, target): (T, T),
    (from, to): (Storage, Storage),
) {
    let mut sender = Sender::with_storage(source, (from, MAX_BYTES));
    let mut receiver = Receiver::with_storage(target, deadlines(), (to.clone(), 64 << 20));
    for sample in 0..world.samples.len() {
        let offer = world.offer(&mut sender, sample);
        receiver.begin(Duration::ZERO, &offer, &world.expected()).unwrap();
        let verified = receiver.poll(Duration::ZERO).remove(0).1.unwrap();
        assert_eq!(verified.kind(), to.kind());
        assert!(verified.copy().unwrap() == world.samples[sample].payload, "sample {sample}");
        let got = admit(world, &verified, &mut Direct(&mut sender)).unwrap();
        assert!(got == world.samples[sample].payload, "sample {sample}");
    }
    let World { source, fingerprint, .. } = &mut *world;
    let mut prefill = Prefill::new(source, &mut sender, *fingerprint);
    let (id, opening) = (prefill.id, prefill.opening());
    let transfer = receiver.open(Duration::ZERO, &opening, &world.expected()).unwrap();
    while !prefill.is_whole() {
        let World { source, story, .. } = &mut *world;
        let ready = prefill.step(source, story, &mut sender);
        receiver.ready(Duration::ZERO, transfer, &ready).unwrap();
        assert!(receiver.poll(Duration::ZERO).is_empty());
    }
    receiver.offered(Duration::ZERO, transfer, &prefill.offer(&mut sender)).unwrap();
    let verified = receiver.poll(Duration::ZERO).remove(0).1.unwrap();
    let got = admit(world, &verified, &mut Direct(&mut sender)).unwrap();
    let (_, want) = world.source.export(id);
    assert!(got == want, "every byte of one that did not move");
    world.source.fed.manager.release(id).unwrap();
    assert_eq!(world.target.fed.manager.ledger().free_blocks(), BLOCKS);
}

fn storage(device: &Device<Emulator>) -> Storage {
    Storage::device(device, 0).unwrap()
}

/// From memory of the host or of the source's device, to memory of the host, of the target's device, or of a third one.
pub fn payloads_on_devices() {
    let (source, target) = (emulated(), emulated());
    let mut world = World::on(&source, &target);
    assert_eq!(storage(&target).kind(), MemoryKind::Emulated);
    let directory = private_directory();
    for from in [Storage::host(), storage(&source)] {
        for to in [Storage::host(), storage(&target)] {
            let fabric = Fabric::default();
            let loopbacks = (Loopback::new(&fabric), Loopback::new(&fabric));
            moves(&mut world, loopbacks, (from.clone(), to.clone()));
            let files = || Files::new(directory.path()).unwrap();
            moves(&mut world, (files(), files()), (from.clone(), to));
        }
    }
}

/// A changed byte anywhere in a payload is found on the target's device.
pub fn damage_is_found_on_devices() {
    let (source, target) = (emulated(), emulated());
    let mut world = World::on(&source, &target);
    let directory = private_directory();
    let files = || Files::new(directory.path()).unwrap();
    let mut sender = Sender::with_storage(files(), (storage(&source), MAX_BYTES));
    let mut receiver = Receiver::with_storage(files(), deadlines(), (storage(&target), 64 << 20));
    for sample in 0..world.samples.len() {
        let bytes = world.samples[sample].payload.len();
        for at in [0, bytes / 3, bytes - 1] {
            let offer = world.offer(&mut sender, sample);
            let path = directory.path().join(std::str::from_utf8(&offer.payload.0).unwrap());
            let mut payload = std::fs::read(&path).unwrap();
            payload[at] ^= 1;
            std::fs::write(&path, payload).unwrap();
            receiver.begin(Duration::ZERO, &offer, &world.expected()).unwrap();
            let error = receiver.poll(Duration::ZERO).remove(0).1.unwrap_err();
            let is_digest = matches!(error, TransferError::Image(ImageError::Digest { .. }));
            assert!(is_digest, "sample {sample}, byte {at}: {error:?}");
        }
    }
    assert!(receiver.stats().damaged as usize == 3 * world.samples.len());
}

/// Payloads in memory of another device than the cache's pass through the host. The host cannot access bytes of a
/// device directly.
pub fn other_devices_are_copied_from() {
    let (source, target, other) = (emulated(), emulated(), emulated());
    let mut world = World::on(&source, &target);
    let fabric = Fabric::default();
    let loopbacks = (Loopback::new(&fabric), Loopback::new(&fabric));
    moves(&mut world, loopbacks, (storage(&other), storage(&other)));
    let mut transport = Loopback::new(&fabric);
    let mut memory = transport.register(storage(&other).region(8).unwrap()).unwrap();
    let error = transport.with_bytes(&mut memory, |_| ()).unwrap_err();
    assert!(matches!(error, TransportError::OnDevice { .. }), "{error}");
    transport.deregister(memory).unwrap();
}
