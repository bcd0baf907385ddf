//! Tells routers which blocks a KV cache holds, so that a prompt is sent where its prefix is: vLLM's KV events over
//! ZeroMQ, with replay, as Dynamo, llm-d and AIBrix read them.
//!
//! | module | what it holds |
//! |---|---|
//! | [`publisher`] | [`Publisher`]: what the step's thread calls |
//! | [`options`] | [`PublisherOptions`], [`PublishError`] |
//! | [`hash`] | [`BlockHash`]: vLLM's chain of hashes |
//! | `message` | vLLM's msgpack |
//! | `resident` | the hash of each block that is there |
//! | `exchange` | batches that go round between the two threads |
//! | `worker`, `sent`, `replay` | the thread: sockets, what waits, what is kept |
//!
//! The step's thread swaps a batch of events for an empty one; hashing, writing and sending are the publisher's thread's:
//!
//! ```
//! # use dsv4_kv_prefix::{EventSource, Limits, PrefixTree, RootKey, ScoredLru};
//! use dsv4_kv_events::{Published, Publisher, PublisherOptions};
//!
//! # let limits = Limits { block_bytes: 1, checkpoint_bytes: 1, lease_bytes: 0, remembered: 0, room: 8 };
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
//! # let mut at = cache.adopt(&RootKey::new(b"", b"", b"model"), &[]).reference;
//! # cache.extend(&mut at, &[[7; 128]], |_| 0, |_| ())?;
//! assert_eq!(publisher.publish(&mut cache)?, Published::Events);
//! # cache.release(at, |_| ())?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What is on the wire
//!
//! A message has three frames: the topic, a number of 8 bytes, big-endian, and msgpack ([`hash`] says what a hash is).
//! The first message of a publisher says `AllBlocksCleared`, then come all blocks that are there; each step's events are
//! a message, or several if they name more than 1,024 blocks. Who misses a number asks the replay endpoint with a DEALER
//! socket, `["", number]`, and gets `["", topic, number, message]` for each message from there on, and
//! `["", "", -1, ""]`.
//!
//! # What is lost, and made good
//!
//! | what happens | what follows |
//! |---|---|
//! | the thread is slower than the steps | batches run out, events stay in the log, steps wait for nothing |
//! | the log is full, or somebody else read it | `AllBlocksCleared`, and everything that is there, at most once in [`PublisherOptions::snapshot_interval`] |
//! | a subscriber asks for messages that are no longer kept | the same |
//! | a subscriber does not read | after [`PublisherOptions::stall`] all are disconnected, and connect again |
//! | the last message before a pause is lost | after [`PublisherOptions::heartbeat`] a message without events tells it |
//! | the publisher starts again | its numbers are beyond all earlier ones, and it begins with `AllBlocksCleared` |
//!
//! Its memory is bounded: batches, one snapshot until it is written, 40 bytes of each block that is there, and the bytes of messages that
//! [`PublisherOptions`] names.
//!
//! Both endpoints are for trusted networks only: nobody who connects is asked who he is, and `zeromq` reserves memory for
//! whatever length a frame names, so that one connection can end the process.
//!
//! # What was tried with it
//!
//! Dynamo's indexer (1.6.1) has what the cache has after a late start, a log that overflowed and 100 restarts
//! (`tests/wire/dynamo.rs`). It knows a block by its tokens and its adapter, not by its salt: blocks of two salts with equal
//! tokens are one block to it, and it loses some of them. Caches whose requests have several salts want another router.
//!
//! A router that computes hashes itself must know what is in them besides tokens: the salt as vLLM's `cache_salt`, the
//! adapter as the name of vLLM's LoRA adapter with an empty path.

mod exchange;
pub mod hash;
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
