//! A source and a target in two processes. The control channel is the source's standard input and output.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use dsv4_kv_transfer::protocol::Offer;
use dsv4_kv_transfer::transport::{Descriptor, Nixl, NixlOptions};
use dsv4_kv_transfer::{
    Control, Deadlines, Receiver, Sender, Source, Target, TransferError, Verified,
};
use libtest_mimic::Failed;

use super::world::{BLOCKS, World, export};

/// Set in the process that is the source.
const CHILD: &str = "DSV4_NIXL_TEST_SOURCE";

/// Whether this process is one.
pub fn is_source() -> bool {
    std::env::var_os(CHILD).is_some()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(hex: &str) -> Vec<u8> {
    let digits = hex.as_bytes().chunks(2);
    digits.map(|two| u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap()).collect()
}

/// The source: offers a sample a line, and answers claims.
pub fn source() {
    let world = World::new();
    let mut sender = Sender::new(Nixl::open(&NixlOptions::default()).unwrap());
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<_> = line.split(' ').collect();
        let answer = match words[..] {
            ["offer", sample] => {
                let sample = &world.samples[sample.parse::<usize>().unwrap()];
                let mut draft = sender.draft(&world.layout, sample.at).unwrap();
                sender.fill(&mut draft, |bytes| bytes.copy_from_slice(&sample.payload)).unwrap();
                let of = (world.fingerprint, &world.layout);
                let offer = sender.offer(draft, of, (sample.at, &sample.tokens)).unwrap();
                format!("{} {}", hex(&offer.manifest), hex(&offer.payload.0))
            }
            ["claim", epoch, lease] => {
                let (epoch, lease) = (epoch.parse().unwrap(), lease.parse().unwrap());
                sender.claim(Source { epoch, lease }).to_string()
            }
            ["back", lease] => sender.take_back(lease.parse().unwrap()).to_string(),
            _ => panic!("{line}"),
        };
        println!("{answer}");
    }
}

/// The other process.
struct Peer {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Peer {
    fn new() -> Self {
        Self::with(&[])
    }

    /// A source that runs with these variables.
    fn with(variables: &[(&str, &str)]) -> Self {
        let program = std::env::current_exe().unwrap();
        let mut child = Command::new(program)
            .env(CHILD, "1")
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (to, from) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Self { child, to, from: BufReader::new(from) }
    }

    fn ask(&mut self, question: &str) -> String {
        writeln!(self.to, "{question}").unwrap();
        let mut answer = String::new();
        self.from.read_line(&mut answer).unwrap();
        answer.trim_end().to_owned()
    }

    fn signal(&self, signal: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }

