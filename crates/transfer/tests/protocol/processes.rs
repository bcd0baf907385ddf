//! A source and a target in two processes.

use std::time::{Duration, Instant};

use dsv4_kv::transfer::{PartLayout, PrefixImport};
use dsv4_kv_transfer::image::decode_manifest;
use dsv4_kv_transfer::protocol::{Opening, Ready};
use dsv4_kv_transfer::{Control, Deadlines, Expected, Fingerprint, Source, Target, TransferError};
use libtest_mimic::Failed;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::peer::{Peer, SLACK, TIMEOUT, poll_until, receiver, wait};
use super::prefixes;
use super::streaming::{Plan, SHORT};
use super::world::{BLOCKS, LONG, Schema, Site, World, admit, deadlines};

/// Requests arrive with every byte, again and again; a request that the source took back does not arrive.
pub fn requests_move() -> Result<(), Failed> {
    let (mut world, mut peer, mut receiver) = (World::new(), Peer::cache(), receiver(deadlines()));
    let start = Instant::now();
    for round in 0..30 {
        let sample = round % world.samples.len();
        let offer = peer.offer(sample);
        receiver.begin(start.elapsed(), &offer, &world.expected())?;
        let verified = wait(&mut receiver, start)?;
        let Site { fed, staging } = &mut world.target;
        let (reserved, stream) = (fed.manager.reserve(verified.manifest().at)?, fed.stream.clone());
        let is_taken_back = round % 5 == 4;
        if is_taken_back {
            assert_eq!(peer.ask(&format!("back {}", verified.manifest().source.lease)), "true");
        }
        let mut target = Target {
            cache: &mut fed.manager,
            stream: &stream,
            staging,
            weights: crate::world::weights(),
        };
        match admit(&mut target, &verified, reserved, &mut peer) {
            Ok(id) => {
                let (_, got) = world.target.export(id);
                assert!(!is_taken_back && got == world.samples[sample].payload, "round {round}");
                world.target.fed.manager.release(id)?;
            }
            Err(error) => {
                assert!(matches!(error, TransferError::NotHeld { .. }) && is_taken_back, "{error}");
            }
        }
    }
    assert_eq!((receiver.stats().verified, receiver.quarantined_bytes()), (30, 0));
    assert_eq!(world.target.fed.manager.ledger().free_blocks(), BLOCKS);
    Ok(())
}

/// A control channel to a peer, for prefixes: it is never asked, only told.
struct Told<'p>(&'p mut Peer);

impl Control for Told<'_> {
    fn ask(&mut self, source: Source) -> Result<(), String> {
        panic!("nobody asks whose {source:?} is")
    }

    fn answer(&mut self, _source: Source) -> Result<Option<bool>, String> {
        panic!("nobody asks")
    }

    fn give_up(&mut self, Source { epoch, lease }: Source) {
        assert_eq!(self.0.ask(&format!("gives-up {epoch} {lease}")), "true", "it was held");
    }
}

/// Prefixes move from the other process's tree to this one's, with every byte. Blocks that are here are not written
/// again, and the source's memory is freed.
pub fn prefixes_move() -> Result<(), Failed> {
    let (mut peer, mut receiver, start) = (Peer::cache(), receiver(deadlines()), Instant::now());
    let mut target = prefixes::site(3, 5, 4);
    // The same prompt is computed here, in a third cache.
    let (mut alone, ids) = prefixes::computed();
    let config = target.fed.manager.config();
    let fingerprint = &Fingerprint::new(config, b"weights", b"salt", b"adapter")?;
    for (tokens, blocks) in [(256, 2), (prefixes::TOKENS, 1)] {
        let offer = peer.prefix(tokens);
        let layout = &target.staging.layout().clone();
        let expected = Expected { fingerprint, layout, tokens: None, max_context: 640 };
        receiver.begin(start.elapsed(), &offer, &expected)?;
        let verified = wait(&mut receiver, start)?;
        let Site { fed, staging } = &mut target;
        let stream = fed.stream.clone();
        let mut tree = Target {
            cache: &mut fed.manager,
            stream: &stream,
            staging,
            weights: crate::world::weights(),
        };
        let owner = (&b"salt"[..], &b"adapter"[..]);
        let came = tree.admit_prefix(&verified, owner, &mut Told(&mut peer))?;
        assert_eq!(came, Some(PrefixImport { blocks, checkpoint: true }));
        let [got, want] = [&mut target, &mut alone]
            .map(|site| prefixes::exported(site, &ids[..tokens], b"salt").expect("it is there"));
        assert!(got == want, "every byte of one that was computed here");
    }
    Ok(())
}

