//! Races on global memory against the rule itself: random programs, and sets of the accesses that each thread knows.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, PoisonError};

use simt::atomic::{DeviceAtomicU32, fence_device};
use simt::emu::{FaultKind, Launch, launch};
use simt::mem::GlobalMut;
use simt::thread::{block_idx_x, sync_threads, thread_idx_x};
use simt::warp::sync_warp;

use crate::device::Tensor;

const BLOCKS: u32 = 3;
/// Threads of a block that do something: two lanes of a warp, and one of another.
const ACTIVE: [u32; 3] = [0, 1, 32];
const ROUNDS: usize = 4;
/// Words of memory, one of each active thread, and counters behind them.
const WORDS: u32 = 3 * BLOCKS;
const COUNTERS: u32 = 2;

#[derive(Clone, Copy, Debug)]
enum Step {
    Read(u32),
    Write(u32),
    /// An atomic that orders, on a counter; the next one does not.
    InOrder(u32),
    Relaxed(u32),
    Fence,
}

/// How a round ends, for all threads of a block.
#[derive(Clone, Copy, Debug)]
enum End {
    Nothing,
    Warp,
    Block,
}

/// A small generator (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, n: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((mixed ^ (mixed >> 31)) % u64::from(n)) as u32
    }

    fn step(&mut self, own: u32) -> Step {
        // Most accesses are to a thread's own word, so that many programs do not race.
        match self.below(24) {
            0 | 1 => Step::Read(self.below(WORDS)),
            2 if self.below(3) == 0 => Step::Write(self.below(WORDS)),
            2..=6 => Step::Write(own),
            7..=13 => Step::InOrder(self.below(COUNTERS)),
            14..=17 => Step::Relaxed(self.below(COUNTERS)),
            _ => Step::Fence,
        }
    }
}

/// What each active thread does in a round, by block and round, and how the round ends.
type Program = Vec<Vec<([Vec<Step>; 3], End)>>;

fn program(seed: u64) -> Program {
    let mut random = Random(seed);
    let mut round = |block| {
        let steps = [0, 1, 2]
            .map(|thread| (0..random.below(3)).map(|_| random.step(3 * block + thread)).collect());
        (steps, [End::Nothing, End::Warp, End::Block][random.below(3) as usize])
    };
    (0..BLOCKS).map(|block| (0..ROUNDS).map(|_| round(block)).collect()).collect()
}

/// What an active thread of a block does: a step, or it comes to the end of a round.
#[derive(Clone, Copy, Debug)]
enum Event {
    Step(Step),
    End(End),
}

/// What happened, in its order: block, active thread, and event.
type Trace = Vec<(usize, usize, Event)>;

/// Runs a program; what it did, and its fault.
fn run(program: &Program, seed: u64) -> (Trace, Option<(u32, FaultKind)>) {
    let tensor = Tensor::zeros((WORDS + COUNTERS) as usize);
    let (words, trace) = (tensor.output::<u32>(), Mutex::new(Trace::new()));
    let lock = || trace.lock().unwrap_or_else(PoisonError::into_inner);
    let body = || {
        let (block, thread) = (block_idx_x() as usize, thread_idx_x());
        let active = ACTIVE.iter().position(|&active| active == thread);
        for (steps, end) in &program[block] {
            if let Some(active) = active {
                for &step in &steps[active] {
                    // Held over the step, so that the trace has the order of the run.
                    let mut trace = lock();
                    trace.push((block, active, Event::Step(step)));
                    perform(words, step);
                }
                lock().push((block, active, Event::End(*end)));
            }
            // SAFETY: all threads of the block come here, by the same rounds.
            unsafe {
                match end {
                    End::Nothing => {}
                    End::Warp => sync_warp(),
                    End::Block => sync_threads(),
                }
            }
        }
    };
    let shape = Launch { kernel: "model", grid: (BLOCKS, 1), block: 64, shared_bytes: 0, seed };
    let fault = launch(&shape, body).err().map(|fault| (fault.block.unwrap().0, *fault.kind));
    (trace.into_inner().unwrap_or_else(PoisonError::into_inner), fault)
}

