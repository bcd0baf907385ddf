//! [`crate::copy`] on the CPU: a copy takes place when its thread waits for it. On a GPU it may at any time from its start on, so
//! that whoever accesses its words meanwhile is at fault.

use std::panic::Location;

use super::block::current;
use super::copies::{Copies, Copy};
use super::fault::AccessKind;
use super::mem::{Access, Pointer, load_words, record};

/// Calls `use_copies` with the copies of the running thread.
fn with_copies<R>(use_copies: impl FnOnce(&mut Copies) -> R) -> R {
    current(|block| {
        use_copies(&mut block.threads[block.running.get().0 as usize].copies.borrow_mut())
    })
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
    let from = source.access(at, 4 * words, AccessKind::Read);
    let (source, location) = (source.watched(at, 4 * words), Location::caller());
    let in_flight = current(|block| {
        let memory = block.shared_memory.borrow();
        let in_flight = memory.start(block.running.get(), location);
        let started = (0..words).try_for_each(|i| memory.start_copy(to + 4 * i, in_flight));
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
        // It may have been read at any time until now.
        if let Some(place) = source {
            record(place, AccessKind::Read, in_flight.location);
        }
        for i in 0..words {
            // SAFETY: in bounds of a live allocation and aligned (checked when the copy was started);
            // views that write access it atomically.
            let [word] = unsafe { load_words(from.add(i as usize)) };
            current(|block| {
                let ended = block.shared_memory.borrow_mut().end_copy(to + 4 * i, word, in_flight);
                ended.unwrap_or_else(|fault| block.fail(fault));
            });
        }
    }
}
