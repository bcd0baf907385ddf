//! Faults that transports were seen to have, 100 times, between two processes; and the harm that they do without the
//! protection.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;
use std::time::{Duration, Instant};

use dsv4_kv::transfer::Reserved;
use dsv4_kv_transfer::mistake::{Mistake, make};
use dsv4_kv_transfer::transport::{
    Descriptor, InFlight, Nixl, NixlOptions, NotPosted, Polled, Region, RegionMut, Registered,
};
use dsv4_kv_transfer::{
    Deadlines, Receiver, Source, Target, TransferError, Transport, TransportError, Verified,
};
use libtest_mimic::Failed;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::peer::{LINGER, Peer, SLACK, nixl, poll_until, receiver, wait};
use super::world::{self, Answers, BLOCKS, Schema, Site, World, deadlines, emulated};

const ROUNDS: u32 = 100;

/// The payloads of the samples, as files for other processes.
pub struct Files {
    paths: Vec<String>,
    _directory: tempfile::TempDir,
}

impl Files {
    pub fn new(world: &World) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let write = |(at, sample): (usize, &super::world::Sample)| {
            let path = directory.path().join(at.to_string());
            std::fs::write(&path, &sample.payload).unwrap();
            path.to_str().unwrap().to_owned()
        };
        Self { paths: world.samples.iter().enumerate().map(write).collect(), _directory: directory }
    }

    pub fn of(&self, sample: usize) -> &str {
        &self.paths[sample]
    }
}

/// Admits a verified payload, returns its bytes, and releases it.
fn admit(
    world: &mut World,
    verified: Result<Verified, TransferError>,
    (reserved, source): (Reserved, &mut impl Answers),
) -> Result<Vec<u8>, TransferError> {
    let Site { fed, staging } = &mut world.target;
    let stream = fed.stream.clone();
    let verified = match verified {
        Ok(verified) => verified,
        Err(error) => {
            fed.manager.give_back(reserved).unwrap();
            return Err(error);
        }
    };
    let mut target = Target {
        cache: &mut fed.manager,
        stream: &stream,
        staging,
        weights: crate::world::weights(),
    };
    let id = world::admit(&mut target, &verified, reserved, source)?;
    let (_, bytes) = world.target.export(id);
    world.target.fed.manager.release(id).unwrap();
    Ok(bytes)
}

fn is_free(world: &World) -> bool {
    let ledger = world.target.fed.manager.ledger();
    (ledger.free_blocks(), ledger.live_requests()) == (BLOCKS, 0)
}

/// A source reuses memory before it is read, or if `after`, when it has been read. Returns how many requests were
/// admitted nevertheless, and how many reads the transport reported as successful.
fn reuse(mistake: Mistake, after: bool) -> Result<(u32, u32), Failed> {
    let mut world = World::new();
    let files = Files::new(&world);
    let (mut peer, mut receiver) = (Peer::bytes(&[]), receiver(deadlines()));
    let (start, mut wrong, mut success) = (Instant::now(), 0, 0);
    make(mistake);
    for _ in 0..ROUNDS {
        let at = world.samples[2].at;
        let reserved = world.target.fed.manager.reserve(at)?;
        let (offer, lease) = peer.serve(&world, &world.samples[2], files.of(2));
        let reuse = format!("reuse {lease} {}", files.of(1));
        if !after {
            peer.ask(&reuse);
        }
        receiver.begin(start.elapsed(), &offer, &world.expected())?;
        let verified = wait(&mut receiver, start);
        let is_success = matches!(&verified, Ok(_) | Err(TransferError::Image(_)));
        success += u32::from(is_success);
        if after {
            peer.ask(&reuse);
        }
        wrong += u32::from(admit(&mut world, verified, (reserved, &mut peer)).is_ok());
        peer.ask(&format!("end {lease}"));
    }
    make(Mistake::Nothing);
    // Memory with wrong bytes stays in quarantine until a fence.
    receiver.clear_quarantine()?;
    assert!(is_free(&world) && receiver.taken_bytes() == 0);
    Ok((wrong, success))
}

