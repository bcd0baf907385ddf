//! The stacks of fibers, which are lent to clusters. The memory mappings that the process may have limit their number.
//!
//! A stack takes two mappings: one that is written, and a guard page. A cluster needs the stacks of all its threads at
//! once. It borrows all of them before it starts, and waits while too few are free. Once it runs it waits for no other
//! cluster. So every cluster ends and returns its stacks, and there is no deadlock.

use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::{fs, io};

use corosensei::stack::DefaultStack;

use super::fault::FaultKind;

/// Bytes of a stack, without its guard page. That is enough, because kernel bodies hold registers, not buffers.
const STACK_BYTES: usize = 64 * 1024;

/// Limit of memory mappings of a process, where the system reports none: the default of Linux.
const MAPPINGS: u64 = 65_530;

/// Most stacks of a process that may have `mappings` mappings. A tenth of these is left for all other mappings, of
/// which there are a few hundred.
fn stacks_for(mappings: u64) -> u32 {
    u32::try_from(mappings / 10 * 9 / 2).unwrap_or(u32::MAX)
}

/// The least limit of mappings that allows `stacks` stacks.
fn mappings_for(stacks: u32) -> u64 {
    (u64::from(stacks) * 2).div_ceil(9) * 10
}

/// Stacks that clusters share.
pub struct Stacks {
    /// Most stacks that may exist.
    most: u32,
    allocate: fn() -> io::Result<DefaultStack>,
    state: Mutex<State>,
    changed: Condvar,
}

/// Lent and kept stacks, together no more than `most`: a loan takes the kept ones first.
#[derive(Default)]
struct State {
    kept: Vec<DefaultStack>,
    /// Number of stacks that are lent, allocated or not.
    lent: u32,
    /// Number of loans that were requested and granted. They are granted in the order of the requests, so that a large
    /// loan does not starve.
    asked: u64,
    granted: u64,
}

impl Stacks {
    /// The stacks of this process.
    pub fn of_process() -> &'static Self {
        static STACKS: LazyLock<Stacks> = LazyLock::new(|| {
            let told = fs::read_to_string("/proc/sys/vm/max_map_count");
            let mappings = told.ok().and_then(|told| told.trim().parse().ok());
            let most = stacks_for(mappings.unwrap_or(MAPPINGS));
            Stacks::new(most, || DefaultStack::new(STACK_BYTES))
        });
        &STACKS
    }

    fn new(most: u32, allocate: fn() -> io::Result<DefaultStack>) -> Self {
        Self { most, allocate, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Lends `count` stacks; waits until that many are free and it is the caller's turn.
    ///
    /// # Errors
    /// [`FaultKind::TooManyThreads`], if there may never be that many.
    pub fn lend(&self, count: u32) -> Result<Loan<'_>, FaultKind> {
        if count > self.most {
            let (most, mappings) = (self.most, mappings_for(count));
            return Err(FaultKind::TooManyThreads { threads: count, most, mappings });
        }
        let mut state = self.lock();
        let turn = state.asked;
        state.asked += 1;
        while state.granted < turn || self.most - state.lent < count {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.granted += 1;
        state.lent += count;
        let rest = state.kept.len().saturating_sub(count as usize);
        let stacks = state.kept.split_off(rest);
        self.unlock(state);
        Ok(Loan { of: self, count, stacks })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Ignores lock poisoning: no panic under the lock can leave the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends a change of the state, and wakes those that wait for a loan.
    fn unlock(&self, state: MutexGuard<'_, State>) {
        let someone_waits = state.asked > state.granted;
        drop(state);
        if someone_waits {
            self.changed.notify_all();
        }
    }
}

/// A loan of `count` stacks. It ends when it is dropped.
pub struct Loan<'a> {
    of: &'a Stacks,
    count: u32,
    /// The allocated stacks of the loan that no fiber uses.
    stacks: Vec<DefaultStack>,
}

impl Loan<'_> {
    /// A stack for a fiber.
    ///
    /// # Errors
    /// [`FaultKind::NoStack`], if the system has no memory for it.
    pub fn take(&mut self) -> Result<DefaultStack, FaultKind> {
        let stack = self.stacks.pop().map_or_else(self.of.allocate, Ok);
        stack.map_err(|error| FaultKind::NoStack { reason: error.kind() })
    }

    /// Takes back the stack of a fiber that has ended.
    pub fn put(&mut self, stack: DefaultStack) {
        self.stacks.push(stack);
    }
}

