//! Passes events from the thread that runs steps to the publisher's thread, in a fixed number of batches that are
//! reused.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use dsv4_kv_prefix::EventBatch;
use tokio::sync::Notify;

use crate::hash::BLOCK;

/// An item for the publisher's thread.
#[derive(Debug)]
pub(crate) enum Handed {
    /// Events since the last item.
    Events(EventBatch<BLOCK>),
    /// All blocks in the prefix tree.
    Snapshot(EventBatch<BLOCK>),
}

#[derive(Debug)]
struct Queue {
    ready: VecDeque<Handed>,
    spare: Vec<EventBatch<BLOCK>>,
    /// Whether a snapshot is in `ready`, or is being written. There is at most one, so that memory is bounded.
    has_snapshot: bool,
    is_closed: bool,
}

/// The queue between the two threads. It allocates nothing after it was created.
#[derive(Debug)]
pub(crate) struct Exchange {
    queue: Mutex<Queue>,
    handed: Notify,
    /// Whether the publisher's thread needs a snapshot.
    wants_snapshot: AtomicBool,
    pub counters: Counters,
}

/// Counters since the start.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub messages: AtomicU64,
    pub stored: AtomicU64,
    pub removed: AtomicU64,
    pub snapshots: AtomicU64,
    pub replays: AtomicU64,
    pub disconnects: AtomicU64,
    pub failed_listens: AtomicU64,
    pub resident: AtomicU64,
    /// Messages that are kept for replay, or wait to be sent.
    pub held: Held,
    /// The part of `held` that waits to be sent.
    pub unsent: Held,
    pub next: AtomicU64,
}

/// Counts messages of which a copy exists.
#[derive(Debug, Default)]
pub(crate) struct Held {
    /// Their number. Nobody reads that of [`Counters::held`].
    pub messages: AtomicU64,
    /// The memory that they take.
    pub bytes: AtomicU64,
}

impl Exchange {
    /// An exchange of `batches` batches, each with room for `capacity` blocks.
    pub fn new(batches: usize, capacity: u32) -> Self {
        let queue = Queue {
            ready: VecDeque::with_capacity(batches + 1),
            spare: (0..batches).map(|_| EventBatch::with_capacity(capacity)).collect(),
            has_snapshot: false,
            is_closed: false,
        };
        Self {
            queue: Mutex::new(queue),
            handed: Notify::new(),
            wants_snapshot: AtomicBool::new(false),
            counters: Counters::default(),
        }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        // Nothing can panic in the middle of a change.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes an empty batch to fill; `None` while the publisher's thread has all of them.
    pub fn spare(&self) -> Option<EventBatch<BLOCK>> {
        self.queue().spare.pop()
    }

    /// Returns a batch for reuse.
    pub fn give_back(&self, batch: EventBatch<BLOCK>) {
        self.queue().spare.push(batch);
    }

    /// Passes an item to the publisher's thread.
    pub fn hand(&self, handed: Handed) {
        let mut queue = self.queue();
        queue.has_snapshot |= matches!(handed, Handed::Snapshot(_));
        queue.ready.push_back(handed);
        drop(queue);
        self.handed.notify_one();
    }

    /// Notes that the last snapshot was written, and that its memory is free.
    pub fn snapshot_dropped(&self) {
        self.queue().has_snapshot = false;
    }

    /// Whether a snapshot is queued or being written.
    pub fn has_snapshot(&self) -> bool {
        self.queue().has_snapshot
    }

    /// Requests a snapshot at the next step.
    pub fn want_snapshot(&self) {
        self.wants_snapshot.store(true, Relaxed);
    }

    /// Whether a snapshot is requested.
    pub fn wants_snapshot(&self) -> bool {
        self.wants_snapshot.load(Relaxed)
    }

    /// Notes that a snapshot is about to be taken, which serves all earlier requests.
    pub fn snapshot_taken(&self) {
        self.wants_snapshot.store(false, Relaxed);
    }

    /// Waits for the next item; `None` once the queue is closed and empty.
    pub async fn take(&self) -> Option<Handed> {
        loop {
            {
                let mut queue = self.queue();
                if let Some(handed) = queue.ready.pop_front() {
                    return Some(handed);
                }
                if queue.is_closed {
                    return None;
                }
            }
            self.handed.notified().await;
        }
    }

    /// Whether the queue is closed.
    pub fn is_closed(&self) -> bool {
        self.queue().is_closed
    }

    /// Closes the queue: no item follows.
    pub fn close(&self) {
        self.queue().is_closed = true;
        self.handed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A snapshot that is being written still holds its memory.
    #[test]
    fn a_snapshot_counts_until_it_is_dropped() {
        let exchange = Exchange::new(1, 1);
        exchange.hand(Handed::Snapshot(EventBatch::default()));
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let taken = runtime.block_on(exchange.take());
        assert!(matches!(taken, Some(Handed::Snapshot(_))) && exchange.has_snapshot());
        drop(taken);
        exchange.snapshot_dropped();
        assert!(!exchange.has_snapshot());
    }
}
