//! The prefix tree of a KV cache: which blocks and checkpoints of earlier requests a prompt can reuse, and which
//! are evicted when room is needed. It knows no device and no model: the types of blocks and checkpoints are
//! chosen by its owner.
//!
//! A sequence can continue only where a *checkpoint* was taken: blocks do not hold the sliding window and the open
//! compression windows. Blocks are shared in units of `T` tokens. The tokens between the deepest checkpoint of a
//! match and the end of the match are computed again.
//!
//! | module | what it holds |
//! |---|---|
//! | [`tree`] | [`PrefixTree`]: segments, and matching |
//! | [`root`] | [`RootKey`]: which requests may share prefixes |
//! | [`mod@reference`] | [`Reference`]: protects the path that a request uses; adopting and releasing |
//! | [`register`] | blocks and checkpoints enter the tree |
//! | [`place`] | the place of a checkpoint, without protecting it; the tokens of a path |
//! | [`placement`] | where a prompt's checkpoints are taken |
//! | [`policy`] | which leaf is evicted first |
//! | [`evict`] | eviction, all or nothing |
//! | [`lease`] | prefixes that are kept until a time |
//! | [`event`], `log` | log of stored and removed blocks, for routers and other indexes |
//! | [`stats`], `memory` | counts of reused tokens, and of others by reason; evicted blocks that are remembered to tell the reason |
//! | `node`, `cell`, `serial`, `order` | segments, blocks, serial numbers of blocks, segments by rank |
//! | `audit` | everything counted again, for tests |
//!
//! ```
//! use dsv4_kv_prefix::{Freed, Limits, Origin, PrefixTree, RootKey, ScoredLru};
//!
//! let limits =
//!     Limits { block_bytes: 449_824, checkpoint_bytes: 3_719_168, lease_bytes: 0, remembered: 64, room: 64 };
//! // Blocks are numbers here, and checkpoints letters; a block has 4 tokens.
//! let mut tree = PrefixTree::<u32, char, _, 4>::new(limits, ScoredLru { capacity: 1 << 30 });
//! let root = RootKey::new(b"tenant", b"", b"model");
//!
//! // The first request finds nothing, computes its prompt, and registers its two whole blocks.
//! let first = tree.adopt(&root, &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
//! assert_eq!(first.reused, 0);
//! let mut at = first.reference;
//! let mut freed = Vec::new();
//! tree.extend(&mut at, &[[1, 2, 3, 4], [5, 6, 7, 8]], |i| i as u32, |b| freed.push(b))?;
//! tree.attach(&at, 2, Origin::Prompt, 'c').expect("there was none");
//! tree.release(at, |b| freed.push(b))?;
//! assert!(freed.is_empty());
//!
//! // The second one has the same first eight tokens: it goes on from the checkpoint behind them.
//! let second = tree.adopt(&root, &[1, 2, 3, 4, 5, 6, 7, 8, 10, 11]);
//! assert_eq!(second.reused, 8);
//! assert_eq!(tree.checkpoint(&second.reference)?, Some(&'c'));
//! tree.release(second.reference, |b| freed.push(b))?;
//! assert!(tree.evict_first(|b| freed.push(b)));
//! assert_eq!(freed, [Freed::Checkpoint('c'), Freed::Block(1), Freed::Block(0)]);
//! # Ok::<(), dsv4_kv_prefix::Foreign>(())
//! ```

mod audit;
mod cell;
pub mod event;
pub mod evict;
pub mod lease;
mod log;
mod memory;
#[doc(hidden)]
pub mod mistake;
mod node;
mod order;
pub mod place;
pub mod placement;
pub mod policy;
pub mod reference;
pub mod register;
pub mod root;
mod serial;
pub mod stats;
pub mod tree;

pub use event::{Drained, Event, EventBatch, EventSource, Reading, Serial, Stored};
pub use evict::{Need, NotEvictable};
pub use lease::{Lease, PinRefused};
pub use place::{Path, Place};
pub use placement::{Checkpoints, Placement};
pub use policy::{Lru, Origin, Policy, ScoredLru, Usage};
pub use reference::{Adopted, Foreign, Reference};
pub use register::NotTaken;
pub use root::RootKey;
pub use stats::ReuseStats;
pub use tree::{Counts, Freed, Limits, Lookup, PrefixTree};
