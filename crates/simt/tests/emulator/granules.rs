//! Races on shared memory by accesses of one, two and four words, compared with the rule: two accesses of different threads to the
//! same word race if at least one is a write and no barrier lies between.

use simt::emu::{FaultKind, Launch, launch};
use simt::shared::Shared;
use simt::thread::{sync_threads, thread_idx_x};

use crate::device::block_of;
use crate::random::Random;

/// Threads that access memory: two lanes of one warp, and one of another.
const ACTIVE: [u32; 3] = [0, 1, 32];
/// Words of memory: two granules of 16 bytes.
const WORDS: u32 = 8;
const EPOCHS: usize = 4;

/// An access to `words` words from `first` on.
#[derive(Clone, Copy, Debug)]
struct Access {
    epoch: usize,
    thread: u32,
    first: u32,
    words: u32,
    writes: bool,
}

fn memory() -> Shared<u32, { WORDS as usize }> {
    // SAFETY: every block here has 1 KiB.
    unsafe { Shared::at(0) }
}

impl Access {
    fn random(random: &mut Random, epoch: usize) -> Self {
        let words = [1, 2, 4, 4][random.below(4) as usize];
        Self {
            epoch,
            thread: ACTIVE[random.below(3) as usize],
            first: random.below(WORDS / words) * words,
            words,
            writes: random.below(2) == 0,
        }
    }

    fn covers(&self, word: u32) -> bool {
        (self.first..self.first + self.words).contains(&word)
    }

    fn races(&self, other: &Self) -> bool {
        self.epoch == other.epoch
            && self.thread != other.thread
            && (self.writes || other.writes)
            && (0..WORDS).any(|word| self.covers(word) && other.covers(word))
    }

    /// Makes the access.
    ///
    /// # Safety
    /// - Broken on purpose by programs that race.
    unsafe fn make(&self) {
        let (memory, first) = (memory(), self.first);
        // SAFETY: in bounds and aligned; by the caller's promise.
        unsafe {
            match (self.words, self.writes) {
                (1, true) => memory.store(first, 7),
                (2, true) => memory.store_u32x2(first, [7; 2]),
                (_, true) => memory.store_u32x4(first, [7; 4]),
                (1, false) => _ = memory.load(first),
                (2, false) => _ = memory.load_u32x2(first),
                (_, false) => _ = memory.load_u32x4(first),
            }
        }
    }
}

/// Runs a program after a write of all words, and returns its fault, if any.
fn run(program: &[Access], seed: u64) -> Option<FaultKind> {
    let body = || {
        let thread = thread_idx_x();
        // SAFETY: all threads reach each barrier; accesses race on purpose in programs that race.
        unsafe {
            if thread == 0 {
                (0..WORDS).step_by(4).for_each(|first| memory().store_u32x4(first, [0; 4]));
            }
            for epoch in 0..EPOCHS {
                sync_threads();
                let own = |access: &&Access| access.epoch == epoch && access.thread == thread;
                program.iter().filter(own).for_each(|access| access.make());
            }
        }
    };
    launch(&Launch { seed, ..block_of(64) }, body).map_err(|fault| *fault.kind).err()
}

#[test]
fn random_accesses_of_all_sizes_race_where_the_rule_says() {
    let (mut raced, mut ended) = (0, 0);
    for seed in 0..4_000 {
        let mut random = Random(seed);
        let accesses = 2 + random.below(8) as usize;
        let program: Vec<Access> = (0..accesses)
            .map(|_| {
                let epoch = random.below(EPOCHS as u32) as usize;
                Access::random(&mut random, epoch)
            })
            .collect();
        let pairs = program.iter().enumerate();
        let races = pairs.clone().any(|(i, a)| program[..i].iter().any(|b| a.races(b)));
        let found = run(&program, seed);
        match &found {
            None => ended += 1,
            Some(FaultKind::SharedRace { offset, .. }) => {
                raced += 1;
                // The fault names a word that two racing accesses have.
                let named = |a: &Access| a.covers(offset / 4);
                let is_right = |(i, a): (usize, &Access)| {
                    named(a) && program[..i].iter().any(|b| named(b) && a.races(b))
                };
                assert!(pairs.clone().any(is_right), "{seed}: {found:?} in {program:?}");
            }
            Some(other) => panic!("{seed}: {other}"),
        }
        assert_eq!(found.is_some(), races, "{seed}: {program:?}");
    }
    assert!(raced > 500 && ended > 500, "{raced}, {ended}");
}

/// Three words of a granule are written one by one. A read of all four names the missing one.
#[test]
fn a_word_of_a_granule_is_not_written() {
    for missing in 0..4 {
        let body = || {
            // SAFETY: broken on purpose: a word is not written.
            unsafe {
                if thread_idx_x() == 0 {
                    let written = (0..4).filter(|&word| word != missing);
                    written.for_each(|word| memory().store(word, 7));
                }
                sync_threads();
                let _ = memory().load_u32x4(0);
            }
        };
        let fault = launch(&block_of(32), body).expect_err("a word is not written");
        let FaultKind::PoisonedShared { offset, .. } = *fault.kind else { panic!("{fault}") };
        assert_eq!(offset, 4 * missing);
    }
}
