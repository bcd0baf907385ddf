//! Tells routers which blocks a KV cache holds, so that they can send a prompt to the cache that has its prefix: vLLM's
//! KV events over ZeroMQ, with replay, in the form that Dynamo, llm-d and AIBrix read. From which version on, and with
//! which topic, is in the repository's `docs/scale-out.md`.
//!
//! | module | what it holds |
//! |---|---|
//! | [`publisher`] | [`Publisher`]: the interface for the thread that runs steps |
//! | [`options`] | [`PublisherOptions`], [`PublishError`] |
//! | [`hash`] | [`BlockHash`]: vLLM's chain of hashes |
//! | `message` | vLLM's msgpack |
//! | `resident` | the hash of each block in the prefix tree |
//! | `exchange` | batches of events that circulate between the two threads |
//! | `worker`, `sent`, `replay` | the publisher's thread: unsent messages, messages kept for replay |
//! | `listeners`, `answers` | its ports, and its answers to requests for missed messages |
//!
//! The thread that runs steps swaps a batch of events for an empty one. The publisher's thread hashes, encodes and
//! sends:
//!
//! ```
//! # use dsv4_kv_prefix::{EventSource, Limits, PrefixTree, RootKey, ScoredLru};
//! use dsv4_kv_events::{Published, Publisher, PublisherOptions};
//!
//! # let limits = Limits { block_bytes: 1, checkpoint_bytes: 1, lease_bytes: 0, remembered: 0, reserved_blocks: 8 };
//! # let mut cache = PrefixTree::<u32, (), _, 128>::new(limits, ScoredLru { capacity: 100 });
//! # cache.log_events(1024);
//! // `cache` is a `KvCacheManager`, a `Ledger` or a `PrefixTree` that logs events.
//! let any_port = "tcp://127.0.0.1:0".to_owned();
//! let options = PublisherOptions {
//!     endpoint: any_port.clone(),
//!     replay_endpoint: any_port,
//!     ..PublisherOptions::default()
//! };
//! let mut publisher = Publisher::start(&mut cache, options)?;
//!
//! // After each step:
//! # let mut at = cache.match_and_lock(&RootKey::new(b"", b"", b"model"), &[]).reference;
//! # cache.extend(&mut at, &[[7; 128]], |_| 0, |_| ())?;
//! assert_eq!(publisher.publish(&mut cache)?, Published::Events);
//! # cache.release(at, |_| ())?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What is on the wire
//!
//! A message has three frames: the topic, a sequence number of 8 bytes, big-endian, and msgpack ([`hash`] defines the
//! hashes). The first message of a publisher says `AllBlocksCleared`, followed by all blocks in the prefix tree. The
//! events of each step are one message, or several if they name more than 1,024 blocks. A subscriber that misses a
//! number asks the replay endpoint with a DEALER socket, `["", number]`. It gets `["", topic, number, message]` for
//! each message from that number on, and finally `["", "", -1, ""]`.
//!
//! # What can be lost, and how it is repaired
//!
//! | event | consequence |
//! |---|---|
//! | the publisher's thread is slower than the steps | batches run out and events stay in the log; steps do not wait |
//! | the log is full, or was read elsewhere | a snapshot (`AllBlocksCleared` and all blocks), not too often |
//! | a subscriber asks for messages that are no longer kept | a snapshot, likewise |
//! | a subscriber does not read | after [`PublisherOptions::stall`] all are disconnected; they connect again |
//! | who asks for missed messages does not read them | after 5 s it gets no more of them; nobody else waits |
//! | who asks for them connects again under its ZeroMQ identity | it gets no more of what it asked for before |
//! | the last message before a pause is lost | an empty message after [`PublisherOptions::heartbeat`] reveals it |
//! | the publisher starts again | its numbers are higher than all earlier ones, and it begins with `AllBlocksCleared` |
//!
//! The least time between two snapshots is [`PublisherOptions::snapshot_interval`]. The memory of a publisher is
//! bounded: batches, one snapshot until it is written, 40 bytes per block in the prefix tree, the bytes of messages
//! that [`PublisherOptions`] limits, the messages of one batch or snapshot, which are all encoded before the first is
//! sent, about 200 bytes for each message in the queue of a subscriber, and 256 KiB, or one message, for each connection
//! over which missed messages are asked for.
//!
//! Use both endpoints in trusted networks only: connections are not authenticated, and `zeromq` reserves memory for any
//! length that a frame states, so that one connection can end the process.
//!
//! # Tests with routers
//!
//! Dynamo's indexer (1.6.1) agrees with the cache after a late start, a log that overflowed, and 100 restarts
//! (`tests/wire/dynamo.rs`). It identifies a block by its tokens and its adapter, not by its salt: blocks of two salts
//! with equal tokens are one block to it, and it loses some of them. Caches whose requests have several salts need
//! another router.
//!
//! A router that computes hashes itself must know their inputs besides the tokens: the salt is vLLM's `cache_salt`, and
//! the adapter is the name of vLLM's LoRA adapter, with an empty path.

mod answers;
mod exchange;
pub mod hash;
mod listeners;
mod message;
pub mod options;
pub mod publisher;
mod replay;
mod resident;
#[cfg(test)]
mod salts;
mod sent;
#[cfg(test)]
mod vectors;
mod worker;

pub use hash::{BlockHash, Hasher};
pub use options::{PublishError, PublisherOptions};
pub use publisher::{Published, Publisher, PublisherStats};
