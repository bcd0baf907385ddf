//! [`crate::atomic`] on the CPU. Blocks run on several OS threads, so device atomics are atomics of the host.
//! The threads of a block share one OS thread, so block atomics are plain reads and writes.

use std::panic::Location;

// Under `--cfg loom` the atomics of the model checker, for the test at the end.
#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering, fence};

use super::block::{Block, Ordered, current, try_current};
use super::fault::{AccessKind, Site};
use super::global_memory::{Effect, Place};
use super::mem::Pointer;
use super::shared::{read, write};

/// A word of global memory, whose bounds and alignment were checked when this was made.
#[derive(Clone, Copy, Debug)]
pub struct GlobalWord {
    word: *mut u32,
    /// Its place in memory, and where in the source this was made; `None` if the word is not checked for races.
    place: Option<(Place, Site)>,
}

// SAFETY: the word is device memory and only accessed atomically.
unsafe impl Send for GlobalWord {}
// SAFETY: as for `Send`.
unsafe impl Sync for GlobalWord {}

impl GlobalWord {
    fn get(&self) -> &AtomicU32 {
        // SAFETY: `global_word` found it in bounds of a live allocation and aligned, and views that
        // write access memory atomically. The model checker's words are made by its test alone.
        unsafe { &*self.word.cast() }
    }

    /// Performs `operate`, an atomic of the running thread, which returns a result and its effect on the word. Records
    /// the access, with its release and acquire; returns the result.
    fn operate<R>(self, ordered: Ordered, operate: impl FnOnce(&AtomicU32) -> (R, Effect)) -> R {
        let Some(at) = self.place else { return operate(self.get()).0 };
        current(|block| {
            let releases = block.released(ordered);
            let done = block.observe(|thread, memory| {
                memory.atomic(thread, at, &releases, || operate(self.get()))
            });
            let (result, seen) = done.unwrap_or_else(|fault| block.fail(fault));
            block.acquire(ordered, &seen);
            result
        })
    }

    /// A relaxed modification, which returns the old value.
    fn modify(self, modify: impl FnOnce(&AtomicU32) -> u32) -> u32 {
        self.operate(Ordered::Relaxed, |word| (modify(word), Effect::Modify))
    }
}

#[track_caller]
pub unsafe fn global_word(memory: Pointer<u32>, index: u64) -> GlobalWord {
    let word = memory.at(index, 4);
    let location = Location::caller();
    GlobalWord { word, place: memory.watched(index, 4).map(|place| (place, location)) }
}

pub fn global_add(word: GlobalWord, value: u32) -> u32 {
    word.modify(|word| word.fetch_add(value, Ordering::Relaxed))
}

pub fn global_add_acq_rel(word: GlobalWord, value: u32) -> u32 {
    let add = |word: &AtomicU32| word.fetch_add(value, Ordering::AcqRel);
    word.operate(Ordered::AcquireRelease, |word| (add(word), Effect::Modify))
}

pub fn global_max(word: GlobalWord, value: u32) -> u32 {
    word.modify(|word| word.fetch_max(value, Ordering::Relaxed))
}

pub fn global_exchange(word: GlobalWord, value: u32) -> u32 {
    word.modify(|word| word.swap(value, Ordering::Relaxed))
}

pub fn global_compare_exchange(word: GlobalWord, expected: u32, new: u32) -> u32 {
    let (success, failure) = (Ordering::Relaxed, Ordering::Relaxed);
    word.operate(Ordered::Relaxed, |word| {
        match word.compare_exchange(expected, new, success, failure) {
            Ok(old) => (old, Effect::Modify),
            Err(old) => (old, Effect::Load),
        }
    })
}

pub fn global_load(word: GlobalWord) -> u32 {
    word.operate(Ordered::Relaxed, |word| (word.load(Ordering::Relaxed), Effect::Load))
}

pub fn global_store(word: GlobalWord, value: u32) {
    word.operate(Ordered::Relaxed, |word| {
        word.store(value, Ordering::Relaxed);
        ((), Effect::Store)
    });
}

/// Replaces the word by `change` of its value; returns the old value.
#[track_caller]
fn modify(address: u32, change: impl FnOnce(u32) -> u32) -> u32 {
    let location = Location::caller();
    let [old] = read(address, AccessKind::Atomic, location);
    write(address, [change(old)], AccessKind::Atomic, location);
    old
}

#[track_caller]
pub fn shared_add(address: u32, value: u32) -> u32 {
    modify(address, |old| old.wrapping_add(value))
}

#[track_caller]
pub fn shared_max(address: u32, value: u32) -> u32 {
    modify(address, |old| old.max(value))
}

#[track_caller]
pub fn shared_exchange(address: u32, value: u32) -> u32 {
    modify(address, |_| value)
}

#[track_caller]
pub fn shared_compare_exchange(address: u32, expected: u32, new: u32) -> u32 {
    modify(address, |old| if old == expected { new } else { old })
}

#[track_caller]
pub fn shared_load(address: u32) -> u32 {
    let [word] = read(address, AccessKind::Atomic, Location::caller());
    word
}

#[track_caller]
pub fn shared_store(address: u32, value: u32) {
    write(address, [value], AccessKind::Atomic, Location::caller());
}

pub fn fence_block() {
    // One OS thread runs the whole block, so no host fence is needed. Race detection does not model this fence.
}

pub fn fence_device() {
    fence(Ordering::AcqRel);
    try_current(Block::fence);
}

pub fn fence_system() {
    fence(Ordering::SeqCst);
    try_current(Block::fence);
}

/// `RUSTFLAGS="--cfg loom" cargo test --release -p simt --lib -- loom` checks every
/// interleaving of two blocks.
#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// Global memory: the results of two blocks, and a counter.
    #[derive(Default)]
    struct Words([AtomicU32; 3]);

    impl Words {
        fn at(&self, index: usize) -> GlobalWord {
            GlobalWord { word: (&raw const self.0[index]).cast_mut().cast(), place: None }
        }

        /// A block of a reduction across blocks: it stores its own result, arrives at a counter, and, if it
        /// is the last, reads all results.
        fn reduce(&self, block: usize) -> Option<u32> {
            global_store(self.at(block), 1 << block);
            fence_device();
            (global_add(self.at(2), 1) == 1).then(|| {
                fence_device();
                self.sum()
            })
        }

        fn sum(&self) -> u32 {
            global_load(self.at(0)) + global_load(self.at(1))
        }
    }

    /// One of two blocks is the last, and it sees the other's result.
    #[test]
    fn the_last_block_sees_the_result_of_the_other() {
        loom::model(|| {
            let words = Arc::new(Words::default());
            let other = Arc::clone(&words);
            let other = thread::spawn(move || other.reduce(1));
            let here = words.reduce(0);
            assert_eq!(here.xor(other.join().unwrap()), Some(3));
        });
    }
}
