//! What a publisher is started with, and why it was not.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How events are published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublisherOptions {
    /// Where subscribers connect, as `tcp://0.0.0.0:5557`; port 0 is any that is free.
    pub endpoint: String,
    /// Where missed messages are asked for.
    pub replay_endpoint: String,
    /// The first frame of each message.
    pub topic: String,
    /// The last element of each message: which of several caches of a worker this is.
    pub data_parallel_rank: u32,
    /// The number of the first message; `None`: the microseconds since 1970. A publisher that begins below a number that
    /// an earlier one of the same worker has used is not listened to by routers, which take its messages for old ones.
    pub first_sequence: Option<u64>,
    /// Batches that go round between the step and the publisher's thread, each of the cache's event capacity.
    pub batches: usize,
    /// Bytes of messages that are kept for replay. With 550 bytes of each block that is there, and as much again for what
    /// changes, who comes late needs no snapshot.
    pub replay_bytes: usize,
    /// Bytes of messages that may wait for subscribers. If they wait for longer than `stall`, all are disconnected, and
    /// connect again by themselves.
    pub unsent_bytes: usize,
    /// How long.
    pub stall: Duration,
    /// After so long without a message one is sent that names no event: by its number a subscriber that missed the last one
    /// learns that it did.
    pub heartbeat: Duration,
    /// Least time between snapshots for subscribers that came too late for what is kept.
    pub snapshot_interval: Duration,
}

impl Default for PublisherOptions {
    /// vLLM's ports on this machine, its topic, two batches, 64 MiB each of messages kept and waiting, 1 s, 5 s, and
    /// 10 s.
    fn default() -> Self {
        Self {
            endpoint: "tcp://127.0.0.1:5557".to_owned(),
            replay_endpoint: "tcp://127.0.0.1:5558".to_owned(),
            topic: String::new(),
            data_parallel_rank: 0,
            first_sequence: None,
            batches: 2,
            replay_bytes: 64 << 20,
            unsent_bytes: 64 << 20,
            stall: Duration::from_secs(1),
            heartbeat: Duration::from_secs(5),
            snapshot_interval: Duration::from_secs(10),
        }
    }
}

impl PublisherOptions {
    /// The number of the first message. The clock goes on where a file would be lost with its container, and no publisher
    /// sends a message a microsecond, so that it is beyond all that came before unless the clock was set back.
    pub(crate) fn first(&self) -> u64 {
        let clock = || {
            let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            since.as_micros() as u64
        };
        self.first_sequence.unwrap_or_else(clock)
    }
}

/// Why events are not published.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// The cache logs none.
    #[error("the cache logs no events: set event_capacity, in a cache with checkpoints")]
    EventsOff,
    /// No batch could ever be handed over.
    #[error("0 batches go round between step and publisher: at least 1 is needed")]
    NoBatches,
    /// An endpoint cannot be listened at.
    #[error("cannot listen at {endpoint}: {reason}; choose another endpoint, or free this one")]
    Bind {
        /// Which.
        endpoint: String,
        /// Why.
        reason: String,
    },
    /// There is no thread for it.
    #[error("cannot start the publisher's thread: {0}")]
    Thread(#[from] std::io::Error),
    /// Its thread has ended, which it does not unless it panics.
    #[error("the publisher's thread has ended; start another publisher")]
    Ended,
}