fn perform(words: GlobalMut<u32>, step: Step) {
    // SAFETY: elements in bounds; races are what the test is about.
    unsafe {
        let counter = |at| DeviceAtomicU32::new(words, u64::from(WORDS + at));
        match step {
            Step::Read(at) => _ = words.load(at.into()),
            Step::Write(at) => words.store(at.into(), 1),
            Step::InOrder(at) => _ = counter(at).add_acq_rel(1),
            Step::Relaxed(at) => _ = counter(at).add(1),
            Step::Fence => fence_device(),
        }
    }
}

/// Numbers of accesses.
type Accesses = HashSet<usize>;

/// A block, a round, and a warp if it is the warp's.
type Barrier = (usize, usize, Option<u32>);

/// What a thread knows.
#[derive(Clone, Default)]
struct Knowledge {
    /// The accesses that are ordered before what it does next, its own among them.
    known: Accesses,
    /// What was known at its last fence, and what its relaxed atomics have seen since then.
    fenced: Accesses,
    seen: Accesses,
    /// The barrier that it has come to and not yet left.
    at: Option<Barrier>,
    rounds: usize,
}

#[derive(Default)]
struct Model {
    threads: Vec<[Knowledge; 3]>,
    /// Word, thread and whether it writes, of each access.
    accesses: Vec<(u32, (usize, usize), bool)>,
    counters: Vec<Accesses>,
    /// What those knew who have come to a barrier.
    barriers: HashMap<Barrier, Accesses>,
}

impl Model {
    /// Takes an event in; whether it races.
    fn race(&mut self, block: usize, thread: usize, event: Event) -> bool {
        let Self { threads, accesses, counters, barriers } = self;
        let me = &mut threads[block][thread];
        // All others have come there by now.
        if let Some(barrier) = me.at.take() {
            me.known.extend(&barriers[&barrier]);
        }
        match event {
            Event::End(End::Nothing) => me.rounds += 1,
            Event::End(end) => {
                let warp = ACTIVE[thread] / 32;
                let key = (block, me.rounds, matches!(end, End::Warp).then_some(warp));
                barriers.entry(key).or_default().extend(&me.known);
                me.at = Some(key);
                me.rounds += 1;
            }
            Event::Step(step) => match step {
                Step::Fence => {
                    me.known.extend(me.seen.drain());
                    me.fenced = me.known.clone();
                }
                Step::InOrder(at) => {
                    me.known.extend(&counters[at as usize]);
                    counters[at as usize].extend(&me.known);
                }
                Step::Relaxed(at) => {
                    me.seen.extend(&counters[at as usize]);
                    counters[at as usize].extend(&me.fenced);
                }
                Step::Read(word) | Step::Write(word) => {
                    let writes = matches!(step, Step::Write(_));
                    let racing = |(i, &(other, _, wrote)): (usize, &(u32, _, bool))| {
                        other == word && (writes || wrote) && !me.known.contains(&i)
                    };
                    if accesses.iter().enumerate().any(racing) {
                        return true;
                    }
                    me.known.insert(accesses.len());
                    accesses.push((word, (block, thread), writes));
                }
            },
        }
        false
    }
}

/// Random programs: the emulator's first fault of a block is at the access where the rule says that there is a race, and there
/// is none where there is no race.
#[test]
fn random_programs_race_where_the_rule_says() {
    let (mut clean, mut racing) = (0, 0);
    for seed in 0..3000 {
        let program = program(seed);
        let (trace, fault) = run(&program, seed);
        let mut model = Model {
            threads: vec![<[Knowledge; 3]>::default(); BLOCKS as usize],
            counters: vec![Accesses::new(); COUNTERS as usize],
            ..Model::default()
        };
        let mut ended = [false; BLOCKS as usize];
        for (i, &(block, thread, event)) in trace.iter().enumerate() {
            assert!(!ended[block], "seed {seed}: block {block} goes on after a race: {trace:?}");
            ended[block] = model.race(block, thread, event);
            if ended[block] {
                assert!(fault.is_some(), "seed {seed}: event {i} races, and no fault: {trace:?}");
            }
        }
        match fault {
            None => clean += 1,
            Some((block, kind)) => {
                assert!(matches!(kind, FaultKind::GlobalRace { .. }), "seed {seed}: {kind}");
                assert!(ended[block as usize], "seed {seed}: no race, but {kind}: {trace:?}");
                racing += 1;
            }
        }
    }
    assert!(clean > 300 && racing > 300, "{clean} programs without a race, {racing} with one");
}
