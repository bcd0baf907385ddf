//! What goes from the step's thread to the publisher's: a fixed number of batches that go round.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use dsv4_kv_prefix::EventBatch;
use tokio::sync::Notify;

use crate::hash::BLOCK;

/// What a step hands over.
#[derive(Debug)]
pub(crate) enum Handed {
    /// What happened.
    Events(EventBatch<BLOCK>),
    /// What is there.
    Snapshot(EventBatch<BLOCK>),
}

#[derive(Debug)]
struct Queue {
    ready: VecDeque<Handed>,
    spare: Vec<EventBatch<BLOCK>>,
    /// Whether a snapshot is among `ready`, or is being written: one at most, so that memory is bounded.
    has_snapshot: bool,
    is_closed: bool,
}

/// Both ends of it. Nothing here allocates after it was made.
#[derive(Debug)]
pub(crate) struct Exchange {
    queue: Mutex<Queue>,
    handed: Notify,
    /// Whether somebody needs a snapshot to go on from.
    wants_snapshot: AtomicBool,
    pub counters: Counters,
}

/// Counted since the start.
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
    /// Bytes of messages that are kept for replay, or wait to be sent.
    pub bytes: AtomicU64,
    /// Of these, bytes that wait to be sent.
    pub unsent: AtomicU64,
    pub next: AtomicU64,
}

impl Exchange {
    /// With so many batches of so many blocks.
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
        // Every change is whole before anything can panic.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A batch to fill; `None` while the publisher has them all.
    pub fn spare(&self) -> Option<EventBatch<BLOCK>> {
        self.queue().spare.pop()
    }

    /// Gives a batch back.
    pub fn give_back(&self, batch: EventBatch<BLOCK>) {
        self.queue().spare.push(batch);
    }

    /// Hands something over.
    pub fn hand(&self, handed: Handed) {
        let mut queue = self.queue();
        queue.has_snapshot |= matches!(handed, Handed::Snapshot(_));
        queue.ready.push_back(handed);
        drop(queue);
        self.handed.notify_one();
    }

    /// The snapshot that was taken is written, and dropped.
    pub fn snapshot_dropped(&self) {
        self.queue().has_snapshot = false;
    }

    /// Whether a snapshot is on its way already.
    pub fn has_snapshot(&self) -> bool {
        self.queue().has_snapshot
    }

    /// Asks the next step for a snapshot.
    pub fn want_snapshot(&self) {
        self.wants_snapshot.store(true, Relaxed);
    }

    /// Whether one is asked for.
    pub fn wants_snapshot(&self) -> bool {
        self.wants_snapshot.load(Relaxed)
    }

    /// One is taken: what was asked for before it is answered by it.
    pub fn snapshot_taken(&self) {
        self.wants_snapshot.store(false, Relaxed);
    }

    /// What was handed over next; `None` when nothing is left of a queue that is closed.
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

    /// Whether nothing more is handed over.
    pub fn is_closed(&self) -> bool {
        self.queue().is_closed
    }

    /// Nothing more is handed over.
    pub fn close(&self) {
        self.queue().is_closed = true;
        self.handed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A snapshot that is being written still has its memory.
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