/// A read that succeeds with wrong bytes is found by the digests, or else by the claim.
pub fn memory_that_is_reused() -> Result<(), Failed> {
    assert_eq!(reuse(Mistake::Nothing, false)?, (0, ROUNDS), "NIXL says success");
    assert_eq!(reuse(Mistake::Nothing, true)?, (0, ROUNDS));
    // The claim alone also finds it.
    assert_eq!(reuse(Mistake::DigestIgnored, false)?, (0, ROUNDS));
    assert_eq!(reuse(Mistake::EpochIgnored, false)?, (0, ROUNDS), "and so do the digests alone");
    Ok(())
}

/// Without the claim, a request that the source gave to another target is admitted each time.
pub fn claims_are_needed() -> Result<(), Failed> {
    assert_eq!(reuse(Mistake::EpochIgnored, true)?, (ROUNDS, ROUNDS));
    Ok(())
}

/// A source that does not know that its memory was overwritten says yes: without digests, wrong bytes are admitted.
pub fn digests_are_needed() -> Result<(), Failed> {
    struct Unknowing;
    impl Answers for Unknowing {
        fn claim(&mut self, _source: dsv4_kv_transfer::Source) -> Result<bool, String> {
            Ok(true)
        }
    }
    let mut world = World::new();
    let files = Files::new(&world);
    let (mut peer, mut receiver) = (Peer::bytes(&[]), receiver(deadlines()));
    let start = Instant::now();
    for (mistake, wanted) in [(Mistake::Nothing, 0), (Mistake::DigestIgnored, ROUNDS)] {
        let mut wrong = 0;
        make(mistake);
        for _ in 0..ROUNDS {
            let reserved = world.target.fed.manager.reserve(world.samples[2].at)?;
            let (offer, lease) = peer.serve(&world, &world.samples[2], files.of(2));
            peer.ask(&format!("reuse {lease} {}", files.of(1)));
            receiver.begin(start.elapsed(), &offer, &world.expected())?;
            let verified = wait(&mut receiver, start);
            if let Ok(bytes) = admit(&mut world, verified, (reserved, &mut Unknowing)) {
                wrong += u32::from(bytes != world.samples[2].payload);
            }
            peer.ask(&format!("end {lease}"));
        }
        make(Mistake::Nothing);
        assert_eq!(wrong, wanted, "{mistake:?}");
        assert!(is_free(&world));
    }
    Ok(())
}

/// NIXL, but memory that it gives back is kept and watched: writes to it would hit its next owner.
struct Watched {
    inner: Nixl,
    freed: Rc<RefCell<Vec<Region>>>,
}

/// The byte with which freed memory is filled.
const PATTERN: u8 = 0xC3;

impl Transport for Watched {
    fn register(&mut self, region: Region) -> Result<Registered, TransportError> {
        self.inner.register(region)
    }

    fn deregister(&mut self, memory: Registered) -> Result<Region, TransportError> {
        let mut region = self.inner.deregister(memory)?;
        let mut copy = Region::new(region.bytes().len())?;
        copy.bytes_mut().copy_from_slice(region.bytes());
        region.bytes_mut().fill(PATTERN);
        self.freed.borrow_mut().push(region);
        Ok(copy)
    }

