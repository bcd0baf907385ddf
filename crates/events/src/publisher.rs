//! The publisher, as the thread that runs steps uses it.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dsv4_kv_prefix::{Drained, EventSource, Reading};

use crate::exchange::{Exchange, Handed};
use crate::hash::BLOCK;
use crate::listeners::Listeners;
use crate::options::{PublishError, PublisherOptions};
use crate::worker::{CLOSE_TIMEOUT, Worker};

/// Publishes the events of one cache. Dropping it ends its thread, after all items were sent, or after no subscriber
/// has read them for [`PublisherOptions::stall`], and at most 5 s. A thread that still runs after 10 s is left alone.
#[derive(Debug)]
pub struct Publisher {
    exchange: Arc<Exchange>,
    thread: Option<JoinHandle<()>>,
    endpoints: [String; 2],
    snapshot_interval: Duration,
    last_snapshot: Instant,
    /// The log position after the last item. The next events must continue from it, or else a snapshot must follow.
    last: Reading,
}

/// The result of a call of [`Publisher::publish`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Published {
    /// There were no events.
    Nothing,
    /// Events were handed over.
    Events,
    /// A snapshot of all blocks was handed over: events were lost, or the publisher's thread needs a snapshot.
    Snapshot,
    /// Nothing was handed over. If the publisher's thread has all batches, the events stay in the log. If events were
    /// lost, or read elsewhere, and it is too early for a snapshot or the last one is still being written, the events
    /// of this call are dropped; a later call hands over a snapshot instead.
    Waiting,
}

/// Counters and sizes of a publisher.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PublisherStats {
    /// Messages, including those that were sent while there was no subscriber.
    pub messages: u64,
    /// Blocks in events `BlockStored`; a snapshot counts all its blocks again.
    pub stored: u64,
    /// Blocks in events `BlockRemoved`.
    pub removed: u64,
    /// Number of snapshots.
    pub snapshots: u64,
    /// Requests for missed messages whose answers have begun.
    pub replays: u64,
    /// How often all subscribers were disconnected because one did not read.
    pub disconnects: u64,
    /// Failed attempts to accept connections, for example because the process has too many open files. The thread tries
    /// again.
    pub failed_listens: u64,
    /// Blocks in the cache, as subscribers know it.
    pub resident: u64,
    /// Bytes of messages that are kept for replay, or wait to be sent, and 256 bytes for each of these messages.
    pub bytes: u64,
    /// The number of the next message.
    pub next_sequence: u64,
}

impl Publisher {
    /// Starts a thread that listens, and that begins with a snapshot of `source`. From then on call [`Self::publish`]
    /// with the same source, whose events should not be read elsewhere: if they are, a snapshot repairs it.
    ///
    /// # Errors
    /// [`PublishError::EventsOff`], [`PublishError::Option`], [`PublishError::Bind`]; [`PublishError::Thread`], also if no
    /// connection could be accepted; [`PublishError::Ended`].
    pub fn start(
        source: &mut impl EventSource<BLOCK>,
        options: PublisherOptions,
    ) -> Result<Self, PublishError> {
        let capacity = source.event_capacity();
        if capacity == 0 {
            return Err(PublishError::EventsOff);
        }
        options.check()?;
        let listeners = Listeners::bind(&options)?;
        let endpoints = listeners.endpoints.clone();
        let exchange = Arc::new(Exchange::new(options.batches, capacity));
        let snapshot_interval = options.snapshot_interval;
        let worker = Worker::new(Arc::clone(&exchange), listeners, options);
        let builder = std::thread::Builder::new().name("kv-events".to_owned());
        let (tell, told) = mpsc::channel();
        let thread = builder.spawn(move || worker.run(&tell))?;
        told.recv().map_err(|_| PublishError::Ended)??;
        let last_snapshot = Instant::now();
        let (thread, last) = (Some(thread), Reading::default());
        let mut publisher =
            Self { exchange, thread, endpoints, snapshot_interval, last_snapshot, last };
        publisher.hand_snapshot(source);
        Ok(publisher)
    }