impl Drop for Loan<'_> {
    fn drop(&mut self) {
        let mut state = self.of.lock();
        state.lent -= self.count;
        state.kept.append(&mut self.stacks);
        self.of.unlock(state);
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::thread;
    use std::time::Duration;

    use super::super::dispatch::dispatch;
    use super::super::launch::Launch;
    use super::*;
    use crate::limits::{MAX_BLOCK_THREADS, MAX_CLUSTER_BLOCKS};
    use crate::thread::sync_threads;

    /// Blocks of 64 threads, one after the other on the calling thread or in parallel.
    const fn blocks(count: u32) -> Launch {
        Launch { kernel: "test", grid: (count, 1), block: 64, shared_bytes: 0, seed: 0 }
    }

    fn stack() -> io::Result<DefaultStack> {
        DefaultStack::new(STACK_BYTES)
    }

    fn meet() {
        // SAFETY: all threads come.
        unsafe { sync_threads() };
    }

    impl Stacks {
        /// The numbers of lent and of kept stacks.
        fn counts(&self) -> (u32, usize) {
            let state = self.lock();
            (state.lent, state.kept.len())
        }
    }

    #[test]
    fn blocks_share_the_stacks_that_there_may_be() {
        let stacks = Stacks::new(100, stack);
        for _ in 0..20 {
            dispatch(&stacks, &blocks(40), 1, &meet).expect("no rule is broken");
            assert_eq!(stacks.counts(), (0, 64));
        }
    }

    #[test]
    fn loans_of_all_sizes_end_and_never_exceed_what_there_may_be() {
        let (stacks, held) = (Stacks::new(100, stack), AtomicU32::new(0));
        thread::scope(|scope| {
            for size in [1, 10, 33, 50, 99, 100] {
                let (stacks, held) = (&stacks, &held);
                scope.spawn(move || {
                    for round in 0..200 {
                        let mut loan = stacks.lend(size).expect("so many there may be");
                        let before = held.fetch_add(size, Ordering::Relaxed);
                        assert!(before + size <= 100, "{before} beside {size}");
                        let used = Vec::from_iter((0..round % (size + 1)).map(|_| loan.take()));
                        thread::yield_now();
                        let (lent, kept) = stacks.counts();
                        assert!(lent + kept as u32 <= 100, "{lent} and {kept}");
                        held.fetch_sub(size, Ordering::Relaxed);
                        used.into_iter().for_each(|stack| loan.put(stack.expect("memory")));
                    }
                });
            }
        });
        assert_eq!(stacks.counts().0, 0);
    }

    #[test]
    fn a_large_loan_is_not_overtaken() {
        let stacks = Stacks::new(10, stack);
        thread::scope(|scope| {
            let first = stacks.lend(1).expect("so many there may be");
            let large = scope.spawn(|| drop(stacks.lend(10).expect("so many there may be")));
            while stacks.lock().asked < 2 {
                thread::sleep(Duration::from_millis(1));
            }
            // Nine stacks are free, but it is the turn of the large loan.
            let small = scope.spawn(|| drop(stacks.lend(1).expect("so many there may be")));
            while stacks.lock().asked < 3 {
                thread::sleep(Duration::from_millis(1));
            }
            thread::sleep(Duration::from_millis(20));
            assert_eq!((stacks.lock().granted, small.is_finished()), (1, false));
            drop(first);
            large.join().expect("it has had its turn");
        });
    }

    #[test]
    fn a_cluster_of_more_threads_than_stacks_is_a_fault() {
        let stacks = Stacks::new(127, stack);
        dispatch(&stacks, &blocks(2), 1, &meet).expect("a block at a time");
        let fault = dispatch(&stacks, &blocks(2), 2, &meet).expect_err("two blocks at once");
        assert_eq!(fault.block, Some((0, 0)));
        let kind = FaultKind::TooManyThreads { threads: 128, most: 127, mappings: 290 };
        assert_eq!(*fault.kind, kind);
        assert_eq!(stacks.counts(), (0, 64));
    }

    #[test]
    fn the_mappings_that_a_fault_names_are_enough_and_no_fewer_are() {
        for stacks in 1..=MAX_BLOCK_THREADS * MAX_CLUSTER_BLOCKS {
            let mappings = mappings_for(stacks);
            assert!(stacks_for(mappings) >= stacks && stacks_for(mappings - 1) < stacks);
        }
        assert!(stacks_for(MAPPINGS) >= 7 * 4096);
    }

    /// A body whose threads wait at a barrier. `alive` counts the threads that have started and not ended.
    fn wait_counted(alive: &AtomicU32) {
        struct Alive<'a>(&'a AtomicU32);
        impl Drop for Alive<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::Relaxed);
            }
        }
        alive.fetch_add(1, Ordering::Relaxed);
        let _alive = Alive(alive);
        meet();
    }

    #[test]
    fn no_memory_for_a_stack_is_a_fault() {
        static LEFT: AtomicU32 = AtomicU32::new(0);
        let stacks = Stacks::new(1000, || {
            let less = |left: u32| left.checked_sub(1);
            let left = LEFT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
            left.map_err(|_| io::ErrorKind::OutOfMemory.into()).and_then(|_| stack())
        });
        let alive = AtomicU32::new(0);
        let run = |count| dispatch(&stacks, &blocks(count), 1, &|| wait_counted(&alive));
        for (count, left) in [(1, 0), (1, 50), (9, 63)] {
            LEFT.store(left, Ordering::Relaxed);
            let fault = run(count).expect_err("a stack too few");
            assert_eq!(*fault.kind, FaultKind::NoStack { reason: io::ErrorKind::OutOfMemory });
            assert_eq!((alive.load(Ordering::Relaxed), stacks.counts().0), (0, 0));
        }
        LEFT.store(1000, Ordering::Relaxed);
        run(9).expect("there is memory again");
    }

    #[test]
    fn a_panic_of_the_emulator_leaves_no_fiber_and_no_loan() {
        static LEFT: AtomicU32 = AtomicU32::new(50);
        let stacks = Stacks::new(1000, || {
            let left = LEFT.fetch_sub(1, Ordering::Relaxed);
            assert!(left > 0, "a mistake of the emulator, made on purpose");
            stack()
        });
        let alive = AtomicU32::new(0);
        for count in [1, 9] {
            LEFT.store(50, Ordering::Relaxed);
            let run = || dispatch(&stacks, &blocks(count), 1, &|| wait_counted(&alive));
            let payload = catch_unwind(AssertUnwindSafe(run)).expect_err("a panic");
            let text = payload.downcast_ref::<&str>().expect("a text");
            assert_eq!(*text, "a mistake of the emulator, made on purpose");
            assert_eq!((alive.load(Ordering::Relaxed), stacks.counts().0), (0, 0));
        }
    }
}
