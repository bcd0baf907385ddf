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
//! | [`mod@reference`] | [`Reference`]: protects the path that a request uses; matching a prompt, releasing |
//! | [`register`] | blocks and checkpoints enter the tree |
//! | [`weak_checkpoint`] | [`WeakCheckpoint`]: names a checkpoint, without protecting it; the tokens of a path |
//! | [`checkpoint_positions`] | [`Placement`]: the positions of a prompt at which checkpoints are taken |
//! | [`policy`] | which leaf is evicted first |
//! | [`evict`] | eviction, all or nothing |
//! | [`lease`] | prefixes that are kept until a time |
//! | [`event`], `log` | log of stored and removed blocks, for routers and other indexes |
//! | [`stats`], `remembered` | counts of reused tokens, and of others by reason; evicted blocks that are remembered to tell the reason |
//! | `node`, `cell`, `serial`, `order` | segments, blocks, serial numbers of blocks, segments by rank |
//! | `audit` | everything counted again, for tests |
//!
//! The same things in SGLang's RadixAttention and in vLLM:
//!
//! | here | SGLang | vLLM |
//! |---|---|---|
//! | segment | `TreeNode` | none: blocks are in a hash table |
//! | [`PrefixTree::match_and_lock`] | `match_prefix`, then `inc_lock_ref` | `get_computed_blocks`, then `touch` |
//! | [`Reference`]; `lock_ref` of a segment, 0 if it can be evicted | a request's `last_node`; `lock_ref` | `ref_cnt` of a block |
//! | [`PrefixTree::extend`] | `insert`, in `cache_unfinished_req` | `cache_full_blocks` |
//! | [`PrefixTree::release`] | `dec_lock_ref` | `free` |
//! | `prefix_hash` of a block | none | `BlockHash` |
//! | salt and adapter of a [`RootKey`] | `extra_key` | `cache_salt`, LoRA name |
//! | checkpoint | Mamba state of a node (`mamba_value`) | block of a Mamba KV-cache group |
//! | [`Origin::Branch`], [`Placement::branch_points`] | `mamba_branching_seqlen` | none |
//!
//! To *lock* is to protect a path from eviction by a reference, as in SGLang; no mutex is meant. SGLang's `lock_ref`
//! counts every lock at or below a node. Here a segment counts its own references and leases, and each child with a
//! `lock_ref` above 0 once: both are 0 for the same nodes.
//!
//! ```
//! use dsv4_kv_prefix::{Freed, Limits, Origin, PrefixTree, RootKey, ScoredLru};
//!
//! let (block_bytes, checkpoint_bytes) = (449_824, 3_719_168);
//! let limits = Limits { block_bytes, checkpoint_bytes, lease_bytes: 0, remembered: 64, reserved_blocks: 64 };
//! // Blocks are numbers here, and checkpoints letters; a block has 4 tokens.
//! let mut tree = PrefixTree::<u32, char, _, 4>::new(limits, ScoredLru { capacity: 1 << 30 });
//! let root = RootKey::new(b"tenant", b"", b"model");
//!
//! // The first request finds nothing, computes its prompt, and registers its two whole blocks.
//! let first = tree.match_and_lock(&root, &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
//! assert_eq!(first.reused, 0);
//! let mut at = first.reference;
//! let mut freed = Vec::new();
//! tree.extend(&mut at, &[[1, 2, 3, 4], [5, 6, 7, 8]], |i| i as u32, |b| freed.push(b))?;
//! tree.attach(&at, 2, Origin::Prompt, 'c').expect("there was none");
//! tree.release(at, |b| freed.push(b))?;
//! assert!(freed.is_empty());
//!
//! // The second one has the same first eight tokens: it goes on from the checkpoint behind them.
//! let second = tree.match_and_lock(&root, &[1, 2, 3, 4, 5, 6, 7, 8, 10, 11]);
//! assert_eq!(second.reused, 8);
//! assert_eq!(tree.checkpoint(&second.reference)?, Some(&'c'));
//! tree.release(second.reference, |b| freed.push(b))?;
//! assert!(tree.evict_first(|b| freed.push(b)));
//! assert_eq!(freed, [Freed::Checkpoint('c'), Freed::Block(1), Freed::Block(0)]);
//! # Ok::<(), dsv4_kv_prefix::Foreign>(())
//! ```

mod audit;
mod cell;
pub mod checkpoint_positions;
pub mod event;
pub mod evict;
pub mod lease;
mod log;
#[doc(hidden)]
pub mod mistake;
mod node;
mod order;
pub mod policy;
pub mod reference;
pub mod register;
mod remembered;
pub mod root;
mod serial;
pub mod stats;
pub mod tree;
pub mod weak_checkpoint;

pub use checkpoint_positions::{Checkpoints, Placement};
pub use event::{Drained, Event, EventBatch, EventSource, Reading, Serial, Stored};
pub use evict::{Need, NotEvictable};
pub use lease::{Lease, PinRefused};
pub use policy::{Lru, Origin, Policy, ScoredLru, Usage};
pub use reference::{Foreign, PrefixMatch, Reference};
pub use register::NotTaken;
pub use root::RootKey;
pub use stats::ReuseStats;
pub use tree::{Counts, Freed, Limits, Lookup, PrefixTree};
pub use weak_checkpoint::{Path, WeakCheckpoint};
