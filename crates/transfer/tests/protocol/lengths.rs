//! Requests of many lengths, between two processes: each continues at the target exactly as it would have at the
//! source.

use std::time::Instant;

use dsv4_kv_tests::fed::{Padding, Part};
use dsv4_kv_transfer::transport::Nixl;
use dsv4_kv_transfer::{Receiver, Target};
use libtest_mimic::Failed;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::peer::{Peer, receiver, wait};
use super::walk::Walk;
use super::world::{Schema, Site, World, admit, deadlines, emulated};

/// Tokens of a block; every position within a block occurs.
const PHASES: usize = 128;
/// The environment variable for the seed of the lengths.
const SEED: &str = "DSV4_LENGTHS_SEED";

/// The other process, the target here, and a cache whose requests never move.
struct Lengths {
    world: World,
    peer: Peer,
    receiver: Receiver<Nixl>,
    alone: Site,
    start: Instant,
    random: StdRng,
    phases: [u32; PHASES],
}

impl Lengths {
    fn new(schema: Schema, peer: Peer) -> Result<Self, Failed> {
        let world = World::of(schema, &emulated(), &emulated());
        let alone = Site::new(&emulated(), schema.settings(0, 1, 4));
        let (receiver, start, phases) = (receiver(deadlines()), Instant::now(), [0; PHASES]);
        let seed = std::env::var(SEED).map_or(Ok(5), |seed| seed.parse())?;
        eprintln!("lengths of seed {seed}; {SEED} names another");
        let random = StdRng::seed_from_u64(seed);
        Ok(Self { world, peer, receiver, alone, start, random, phases })
    }

    /// `count` lengths of up to three blocks, sorted: each phase in turn, each in a random block.
    fn pick(&mut self, count: usize) -> Vec<usize> {
        let at = |index| 1 + index % PHASES + PHASES * self.random.random_range(0..3_usize);
        let mut lengths: Vec<_> = (0..count).map(at).collect();
        lengths.sort_unstable();
        lengths
    }

    /// Moves a request of `length` tokens, which then continues by `more` tokens, and compares every byte with a
    /// request that never moved.
    fn comes(&mut self, walk: &mut Walk, (length, more): (usize, usize)) -> Result<(), Failed> {
        let Self { world, peer, receiver, alone, start, .. } = self;
        receiver.begin(start.elapsed(), &peer.walk(length), &world.expected())?;
        let verified = wait(receiver, *start)?;
        let Site { fed, staging } = &mut world.target;
        let (reserved, stream) = (fed.manager.reserve(verified.manifest().at)?, fed.stream.clone());
        let mut target = Target {
            cache: &mut fed.manager,
            stream: &stream,
            staging,
            weights: crate::world::weights(),
        };
        let id = admit(&mut target, &verified, reserved, peer)?;
        for at in length..length + more {
            fed.step(&[Part::new(id, &world.story, at..at + 1)], Padding::None);
        }
        let came = world.target.export(id);
        let never_moved = walk.to(alone, &world.story, length + more);
        assert!(came == alone.export(never_moved), "{length} tokens, and {more}");
        world.target.fed.manager.release(id)?;
        self.phases[length % PHASES] += 1;
        Ok(())
    }

    /// Moves requests of `count` lengths, each of which continues by `more` tokens.
    fn come(&mut self, count: usize, more: usize) -> Result<(), Failed> {
        let mut walk = Walk::default();
        for length in self.pick(count) {
            self.comes(&mut walk, (length, more))?;
        }
        self.alone.fed.manager.release(walk.id.take().unwrap())?;
        Ok(())
    }

    /// Checks that `count` requests of every phase have arrived, and that no memory is left of them.
    fn end(self, count: u64) {
        assert!(self.phases.iter().all(|&met| met > 0), "{:?}", self.phases);
        assert_eq!((self.receiver.stats().verified, self.receiver.taken_bytes()), (count, 0));
    }
}

/// After decoding 1 to 4 tokens, each request has every byte of a request that never moved.
pub fn a_thousand_lengths() -> Result<(), Failed> {
    let mut lengths = Lengths::new(Schema::Tiny, Peer::cache())?;
    for more in 1..=4 {
        lengths.come(250, more)?;
    }
    lengths.end(1000);
    Ok(())
}

/// The same with all layers of V4-Flash: a length of each phase, and two tokens decoded.
pub fn lengths_of_flash() -> Result<(), Failed> {
    let mut lengths = Lengths::new(Schema::Flash, Peer::flash())?;
    lengths.come(PHASES, 2)?;
    lengths.end(PHASES as u64);
    Ok(())
}
