//! Requests of a thousand lengths, between two processes: each goes on where it came as it would have where it was computed.

use std::time::Instant;

use dsv4_kv_tests::fed::{Padding, Part};
use dsv4_kv_transfer::Target;
use libtest_mimic::Failed;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::peer::{Peer, receiver, wait};
use super::walk::Walk;
use super::world::{Site, World, admit, deadlines, emulated, settings};

/// Tokens to a block, whose phases are all met.
const PHASES: usize = 128;

/// So many lengths of up to three blocks, sorted: phases in turn, each in a random block.
fn lengths(count: usize, random: &mut StdRng) -> Vec<usize> {
    let at = |index| 1 + index % PHASES + PHASES * random.random_range(0..3_usize);
    let mut lengths: Vec<_> = (0..count).map(at).collect();
    lengths.sort_unstable();
    lengths
}

/// After decoding 1 to 4 tokens each has every byte of one that never moved.
pub fn a_thousand_lengths() -> Result<(), Failed> {
    let (mut world, mut peer, mut receiver) = (World::new(), Peer::cache(), receiver(deadlines()));
    let mut alone = Site::new(&emulated(), settings(0, 1, 4));
    let (start, mut random, mut phases) = (Instant::now(), StdRng::seed_from_u64(5), [0; PHASES]);
    for more in 1..=4 {
        let mut walk = Walk::default();
        for length in lengths(250, &mut random) {
            receiver.begin(start.elapsed(), &peer.walk(length), &world.expected())?;
            let verified = wait(&mut receiver, start)?;
            let Site { fed, port } = &mut world.target;
            let (room, stream) = (fed.manager.reserve(verified.manifest().at)?, fed.stream.clone());
            let mut target = Target { cache: &mut fed.manager, stream: &stream, port };
            let id = admit(&mut target, &verified, room, &mut peer)?;
            fed.step(&[Part::new(id, &world.story, length..length + more)], Padding::None);
            let came = world.target.export(id);
            let never_moved = walk.to(&mut alone, &world.story, length + more);
            assert!(came == alone.export(never_moved), "{length} tokens, and {more}");
            world.target.fed.manager.release(id)?;
            phases[length % PHASES] += 1;
        }
        alone.fed.manager.release(walk.id.take().unwrap())?;
    }
    assert!(phases.iter().all(|&met| met > 0), "{phases:?}");
    assert_eq!((receiver.stats().verified, receiver.taken_bytes()), (1000, 0));
    Ok(())
}
