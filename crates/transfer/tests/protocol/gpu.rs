//! Payloads in memory of GPUs, by NIXL between two processes: the source on GPU 0, the target on the last one.

use std::time::{Duration, Instant};

use cust::context::legacy::{Context, ContextFlags};
use dsv4_kv::device::Cuda;
use dsv4_kv_transfer::transport::{MemoryKind, Nixl, Storage};
use dsv4_kv_transfer::{Deadlines, Receiver, Transport, TransportError};
use libtest_mimic::Failed;

use super::devices::admit;
use super::gpus::{Gpu, gpus};
use super::peer::{Peer, nixl, wait};
use super::streaming::SHORT;
use super::world::{BLOCKS, World, emulated};

/// How often each sample moves.
const ROUNDS: usize = 10;

/// Long deadlines, since the first read opens the other GPU.
fn deadlines() -> Deadlines {
    let [read, fence, quiet] = [10, 20, 60].map(Duration::from_secs);
    Deadlines { read, fence, quiet }
}

/// Requests arrive with every byte, from and to host and GPU memory, both complete ones and ones that are still being
/// computed. Another context is current on the thread, as in a program that also works with another GPU.
pub fn requests_move() -> Result<(), Failed> {
    let gpu = Gpu::open(gpus() as u32 - 1)?;
    let flags = ContextFlags::MAP_HOST | ContextFlags::SCHED_AUTO;
    let other = cust::device::Device::get_device(0).map_err(|error| error.to_string())?;
    let _other = Context::create_and_push(flags, other).map_err(|error| error.to_string())?;
    let mut world = World::on(&gpu.device, &gpu.device);
    for from in ["host", "device"] {
        for to in ["host", "device"] {
            let (mut peer, start) = (Peer::gpu(from), Instant::now());
            let storage = gpu.storage(to)?;
            let is_device = matches!(storage.kind(), MemoryKind::Cuda { .. });
            assert_eq!(is_device, to == "device");
            let mut receiver = Receiver::with_storage(nixl(), deadlines(), (storage, 64 << 20));
            for round in 0..ROUNDS * world.samples.len() {
                let sample = round % world.samples.len();
                let offer = peer.offer(sample);
                receiver.begin(start.elapsed(), &offer, &world.expected())?;
                let verified = wait(&mut receiver, start);
                let verified = verified.map_err(|error| format!("{from} to {to}: {error}"))?;
                let got = admit(&mut world, &verified, &mut peer)?;
                assert!(got == world.samples[sample].payload, "{from} to {to}, round {round}");
            }
            stream(&mut world, &mut peer, &mut receiver)?;
            eprintln!("{from} to {to}: {:?}", receiver.stats());
        }
    }
    assert_eq!(world.target.fed.manager.ledger().free_blocks(), BLOCKS);
    Ok(())
}

/// A prompt arrives while the other process computes it.
fn stream(
    world: &mut World<Cuda>,
    peer: &mut Peer,
    receiver: &mut Receiver<Nixl>,
) -> Result<(), Failed> {
    let start = Instant::now();
    let transfer = receiver.open(start.elapsed(), &peer.open(SHORT), &world.expected())?;
    loop {
        let (ready, is_whole) = peer.step();
        receiver.ready(start.elapsed(), transfer, &ready)?;
        assert!(receiver.poll(start.elapsed()).is_empty());
        if is_whole {
            break;
        }
    }
    receiver.offered(start.elapsed(), transfer, &peer.done())?;
    let verified = wait(receiver, start)?;
    let got = admit(world, &verified, peer)?;
    assert!(got == world.compute(super::streaming::PROMPT), "every byte of one that never moved");
    Ok(())
}

/// Memory that only its process can reach is refused.
pub fn emulated_memory_is_refused() -> Result<(), Failed> {
    let region = Storage::device(&emulated(), 0)?.region(8)?;
    let error = nixl().register(region).unwrap_err();
    let is_kind = matches!(error, TransportError::Kind { kind: MemoryKind::Emulated, .. });
    assert!(is_kind, "{error}");
    Ok(())
}
