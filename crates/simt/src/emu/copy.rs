//! [`crate::copy`] on the CPU: a copy takes place when its thread waits for it. On a GPU it may take place at any time
//! between its start and the wait, so that an access to its words in between is a fault, and so is a write to its
//! source.

use std::panic::Location;

use super::block::current;
use super::copies::{Copies, Copy};
use super::fault::FaultKind;
use super::global_memory::GlobalMemory;
use super::mem::{Access, Pointer, load_words};
use super::past::Observer;

/// Calls `use_copies` with the copies of the running thread.
fn with_copies<R>(use_copies: impl FnOnce(&mut Copies) -> R) -> R {
    current(|block| {
        use_copies(&mut block.threads[block.running.get().0 as usize].copies.borrow_mut())
    })
}

/// Records the start or the end of a copy of the running thread, and fails the thread if the source is written.
fn record(record: impl FnOnce(Observer<'_>, &GlobalMemory) -> Result<(), FaultKind>) {
    current(|block| block.observe(record).unwrap_or_else(|fault| block.fail(fault)));
}

#[track_caller]
pub unsafe fn start_if<T: Access, const WORDS: usize>(
    is_wanted: bool,
    to: u32,
    source: Pointer<T>,
    at: u64,
) {
    if !is_wanted {
        return;
    }
    let words = WORDS as u32;
    let from = source.at(at, 4 * words);
    let (source, location) = (source.watched(at, 4 * words), Location::caller());
    if let Some(place) = source {
        record(|thread, memory| memory.start_copy(thread, place, location));
    }
    let in_flight = current(|block| {
        let memory = block.shared_memory.borrow();
        let in_flight = memory.start(block.running.get(), location);
        let started = memory.start_copy(to, WORDS, in_flight);
        drop(memory);
        started.unwrap_or_else(|fault| block.fail(fault));
        in_flight
    });
    let copy = Copy { to, from, words, source, in_flight };
    with_copies(|copies| copies.start(copy));
}

pub fn commit_group() {
    with_copies(Copies::commit_group);
}

pub fn wait_for_groups<const PENDING: usize>() {
    let done = with_copies(|copies| copies.take_all_but(PENDING));
    for Copy { to, from, words, source, in_flight } in done {
        if let Some(place) = source {
            record(|thread, memory| memory.end_copy(thread, place, in_flight.location));
        }
        let mut read = [0; 4];
        let read = &mut read[..words as usize];
        for (i, to) in read.iter_mut().enumerate() {
            // SAFETY: in bounds of a live allocation and aligned (checked when the copy was started);
            // views that write access it atomically.
            [*to] = unsafe { load_words(from.add(i)) };
        }
        current(|block| {
            let ended = block.shared_memory.borrow_mut().end_copy(to, read, in_flight);
            ended.unwrap_or_else(|fault| block.fail(fault));
        });
    }
}
