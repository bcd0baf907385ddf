//! What a publisher is started with, and why it was not.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How events are published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublisherOptions {
    /// Where subscribers connect, as `tcp://0.0.0.0:5557`; port 0 is any that is free. Only in networks that are trusted:
    /// nobody who connects is asked who he is, and `zeromq` reserves memory for whatever length a frame names, so that one
    /// connection can end the process.
    pub endpoint: String,
    /// Where missed messages are asked for. The same holds of it.
    pub replay_endpoint: String,
    /// The first frame of each message.
    pub topic: String,
    /// The last element of each message: which of several caches of a worker this is.
    pub data_parallel_rank: u32,
    /// The number of the first message; `None`: the microseconds since 1970. A publisher that begins below a number
    /// that an earlier one of the same worker has used is not listened to by routers, which take its messages for old
    /// ones. 2^62 at most.
    pub first_sequence: Option<u64>,
    /// Batches that go round between the step and the publisher's thread, each of the cache's event capacity: 1 to 64.
    pub batches: usize,
    /// Bytes of messages that are kept for replay. With 550 bytes of each block that is there, and as much again for what
    /// changes, who comes late needs no snapshot.
    pub replay_bytes: usize,
    /// Bytes of messages that may wait for subscribers. If they wait for longer than `stall`, all are disconnected, and
    /// connect again by themselves.
    pub unsent_bytes: usize,
    /// How long. A publisher that is dropped waits for subscribers that long, and 5 s at most.
    pub stall: Duration,
    /// After so long without a message one is sent that names no event: by its number a subscriber that missed the last one
    /// learns that it did. At least 10 ms.
    pub heartbeat: Duration,
    /// Least time between snapshots, whether a subscriber came too late for what is kept, or the log was full. Until then
    /// events wait.
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
    /// Refuses what is outside its range, before anything is done with it.
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
        for endpoint in [&self.endpoint, &self.replay_endpoint] {
            if !endpoint.starts_with("tcp://") {
                let (endpoint, reason) = (endpoint.clone(), "it is not tcp://HOST:PORT".to_owned());
                return Err(PublishError::Bind { endpoint, reason });
            }
        }
        Ok(())
    }

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
    /// An option is outside its range.
    #[error("{option} is {value}; choose {least} to {most}")]
    Option {
        /// Its name, with its unit.
        option: &'static str,
        /// What it is.
        value: u128,
        /// The least that it can be.
        least: u128,
        /// The most.
        most: u128,
    },
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