/// Blocks of a prompt arrive while the other process computes the rest. The request continues with every byte.
pub fn prompts_stream() -> Result<(), Failed> {
    let (mut world, mut peer, mut receiver) = (World::new(), Peer::cache(), receiver(deadlines()));
    let (start, block) = (Instant::now(), world.layout.block_bytes());
    let opening = peer.open(SHORT);
    let transfer = receiver.open(start.elapsed(), &opening, &world.expected())?;
    let mut is_whole = false;
    while !is_whole {
        let early = receiver.stats().bytes;
        let ready;
        (ready, is_whole) = peer.step();
        receiver.ready(start.elapsed(), transfer, &ready)?;
        if is_whole {
            assert_eq!(early, block, "a block had come before the last chunk");
        }
        poll_until(&mut receiver, start, |receiver| receiver.stats().bytes >= ready.bytes);
    }
    receiver.offered(start.elapsed(), transfer, &peer.done())?;
    let verified = wait(&mut receiver, start)?;
    let Site { fed, staging } = &mut world.target;
    let (reserved, stream) = (fed.manager.reserve(verified.manifest().at)?, fed.stream.clone());
    let mut target = Target {
        cache: &mut fed.manager,
        stream: &stream,
        staging,
        weights: crate::world::weights(),
    };
    let id = admit(&mut target, &verified, reserved, &mut peer)?;
    let (_, got) = world.target.export(id);
    assert_eq!(got, verified.payload());
    // Compare with a request that is computed here.
    let alone = world.compute(super::streaming::PROMPT);
    assert!(got == alone, "every byte of one that never moved");
    Ok(())
}

/// A prompt of 8,192 tokens in chunks of 2,048. When the last chunk has been computed, three quarters of the bytes of
/// its blocks have arrived: all that existed before that chunk. With the rest, every byte is the source's.
pub fn most_of_a_prompt_comes_early() -> Result<(), Failed> {
    let config = Schema::Long.settings(3, 2, BLOCKS);
    let (fingerprint, layout) =
        (&Fingerprint::new(&config, b"weights", b"salt", b"")?, &PartLayout::new(&config));
    let expected = Expected { fingerprint, layout, tokens: None, max_context: config.max_context };
    let (mut peer, mut receiver, start) = (Peer::long(), receiver(deadlines()), Instant::now());
    let opening = peer.open(Plan { prompt: LONG, chunk: LONG / 4 });
    let transfer = receiver.open(start.elapsed(), &opening, &expected)?;
    let (mut is_whole, mut early) = (false, Vec::new());
    while !is_whole {
        // Ready bytes are read while the next chunk is computed.
        let ready;
        (ready, is_whole) = std::thread::scope(|scope| {
            let step = scope.spawn(|| peer.step());
            while !step.is_finished() {
                assert!(receiver.poll(start.elapsed()).is_empty());
                std::thread::sleep(Duration::from_micros(100));
            }
            step.join().expect("the source goes on")
        });
        early.push(receiver.stats().bytes);
        receiver.ready(start.elapsed(), transfer, &ready)?;
    }
    let blocks = layout.block_bytes() * (LONG / 128) as u64;
    eprintln!("of {blocks} bytes of blocks there were before each chunk's end: {early:?}");
    assert_eq!(early.len(), 4);
    assert!(4 * early[3] >= 3 * blocks, "{early:?} of {blocks}");
    receiver.offered(start.elapsed(), transfer, &peer.done())?;
    let verified = wait(&mut receiver, start)?;
    assert_eq!(receiver.stats().bytes, verified.payload().len() as u64, "each was read once");
    Ok(())
}

/// Registers and deregisters memory of all sizes, up to six at a time, so that addresses are reused and overlap memory
/// that the target knew earlier. Each read returns the current bytes.
pub fn memory_comes_and_goes() -> Result<(), Failed> {
    let world = World::new();
    let files = super::hazards::Files::new(&world);
    let (mut peer, mut receiver) = (Peer::bytes(&[]), receiver(deadlines()));
    let (mut random, start) = (StdRng::seed_from_u64(1), Instant::now());
    let mut live = Vec::new();
    for round in 0..200 {
        let sample = random.random_range(0..world.samples.len());
        let (offer, lease) = peer.serve(&world, &world.samples[sample], files.of(sample));
        // Two reads; the second begins in the middle.
        let (manifest, _) = decode_manifest(&offer.manifest)?;
        let (source, bytes) = (manifest.source, manifest.payload_bytes() / 3);
        let opening =
            Opening { manifest: manifest.encode_opening(), payload: offer.payload.clone() };
        let transfer = receiver.open(start.elapsed(), &opening, &world.expected())?;
        let before = receiver.stats().bytes;
        receiver.ready(start.elapsed(), transfer, &Ready { source, bytes })?;
        let begin = Instant::now();
        while receiver.stats().bytes < before + bytes {
            if let Some((_, Err(error))) = receiver.poll(start.elapsed()).pop() {
                return Err(format!("round {round}: {error}").into());
            }
            assert!(begin.elapsed() < TIMEOUT, "round {round}: {:?}", receiver.stats());
        }
        receiver.offered(start.elapsed(), transfer, &offer)?;
        let verified = wait(&mut receiver, start);
        let verified = verified.map_err(|error| format!("round {round}: {error}"))?;
        assert_eq!(verified.payload(), world.samples[sample].payload);
        live.push(lease);
        while live.len() > random.random_range(0..6) {
            let lease = live.swap_remove(random.random_range(0..live.len()));
            peer.ask(&format!("end {lease}"));
        }
    }
    Ok(())
}

