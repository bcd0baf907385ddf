//! The options of a publisher, and its errors.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The options of a publisher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublisherOptions {
    /// The endpoint to which subscribers connect, such as `tcp://0.0.0.0:5557` or `tcp://*:5557`, which is the same; port
    /// 0 takes any free port. Use it in trusted networks only: connections are not authenticated, and `zeromq` reserves memory for any length that a
    /// frame states, so that one connection can end the process.
    pub endpoint: String,
    /// The endpoint at which subscribers ask for missed messages. Use it in trusted networks only, too.
    pub replay_endpoint: String,
    /// The first frame of each message. llm-d subscribes to `kv@` alone, and takes the name of the worker and of the
    /// model from `kv@WORKER@MODEL`: with another topic it gets no message, and neither side says so.
    pub topic: String,
    /// The last element of each message: the number of this cache among several caches of a worker.
    pub data_parallel_rank: u32,
    /// The number of the first message, at most 2^62; `None` for the microseconds since 1970. It must be higher than
    /// all numbers that earlier publishers of the same worker have used: routers take messages with lower numbers for
    /// old ones, and ignore them.
    pub first_sequence: Option<u64>,
    /// Number of batches that circulate between the thread that runs steps and the publisher's thread, each with the
    /// cache's event capacity: 1 to 64.
    pub batches: usize,
    /// Bytes of messages that are kept for replay; each message counts as 256 bytes more than it has. With 550 bytes
    /// for each block in the cache, and as much again for changes, a late subscriber needs no snapshot. The messages of
    /// the batch or snapshot that is being sent are held besides: of a snapshot, 550 bytes for each block in the cache.
    pub replay_bytes: usize,
    /// Bytes of messages that may wait for subscribers, counted likewise, besides those of the batch or snapshot that
    /// is being sent and are not sent yet. If more bytes, or more than 50,000 messages, wait for longer than `stall`,
    /// all subscribers are disconnected, and connect again by themselves.
    pub unsent_bytes: usize,
    /// How long messages may wait for subscribers. A publisher that is dropped waits until no
    /// subscriber has read for as long, but at most 5 s.
    pub stall: Duration,
    /// After this time without a message, a message without events is sent. Its number reveals to a subscriber that it
    /// has missed the last one. At least 10 ms.
    pub heartbeat: Duration,
    /// Least time between snapshots, whether a late subscriber or a full log makes them necessary. Until then events
    /// wait.
    pub snapshot_interval: Duration,
}

impl Default for PublisherOptions {
    /// vLLM's ports on this machine and vLLM's topic, two batches, 64 MiB of messages for replay and 64 MiB waiting,
    /// and times of 1 s (`stall`), 5 s (`heartbeat`) and 10 s (`snapshot_interval`).
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
    /// Refuses options outside of their ranges. Endpoints are checked when the publisher listens.
    pub(crate) fn check(&self) -> Result<(), PublishError> {
        let ranges = [
            ("batches", self.batches as u128, 1, 64),
            ("first_sequence", self.first().into(), 0, 1 << 62),
            ("heartbeat in milliseconds", self.heartbeat.as_millis(), 10, u128::MAX),
        ];
        for (option, value, least, most) in ranges {
            if !(least..=most).contains(&value) {
                return Err(PublishError::Option { option, value, least, most });
            }
        }
        Ok(())
    }

    /// The number of the first message. By default it is taken from the clock, because a file with the last number
    /// would be lost with its container. No publisher sends a message per microsecond, so it is higher than all earlier
    /// numbers unless the clock was set back.
    pub(crate) fn first(&self) -> u64 {
        let clock = || {
            let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            since.as_micros() as u64
        };
        self.first_sequence.unwrap_or_else(clock)
    }
}

/// Why events cannot be published.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// The cache does not log events.
    #[error("the cache logs no events: set event_capacity, in a cache with checkpoints")]
    EventsOff,
    /// An option is outside its range.
    #[error("{option} is {value}; choose {least} to {most}")]
    Option {
        /// Its name, with its unit.
        option: &'static str,
        /// Its value.
        value: u128,
        /// The least allowed value.
        least: u128,
        /// The greatest allowed value.
        most: u128,
    },
    /// The publisher cannot listen at an endpoint.
    #[error("cannot listen at {endpoint}: {reason}; choose another endpoint, or free this one")]
    Bind {
        /// The endpoint.
        endpoint: String,
        /// The reason.
        reason: String,
    },
    /// The publisher's thread could not be started, or could not accept connections, for example because the process
    /// has too many open files.
    #[error("cannot start the publisher's thread: {0}")]
    Thread(#[from] std::io::Error),
    /// The publisher's thread has ended, which happens only if it panics.
    #[error("the publisher's thread has ended; start another publisher")]
    Ended,
}
