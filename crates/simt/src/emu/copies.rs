//! The asynchronous copies that a thread has started.

use std::collections::VecDeque;

use super::global_memory::Place;
use super::in_flight::InFlight;

/// A copy from global to shared memory that was started.
#[derive(Clone, Debug)]
pub struct Copy {
    /// Byte offset in the block's shared memory.
    pub to: u32,
    /// First word of the source in global memory, which was checked when the copy was started.
    pub from: *mut u32,
    /// Number of words.
    pub words: u32,
    /// The place of the source; `None` if it is not checked for races.
    pub source: Option<Place>,
    /// The thread that started it, where and when.
    pub in_flight: InFlight,
}

/// The copies that a thread has started and not waited for.
#[derive(Debug, Default)]
pub struct Copies {
    /// The copies since the last group was committed.
    open: Vec<Copy>,
    /// The committed groups, the oldest first.
    groups: VecDeque<Vec<Copy>>,
}

impl Copies {
    /// Adds a copy to the group that is not committed yet.
    pub fn start(&mut self, copy: Copy) {
        self.open.push(copy);
    }

    /// Commits the copies since the last group; the new group may be empty.
    pub fn commit_group(&mut self) {
        self.groups.push_back(std::mem::take(&mut self.open));
    }

    /// All copies that were not waited for.
    pub fn all(&self) -> impl Iterator<Item = &Copy> {
        self.groups.iter().flatten().chain(&self.open)
    }

    /// Takes out the copies of all groups but the last `pending`.
    pub fn take_all_but(&mut self, pending: usize) -> Vec<Copy> {
        let done = self.groups.len().saturating_sub(pending);
        self.groups.drain(..done).flatten().collect()
    }
}