    fn with_region<R>(
        &mut self,
        memory: &mut Registered,
        work: impl FnOnce(RegionMut<'_>) -> R,
    ) -> Result<R, TransportError> {
        self.inner.with_region(memory, work)
    }

    fn publish(&mut self, memory: &Registered) -> Result<Descriptor, TransportError> {
        self.inner.publish(memory)
    }

    fn flush(&mut self, memory: &Registered, bytes: Range<usize>) -> Result<(), TransportError> {
        self.inner.flush(memory, bytes)
    }

    fn post(
        &mut self,
        into: Registered,
        bytes: Range<usize>,
        from: &Descriptor,
    ) -> Result<InFlight, NotPosted> {
        self.inner.post(into, bytes, from)
    }

    fn poll(&mut self, read: InFlight) -> Polled {
        self.inner.poll(read)
    }

    fn fence(&mut self) -> Result<(), TransportError> {
        self.inner.fence()
    }
}

/// Reads miss their deadline because the source is stopped; then the source continues. Returns how many reads wrote to
/// memory that was given back.
fn late(mistake: Mistake, rounds: u32) -> Result<u32, Failed> {
    let mut world = World::new();
    let files = Files::new(&world);
    let mut peer = Peer::bytes(&[("UCX_TLS", "tcp")]);
    let [read, fence] = [50, 4000].map(Duration::from_millis);
    let freed = Rc::new(RefCell::new(Vec::new()));
    let inner = Nixl::open(&NixlOptions::default())?;
    let watched = Watched { inner, freed: Rc::clone(&freed) };
    let mut receiver = Receiver::new(watched, Deadlines { read, fence, quiet: fence }, 64 << 20);
    let (start, mut outside) = (Instant::now(), 0);
    let (mut over, mut behind) = (Vec::<Region>::new(), Vec::new());
    make(mistake);
    for round in 0..rounds {
        let reserved = world.target.fed.manager.reserve(world.samples[2].at)?;
        let (offer, lease) = peer.serve(&world, &world.samples[2], files.of(2));
        peer.stop();
        let began = start.elapsed();
        receiver.begin(began, &offer, &world.expected())?;
        let ended = wait(&mut receiver, start);
        behind.push((start.elapsed() - began).saturating_sub(read));
        peer.signal("-CONT");
        let error = admit(&mut world, ended, (reserved, &mut peer)).expect_err("nobody answered");
        assert!(matches!(error, TransferError::Deadline { .. }), "{error}");
        let is_written = || freed.borrow().iter().any(is_other);
        let deadline = start.elapsed() + Duration::from_millis(500);
        while mistake != Mistake::Nothing && !is_written() && start.elapsed() < deadline {
            std::thread::yield_now();
        }
        poll_until(&mut receiver, start, |receiver| receiver.quarantined_bytes() == 0);
        // Quarantine gives memory back only after the last write.
        assert!(mistake != Mistake::Nothing || !freed.borrow().is_empty(), "round {round}");
        outside += u32::from(is_written());
        // Bytes may still come.
        over.extend(freed.borrow_mut().drain(..));
        peer.ask(&format!("end {lease}"));
    }
    make(Mistake::Nothing);
    assert!(is_free(&world) && receiver.taken_bytes() == 0);
    // Dropping the agent ends its last writes.
    drop(receiver);
    let later = over.iter().filter(|region| is_other(region)).count() as u32;
    check_delays(&mut behind);
    Ok(outside.max(later))
}

/// Whether something was written into memory that was given back.
fn is_other(region: &Region) -> bool {
    region.bytes().iter().any(|&byte| byte != PATTERN)
}

/// Half of the errors come within 100 ms of the deadline, and all within `SLACK`, which allows for other load.
fn check_delays(behind: &mut [Duration]) {
    behind.sort();
    let [median, last] = [behind.len() / 2, behind.len() - 1].map(|at| behind[at]);
    eprintln!("errors behind the deadline: half within {median:?}, all within {last:?}");
    assert!(median < Duration::from_millis(100) && last < SLACK);
}

/// Bytes that arrive after the deadline go to quarantined memory only.
pub fn late_bytes_stay_in_quarantine() -> Result<(), Failed> {
    assert_eq!(late(Mistake::Nothing, ROUNDS)?, 0);
    Ok(())
}

/// Without quarantine they go to memory that has another owner.
pub fn quarantine_is_needed() -> Result<(), Failed> {
    let outside = late(Mistake::NoQuarantine, 10)?;
    assert!(outside > 0, "late bytes come");
    eprintln!("late, without quarantine: {outside} of 10 reads wrote memory that was given back");
    Ok(())
}

/// An offer is given up while it is read, over TCP: its memory lingers, so that the source lives and the read ends. Without
/// that the source dies by a segmentation fault.
pub fn given_up_while_read() -> Result<(), Failed> {
    const ROUNDS: u64 = 50;
    let world = World::of(Schema::Flash, &emulated(), &emulated());
    let mut peer = Peer::lingering();
    let mut receiver = Receiver::new(nixl(), deadlines(), 64 << 20);
    let (start, linger) = (Instant::now(), LINGER.as_secs());
    for round in 0..ROUNDS {
        let offer = peer.offer(2);
        let transfer = receiver.begin(start.elapsed(), &offer, &world.expected())?;
        let Source { epoch, lease } = transfer.source();
        let ended = receiver.poll(start.elapsed()).pop();
        assert_eq!(peer.ask(&format!("gives-up {epoch} {lease}")), "true");
        let verified = ended.map_or_else(|| wait(&mut receiver, start), |(_, ended)| ended)?;
        assert_eq!(verified.payload(), world.samples[2].payload, "round {round}");
        assert_eq!(peer.ask(&format!("claim {epoch} {lease}")), "false");
        // The time of the source passes faster.
        let now = round * 2 * linger;
        assert_ne!(peer.ask(&format!("expire {now}")), "0", "it lingers");
        assert_eq!(peer.ask(&format!("expire {}", now + linger)), "0");
    }
    Ok(())
}

/// Sources are killed before or while their payload is read: an error by the deadline, and nothing is lost.
pub fn killed_sources() -> Result<(), Failed> {
    let mut world = World::new();
    let files = Files::new(&world);
    let [read, fence] = [1000, 4000].map(Duration::from_millis);
    let mut receiver = receiver(Deadlines { read, fence, quiet: fence });
    let mut random = StdRng::seed_from_u64(1);
    let (start, mut longest, mut errors) = (Instant::now(), Duration::ZERO, BTreeMap::new());
    for round in 0..ROUNDS {
        let tcp = [("UCX_TLS", "tcp")];
        let mut peer = Peer::bytes(if round % 2 == 0 { &tcp } else { &[] });
        let reserved = world.target.fed.manager.reserve(world.samples[2].at)?;
        // Either there is no connection yet, or the read has one: while it is being made, UCX itself may crash.
        let is_before: bool = random.random();
        if !is_before {
            let (first, _) = peer.serve(&world, &world.samples[0], files.of(0));
            receiver.begin(start.elapsed(), &first, &world.expected())?;
            wait(&mut receiver, start)?;
        }
        let (offer, _) = peer.serve(&world, &world.samples[2], files.of(2));
        if is_before {
            peer.child.kill()?;
            peer.child.wait()?;
        }
        let after = Duration::from_micros(random.random_range(0..3_000));
        let (child, began) = (&mut peer.child, start.elapsed());
        let ended = std::thread::scope(|scope| {
            let kill = scope.spawn(move || {
                std::thread::sleep(after);
                child.kill()
            });
            let begun = receiver.begin(began, &offer, &world.expected());
            let ended = begun.and_then(|_| wait(&mut receiver, start));
            longest = longest.max(start.elapsed() - began);
            kill.join().expect("it only kills").map(|()| ended)
        })?;
        peer.child.wait()?;
        let error = admit(&mut world, ended, (reserved, &mut peer)).expect_err("nobody is there");
        let name = match error {
            TransferError::Transport(_) => "the transport's error",
            TransferError::Deadline { .. } => "deadline",
            TransferError::Unreachable { .. } => "read, and not claimed",
            error => return Err(format!("{error}").into()),
        };
        *errors.entry(name).or_insert(0) += 1;
        receiver.clear_quarantine()?;
        assert!(is_free(&world) && receiver.taken_bytes() == 0, "round {round}");
    }
    assert!(longest < read + SLACK, "{longest:?}");
    eprintln!("killed: {errors:?}, {longest:?} at most");
    let mut peer = Peer::bytes(&[]);
    let (offer, _) = peer.serve(&world, &world.samples[2], files.of(2));
    receiver.begin(start.elapsed(), &offer, &world.expected())?;
    assert_eq!(wait(&mut receiver, start)?.payload(), world.samples[2].payload);
    Ok(())
}
