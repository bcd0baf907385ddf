//! Races on global memory, compared with a reference model of the rule: random programs, and for each thread the set of
//! accesses that it knows, that is, which happen before its next one.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, PoisonError};

use simt::atomic::{DeviceAtomicU32, fence_device};
use simt::emu::{FaultKind, Launch, launch};
use simt::mem::GlobalMut;
use simt::thread::{block_idx_x, sync_threads, thread_idx_x};
use simt::warp::sync_warp;

use crate::device::Tensor;
use crate::random::Random;

const BLOCKS: u32 = 3;
/// Threads of a block that do something: two lanes of a warp, and one of another.
const ACTIVE: [u32; 3] = [0, 1, 32];
const ROUNDS: usize = 4;
/// Words of memory, one for each active thread; the counters follow them.
const WORDS: u32 = 3 * BLOCKS;
const COUNTERS: u32 = 2;

#[derive(Clone, Copy, Debug)]
enum Step {
    Read(u32),
    Write(u32),
    /// An acquire-release atomic on a counter; the next variant is a relaxed one.
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

impl Random {
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

/// By block and round, the steps of each active thread, and how the round ends.
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

/// An event of an active thread of a block: a step, or its arrival at the end of a round.
#[derive(Clone, Copy, Debug)]
enum Event {
    Step(Step),
    End(End),
}

/// The events of a run in their order: block, active thread, and event.
type Trace = Vec<(usize, usize, Event)>;

/// Runs a program; returns its trace, and its fault with the block.
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
                    // The lock is held during the step, so that the trace has the order of the run.
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

/// A barrier at the end of a round: the block, the round, and the warp if it is a barrier of a warp.
type Barrier = (usize, usize, Option<u32>);

/// The knowledge of a thread.
#[derive(Clone, Default)]
struct Knowledge {
    /// The accesses that happen before what it does next, including its own.
    known: Accesses,
    /// The accesses that it knew at its last fence, and those that its relaxed atomics have seen released since then.
    fenced: Accesses,
    seen: Accesses,
    /// The barrier at which it has arrived and which it has not left yet.
    at: Option<Barrier>,
    rounds: usize,
}

#[derive(Default)]
struct Model {
    threads: Vec<[Knowledge; 3]>,
    /// Word, thread and whether it writes, of each access.
    accesses: Vec<(u32, (usize, usize), bool)>,
    counters: Vec<Accesses>,
    /// For each barrier, the accesses that the threads which have arrived at it knew.
    barriers: HashMap<Barrier, Accesses>,
}

impl Model {
    /// Adds an event; returns whether it races.
    fn race(&mut self, block: usize, thread: usize, event: Event) -> bool {
        let Self { threads, accesses, counters, barriers } = self;
        let me = &mut threads[block][thread];
        // All other threads have arrived at the barrier by now.
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

/// Random programs: the emulator reports a race exactly where the model does, at the first racing access of a block.
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
