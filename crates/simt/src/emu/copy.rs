//! [`crate::copy`] on the CPU: a copy is made when its thread waits for it, and never before, so that
//! whoever reads too early finds what was there.

use std::collections::VecDeque;
use std::panic::Location;

use super::block::current;
use super::fault::{AccessKind, Site};
use super::mem::{Pointer, load_words};
use super::shared::write;
use crate::mem::Element;

/// A copy of 16 bytes that was started.
#[derive(Clone, Copy, Debug)]
struct Copy16 {
    to: u32,
    from: *mut u32,
    location: Site,
}

/// The copies that a thread has started and not waited for.
#[derive(Debug, Default)]
pub struct Copies {
    open: Vec<Copy16>,
    groups: VecDeque<Vec<Copy16>>,
}

/// Calls `use_copies` with the running thread's.
fn with_copies<R>(use_copies: impl FnOnce(&mut Copies) -> R) -> R {
    current(|block| {
        use_copies(&mut block.threads[block.running.get().0 as usize].copies.borrow_mut())
    })
}

#[track_caller]
pub unsafe fn start_if<T: Element>(is_wanted: bool, to: u32, source: Pointer<T>, at: u64) {
    if !is_wanted {
        return;
    }
    let copy = Copy16 { to, from: source.at(at, 16), location: Location::caller() };
    with_copies(|copies| copies.open.push(copy));
}

pub fn commit_group() {
    with_copies(|copies| {
        let group = std::mem::take(&mut copies.open);
        copies.groups.push_back(group);
    });
}

pub fn wait_for_groups<const PENDING: usize>() {
    let done: Vec<_> = with_copies(|copies| {
        let done = copies.groups.len().saturating_sub(PENDING);
        copies.groups.drain(..done).flatten().collect()
    });
    for Copy16 { to, from, location } in done {
        // SAFETY: in bounds of a live allocation and aligned (checked when the copy was started);
        // views that write access it atomically.
        let words: [u32; 4] = unsafe { load_words(from) };
        for (offset, word) in [0, 4, 8, 12].into_iter().zip(words) {
            write(to + offset, word, AccessKind::Write, location);
        }
    }
}
