//! Random transfers with random faults.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

use dsv4_kv::transfer::Reserved;
use dsv4_kv_transfer::image::decode_manifest;
use dsv4_kv_transfer::mistake::{Mistake, make};
use dsv4_kv_transfer::protocol::ReceiverStats;
use dsv4_kv_transfer::transport::{Fabric, Loopback};
use dsv4_kv_transfer::{
    Control, Deadlines, Receiver, Sender, Source, Target, TransferError, TransferId,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::faulty::{Fault, Faulty, Plan};
use super::world::{BLOCKS, World};

const READ: Duration = Duration::from_millis(100);
const FENCE: Duration = Duration::from_millis(400);
const MOST: u64 = 8 << 20;

/// What came of a run.
#[derive(Debug, Default)]
struct Outcome {
    admitted: u32,
    /// Requests with other bytes than the source's, or that the source had taken back.
    wrong: u32,
    /// Writes to memory that was not quarantined any more.
    outside: u32,
    /// Late writes.
    late: u32,
    /// Errors, by what they say first.
    errors: HashMap<&'static str, u32>,
    stats: ReceiverStats,
}

/// The source, at the other end of the control channel.
struct Channel<'s>(&'s RefCell<Sender<Loopback>>, bool);

impl Control for Channel<'_> {
    fn claim(&mut self, source: Source) -> Result<bool, String> {
        if self.1 {
            return Err("the connection was reset".to_owned());
        }
        Ok(self.0.borrow_mut().claim(source))
    }
}

/// A transfer that goes on.
struct Moving {
    sample: usize,
    room: Reserved,
    source: Source,
    taken_back: bool,
}

fn name(error: &TransferError) -> &'static str {
    match error {
        TransferError::Image(_) => "image",
        TransferError::Transport(_) => "transport",
        TransferError::Deadline { .. } => "deadline",
        TransferError::Fenced { .. } => "fenced",
        TransferError::NotHeld { .. } => "not held",
        TransferError::Unreachable { .. } => "unreachable",
        TransferError::NoMemory { .. } => "no memory",
        other => panic!("{other}"),
    }
}

fn fault(random: &mut StdRng) -> Fault {
    let millis = |random: &mut StdRng, range| Duration::from_millis(random.random_range(range));
    match random.random_range(0..8) {
        0 => Fault::Stale,
        1 => Fault::Partial,
        2 => Fault::Error(millis(random, 1..300)),
        3 => Fault::Delay(millis(random, 1..90)),
        4 => Fault::Delay(millis(random, 110..350)),
        5 if random.random_ratio(1, 4) => Fault::Never(millis(random, 110..300)),
        _ => Fault::None,
    }
}

fn run(mistake: Mistake, transfers: u32, seed: u64) -> Outcome {
    make(mistake);
    let mut random = StdRng::seed_from_u64(seed);
    let mut world = World::new();
    let (fabric, plan) = (Fabric::default(), Rc::new(Plan::default()));
    let sender = RefCell::new(Sender::new(Loopback::new(&fabric)));
    let deadlines = Deadlines { read: READ, fence: FENCE, quiet: FENCE };
    let mut receiver = Receiver::new(Faulty::new(&fabric, &plan), deadlines, MOST);
    let mut moving: HashMap<TransferId, Moving> = HashMap::new();
    let (mut outcome, mut begun, mut now) = (Outcome::default(), 0, Duration::ZERO);
    let stream = world.target.fed.stream.clone();
    let mut idle = 0;
    // At the end, until the second deadline of what is left has passed.
    while begun < transfers || !moving.is_empty() || idle < 60 {
        idle = if begun < transfers || !moving.is_empty() { 0 } else { idle + 1 };
        now += Duration::from_millis(random.random_range(1..20));
        plan.advance(&fabric, now);
        if begun < transfers && moving.len() < 2 {
            begun += 1;
            let at = random.random_range(0..world.samples.len());
            if let Ok(room) = world.target.fed.manager.reserve(world.samples[at].at) {
                let offer = world.offer(&mut sender.borrow_mut(), at);
                let source = decode_manifest(&offer.manifest).unwrap().0.source;
                plan.next.set(Some(fault(&mut random)));
                match receiver.begin(now, &offer, &world.expected()) {
                    Ok(id) => {
                        moving.insert(id, Moving { sample: at, room, source, taken_back: false });
                    }
                    Err(error) => {
                        *outcome.errors.entry(name(&error)).or_default() += 1;
                        world.target.fed.manager.give_back(room).unwrap();
                        sender.borrow_mut().take_back(source.lease);
                    }
                }
            }
        }
        // A source that changes its mind: its client has gone, or it needs the memory.
        for moving in moving.values_mut() {
            if random.random_ratio(1, 40) {
                moving.taken_back |= sender.borrow_mut().take_back(moving.source.lease);
            }
        }
        for (id, ended) in receiver.poll(now) {
            let Moving { sample, room, source, taken_back } = moving.remove(&id).unwrap();
            let sample = &world.samples[sample];
            let mut target = Target {
                cache: &mut world.target.fed.manager,
                stream: &stream,
                port: &mut world.target.port,
            };
            let mut channel = Channel(&sender, random.random_ratio(1, 15));
            let admitted = match ended {
                Ok(verified) => target.admit(&verified, room, &mut channel),
                Err(error) => {
                    world.target.fed.manager.give_back(room).unwrap();
                    Err(error)
                }
            };
            match admitted {
                Ok(id) => {
                    outcome.admitted += 1;
                    let (_, bytes) = world.target.export(id);
                    outcome.wrong += u32::from(bytes != sample.payload || taken_back);
                    world.target.fed.manager.release(id).unwrap();
                }
                Err(error) => *outcome.errors.entry(name(&error)).or_default() += 1,
            }
            sender.borrow_mut().take_back(source.lease);
        }
    }
    make(Mistake::Nothing);
    assert!(receiver.clear_quarantine().unwrap(), "what failed is freed with the transport");
    let ledger = world.target.fed.manager.ledger();
    assert_eq!((ledger.free_blocks(), ledger.live_requests()), (BLOCKS, 0), "all came back");
    assert_eq!((receiver.taken_bytes(), sender.borrow().offers()), (0, 0));
    plan.advance(&fabric, now + Duration::from_secs(10));
    outcome.stats = receiver.stats();
    (outcome.outside, outcome.late) = (plan.outside.get(), plan.late.get());
    outcome
}

/// All faults, and nothing wrong. Each of them was met.
pub fn nothing_wrong_is_admitted() {
    for seed in 0..3 {
        let outcome = run(Mistake::Nothing, 400, seed);
        assert_eq!((outcome.wrong, outcome.outside), (0, 0), "{outcome:?}");
        assert!(outcome.admitted > 50 && outcome.late > 20, "{outcome:?}");
        for name in ["image", "transport", "deadline", "not held", "unreachable"] {
            assert!(outcome.errors.contains_key(name), "no {name}: {outcome:?}");
        }
        let stats = outcome.stats;
        assert!(stats.ended_late > 5 && stats.fences > 0 && stats.damaged > 20, "{stats:?}");
    }
}

pub fn without_digests_wrong_bytes_are_admitted() {
    assert!(run(Mistake::DigestIgnored, 100, 1).wrong > 0);
}

pub fn without_asking_again_what_was_taken_back_is_admitted() {
    assert!(run(Mistake::EpochIgnored, 200, 1).wrong > 0);
}

pub fn without_quarantine_memory_is_written_that_is_free() {
    assert!(run(Mistake::NoQuarantine, 100, 1).outside > 0);
}