    fn offer(&mut self, sample: usize) -> Offer {
        let answer = self.ask(&format!("offer {sample}"));
        let (manifest, payload) = answer.split_once(' ').unwrap();
        Offer { manifest: bytes(manifest), payload: Descriptor(bytes(payload)) }
    }
}

impl Control for Peer {
    fn claim(&mut self, source: Source) -> Result<bool, String> {
        Ok(self.ask(&format!("claim {} {}", source.epoch, source.lease)) == "true")
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn receiver() -> Receiver<Nixl> {
    let deadlines = Deadlines { read: Duration::from_secs(2), fence: Duration::from_secs(4) };
    Receiver::new(Nixl::open(&NixlOptions::default()).unwrap(), deadlines, 64 << 20)
}

/// Polls until the only transfer has ended.
fn wait(receiver: &mut Receiver<Nixl>, start: Instant) -> Result<Verified, TransferError> {
    loop {
        if let Some((_, ended)) = receiver.poll(start.elapsed()).pop() {
            return ended;
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Requests come with every byte, again and again; one that the source took back does not.
pub fn target() -> Result<(), Failed> {
    let (mut world, mut peer, mut receiver) = (World::new(), Peer::new(), receiver());
    let (stream, start) = (world.target.stream.clone(), Instant::now());
    for round in 0..30 {
        let sample = round % world.samples.len();
        let offer = peer.offer(sample);
        receiver.begin(start.elapsed(), &offer, &world.expected())?;
        let verified = wait(&mut receiver, start)?;
        let room = world.target.manager.reserve(verified.manifest().at)?;
        let is_taken_back = round % 5 == 4;
        if is_taken_back {
            assert_eq!(peer.ask(&format!("back {}", verified.manifest().source.lease)), "true");
        }
        let mut target =
            Target { cache: &mut world.target.manager, stream: &stream, port: &mut world.port };
        match target.admit(&verified, room, &mut peer) {
            Ok(id) => {
                let got = export(&mut world.target, &mut world.port, id);
                assert!(!is_taken_back && got == world.samples[sample].payload, "round {round}");
                world.target.manager.release(id)?;
            }
            Err(error) => {
                assert!(matches!(error, TransferError::NotHeld { .. }) && is_taken_back, "{error}");
            }
        }
    }
    assert_eq!((receiver.stats().verified, receiver.quarantined_bytes()), (30, 0));
    assert_eq!(world.target.manager.ledger().free_blocks(), BLOCKS);
    Ok(())
}

/// A source that is killed before its payload is read: an error, or no end, by the deadline; and the next one is served.
pub fn dead_sources() -> Result<(), Failed> {
    let world = World::new();
    let (mut receiver, start) = (receiver(), Instant::now());
    for _ in 0..3 {
        let mut peer = Peer::new();
        let offer = peer.offer(2);
        peer.child.kill()?;
        peer.child.wait()?;
        let began = start.elapsed();
        let begun = receiver.begin(began, &offer, &world.expected());
        let ended = match begun {
            Ok(_) => wait(&mut receiver, start).map(drop),
            Err(error) => Err(error),
        };
        let took = start.elapsed() - began;
        let error = ended.expect_err("nobody is there");
        let is_known =
            matches!(error, TransferError::Transport(_) | TransferError::Deadline { .. });
        assert!(is_known && took < Duration::from_millis(2500), "{error} after {took:?}");
        eprintln!("killed: {error} after {took:?}");
    }
    while receiver.quarantined_bytes() > 0 && !receiver.clear_quarantine()? {}
    let mut peer = Peer::new();
    let offer = peer.offer(2);
    receiver.begin(start.elapsed(), &offer, &world.expected())?;
    assert_eq!(wait(&mut receiver, start)?.payload(), world.samples[2].payload);
    Ok(())
}

/// A source that takes memory back and uses it for something else, before it is read: an error, whatever NIXL says of it.
pub fn reused_memory() -> Result<(), Failed> {
    let (world, mut peer, mut receiver) = (World::new(), Peer::new(), receiver());
    let start = Instant::now();
    let mut damaged = 0;
    for round in 0..10 {
        let offer = peer.offer(2);
        let (manifest, _) = dsv4_kv_transfer::image::decode_manifest(&offer.manifest)?;
        assert_eq!(peer.ask(&format!("back {}", manifest.source.lease)), "true");
        // At the same address, as a rule.
        let others = [1, 0].map(|sample| peer.offer(sample));
        let begun = receiver.begin(start.elapsed(), &offer, &world.expected());
        let ended = begun.and_then(|_| wait(&mut receiver, start).map(drop));
        let error = ended.expect_err("the memory is gone");
        damaged += u32::from(matches!(error, TransferError::Image(_)));
        eprintln!("reused, round {round}: {error}");
        receiver.clear_quarantine()?;
        for other in others {
            receiver.begin(start.elapsed(), &other, &world.expected())?;
            wait(&mut receiver, start)?;
        }
    }
    eprintln!("reused: {damaged} of 10 reads were a success to NIXL, with other bytes");
    Ok(())
}

/// A source that is stopped, over TCP: an error at the deadline, quarantine until it goes on, or until the transport is ended.
pub fn stopped_sources() -> Result<(), Failed> {
    let world = World::new();
    let (mut receiver, start) = (receiver(), Instant::now());
    for goes_on in [true, false] {
        let mut peer = Peer::with(&[("UCX_TLS", "tcp")]);
        let first = peer.offer(0);
        receiver.begin(start.elapsed(), &first, &world.expected())?;
        wait(&mut receiver, start)?;
        let offer = peer.offer(2);
        peer.signal("-STOP");
        let began = start.elapsed();
        receiver.begin(began, &offer, &world.expected())?;
        let error = wait(&mut receiver, start).expect_err("nobody answers");
        let took = start.elapsed() - began;
        let is_deadline = matches!(error, TransferError::Deadline { .. });
        assert!(is_deadline && took < Duration::from_millis(2500), "{error} after {took:?}");
        assert!(receiver.quarantined_bytes() > 0);
        if goes_on {
            peer.signal("-CONT");
        }
        let before = receiver.stats();
        while receiver.quarantined_bytes() > 0 {
            assert!(receiver.poll(start.elapsed()).is_empty());
        }
        let (after, took) = (receiver.stats(), start.elapsed() - began);
        let ended = (after.ended_late - before.ended_late, after.fences - before.fences);
        assert_eq!(ended, if goes_on { (1, 0) } else { (0, 1) });
        assert!(took < Duration::from_millis(6000), "{took:?}");
        eprintln!("stopped: quarantine ended after {took:?}, late and by fences: {ended:?}");
    }
    let mut peer = Peer::new();
    let offer = peer.offer(2);
    receiver.begin(start.elapsed(), &offer, &world.expected())?;
    assert_eq!(wait(&mut receiver, start)?.payload(), world.samples[2].payload);
    Ok(())
}