/// A stopped source costs another source's prompt nothing. When the agent is destroyed because of its read, the block
/// of the prompt that has arrived stays. Its memory is registered with the new agent, which reads the rest.
pub fn prompts_outlive_the_agent() -> Result<(), Failed> {
    let (mut world, mut peer) = (World::new(), Peer::cache());
    let files = super::hazards::Files::new(&world);
    let mut stopped = Peer::bytes(&[("UCX_TLS", "tcp")]);
    let [read, fence, quiet] = [200, 600, 60_000].map(Duration::from_millis);
    let mut receiver = receiver(Deadlines { read, fence, quiet });
    let start = Instant::now();
    let transfer = receiver.open(start.elapsed(), &peer.open(SHORT), &world.expected())?;
    for _ in 0..2 {
        let (ready, _) = peer.step();
        receiver.ready(start.elapsed(), transfer, &ready)?;
        poll_until(&mut receiver, start, |receiver| receiver.stats().bytes >= ready.bytes);
    }
    let came = receiver.stats().bytes;
    assert_eq!(came, world.layout.block_bytes());
    let (offer, _) = stopped.serve(&world, &world.samples[2], files.of(2));
    stopped.stop();
    receiver.begin(start.elapsed(), &offer, &world.expected())?;
    let error = wait(&mut receiver, start).expect_err("nobody answers");
    assert!(matches!(error, TransferError::Deadline { .. }), "{error}");
    poll_until(&mut receiver, start, |receiver| receiver.stats().fences > 0);
    assert_eq!((receiver.quarantined_bytes(), receiver.reads()), (0, 1));
    let (ready, is_whole) = peer.step();
    assert!(is_whole);
    receiver.ready(start.elapsed(), transfer, &ready)?;
    receiver.offered(start.elapsed(), transfer, &peer.done())?;
    let verified = wait(&mut receiver, start)?;
    assert!(verified.payload() == world.compute(super::streaming::PROMPT), "every byte");
    let bytes = receiver.stats().bytes;
    assert_eq!(bytes, verified.payload().len() as u64, "each was read once");
    Ok(())
}

/// A source that is not read uses almost no CPU time, because NIXL's thread sleeps.
pub fn an_idle_source_sleeps() -> Result<(), Failed> {
    const IDLE: Duration = Duration::from_secs(2);
    let world = World::new();
    let files = super::hazards::Files::new(&world);
    let mut peer = Peer::bytes(&[]);
    peer.serve(&world, &world.samples[0], files.of(0));
    let before = peer.cpu_time();
    std::thread::sleep(IDLE);
    let took = peer.cpu_time() - before;
    eprintln!("a source that was idle for {IDLE:?} took {took:?} of a core");
    assert!(took < IDLE / 10, "{took:?} of {IDLE:?}");
    Ok(())
}

/// A source is stopped, over TCP: an error at the deadline, and quarantine until the source continues or the transport
/// is fenced.
pub fn stopped_sources() -> Result<(), Failed> {
    let world = World::new();
    let files = super::hazards::Files::new(&world);
    let (mut receiver, start) = (receiver(deadlines()), Instant::now());
    for goes_on in [true, false] {
        let mut peer = Peer::bytes(&[("UCX_TLS", "tcp")]);
        let (first, _) = peer.serve(&world, &world.samples[0], files.of(0));
        receiver.begin(start.elapsed(), &first, &world.expected())?;
        wait(&mut receiver, start)?;
        let (offer, _) = peer.serve(&world, &world.samples[2], files.of(2));
        peer.stop();
        let began = start.elapsed();
        receiver.begin(began, &offer, &world.expected())?;
        let error = wait(&mut receiver, start).expect_err("nobody answers");
        let took = start.elapsed() - began;
        let is_deadline = matches!(error, TransferError::Deadline { .. });
        assert!(is_deadline && took < deadlines().read + SLACK, "{error} after {took:?}");
        assert!(receiver.quarantined_bytes() > 0);
        if goes_on {
            peer.signal("-CONT");
        }
        let before = receiver.stats();
        poll_until(&mut receiver, start, |receiver| receiver.quarantined_bytes() == 0);
        let (after, took) = (receiver.stats(), start.elapsed() - began);
        let ended = (after.ended_late - before.ended_late, after.fences - before.fences);
        assert_eq!(ended, if goes_on { (1, 0) } else { (0, 1) });
        assert!(took < deadlines().read + deadlines().fence, "{took:?}");
        eprintln!("stopped: quarantine ended after {took:?}, late and by fences: {ended:?}");
    }
    let mut peer = Peer::bytes(&[]);
    let (offer, _) = peer.serve(&world, &world.samples[2], files.of(2));
    receiver.begin(start.elapsed(), &offer, &world.expected())?;
    assert_eq!(wait(&mut receiver, start)?.payload(), world.samples[2].payload);
    Ok(())
}