    /// Hands over the events since the last call. Call it after each step, and now and then without steps, since a late
    /// subscriber may need it. It does not wait, and allocates only for a snapshot.
    ///
    /// # Errors
    /// [`PublishError::EventsOff`] for a source that logs no events, [`PublishError::Ended`].
    pub fn publish(
        &mut self,
        source: &mut impl EventSource<BLOCK>,
    ) -> Result<Published, PublishError> {
        if self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
            return Err(PublishError::Ended);
        }
        let exchange = &self.exchange;
        let may_snapshot =
            !exchange.has_snapshot() && self.last_snapshot.elapsed() >= self.snapshot_interval;
        if exchange.wants_snapshot() && may_snapshot {
            return Ok(self.hand_snapshot(source));
        }
        let Some(mut batch) = exchange.spare() else { return Ok(Published::Waiting) };
        let drained = source.drain_events(&mut batch);
        if drained == Drained::Events && batch.after() == self.last {
            self.last = batch.reading();
            if batch.is_empty() {
                exchange.give_back(batch);
                return Ok(Published::Nothing);
            }
            exchange.hand(Handed::Events(batch));
            return Ok(Published::Events);
        }
        exchange.give_back(batch);
        match drained {
            Drained::Off => Err(PublishError::EventsOff),
            // The log was full, or its events were read elsewhere; in both cases subscribers need a snapshot.
            Drained::Overflowed | Drained::Events if may_snapshot => Ok(self.hand_snapshot(source)),
            Drained::Overflowed | Drained::Events => Ok(Published::Waiting),
        }
    }

    fn hand_snapshot(&mut self, source: &mut impl EventSource<BLOCK>) -> Published {
        self.exchange.snapshot_taken();
        let snapshot = source.snapshot_events();
        self.last = snapshot.reading();
        self.exchange.hand(Handed::Snapshot(snapshot));
        self.last_snapshot = Instant::now();
        Published::Snapshot
    }

    /// The endpoint to which subscribers connect.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.endpoints[0]
    }

    /// The endpoint at which subscribers ask for missed messages.
    #[must_use]
    pub fn replay_endpoint(&self) -> &str {
        &self.endpoints[1]
    }

    /// Its counters and sizes. The last items may not be included yet.
    #[must_use]
    pub fn stats(&self) -> PublisherStats {
        let counters = &self.exchange.counters;
        let of = |counter: &AtomicU64| counter.load(Relaxed);
        PublisherStats {
            messages: of(&counters.messages),
            stored: of(&counters.stored),
            removed: of(&counters.removed),
            snapshots: of(&counters.snapshots),
            replays: of(&counters.replays),
            disconnects: of(&counters.disconnects),
            failed_listens: of(&counters.failed_listens),
            resident: of(&counters.resident),
            bytes: of(&counters.held.bytes),
            next_sequence: of(&counters.next),
        }
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.exchange.close();
        if let Some(thread) = self.thread.take() {
            join(thread, 2 * CLOSE_TIMEOUT);
        }
    }
}

/// Waits until a thread ends, but no longer than `most`: if it hangs, its process should still be able to end.
fn join(thread: JoinHandle<()>, most: Duration) {
    let since = Instant::now();
    while !thread.is_finished() {
        if since.elapsed() > most {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    // The thread has reported its own panic, if any.
    drop(thread.join());
}

#[cfg(test)]
mod tests {
    use dsv4_kv_prefix::{Limits, Lru, PrefixTree};

    use super::*;

    /// A publisher whose thread has ended, as after a panic, returns an error, and leaves the events in the log.
    #[test]
    fn a_thread_that_has_ended_is_noticed() {
        const TIMEOUT: Duration = Duration::from_secs(20);
        let (lease_bytes, remembered) = (0, 0);
        let limits = Limits {
            block_bytes: 1,
            checkpoint_bytes: 1,
            lease_bytes,
            remembered,
            reserved_blocks: 1,
        };
        let mut tree = PrefixTree::<(), (), _, BLOCK>::new(limits, Lru);
        tree.log_events(8);
        let any_port = "tcp://127.0.0.1:0".to_owned();
        let options = PublisherOptions {
            endpoint: any_port.clone(),
            replay_endpoint: any_port,
            ..PublisherOptions::default()
        };
        let mut publisher = Publisher::start(&mut tree, options).unwrap();
        publisher.publish(&mut tree).unwrap();
        publisher.exchange.close();
        let begun = Instant::now();
        while publisher.thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            assert!(begun.elapsed() < TIMEOUT, "the thread goes on");
            std::thread::yield_now();
        }
        let refused = publisher.publish(&mut tree);
        assert!(matches!(refused, Err(PublishError::Ended)), "{refused:?}");
    }

    #[test]
    fn a_thread_that_hangs_is_left_alone() {
        const HANGS: Duration = Duration::from_secs(20);
        let (end, ends) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            let _ = ends.recv_timeout(HANGS);
        });
        let since = Instant::now();
        join(thread, Duration::from_millis(20));
        assert!(since.elapsed() < HANGS);
        drop(end);
    }
}
