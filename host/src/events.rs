//! Events: the blocks that entered and left the prefix tree of a cache since the last drain, for a router that sends
//! each prompt to the cache that has its prefix.
//!
//! A cache with [`CacheConfig::event_capacity`](crate::CacheConfig::event_capacity) logs each block that enters its
//! prefix tree, and each block that leaves it. A block enters when a commit has given its 128 token ids, or with an
//! imported prefix. The log makes no step allocate or fail. [`EventSource`] reads it from a [`Ledger`] or a
//! [`KvCacheManager`]:
//!
//! ```
//! # use dsv4_kv::kv_layout::config::ModelConfig;
//! # use dsv4_kv::{Accepted, CacheConfig, KvError, LayerGroup, Ledger, Prompt, StepRequest};
//! use dsv4_kv::events::{Drained, Event, EventBatch, EventSource};
//! # let smallest = CacheConfig::new(ModelConfig::preset("tiny").expect("a preset"));
//! # let smallest = CacheConfig { num_checkpoints: 4, num_blocks: 16, max_context: 1024, ..smallest };
//! let config = CacheConfig { event_capacity: 1024, ..smallest };
//! let mut ledger = Ledger::new(&config)?;
//! let mut batch = EventBatch::with_capacity(ledger.event_capacity());
//! let mut all = None;
//! # let mut step_meta = vec![0; ledger.largest_layout().elements()];
//! # let tokens: Vec<u32> = (0..300).collect();
//! // A request computes its prompt of 300 tokens, and its commit tells what they are.
//! let id = ledger.admit_with(&Prompt { tokens: &tokens, salt: b"tenant", adapter: b"" })?.id;
//! ledger.begin_step(LayerGroup::Trunk, &[StepRequest { id, start: 0, tokens: 300 }], &mut step_meta)?;
//! ledger.commit_step(LayerGroup::Trunk, &[Accepted { id, accepted: 300, tokens: &tokens }])?;
//!
//! // After each step: what happened, in order, in memory that goes round.
//! match ledger.drain_events(&mut batch) {
//!     Drained::Events => {
//!         for event in batch.iter() {
//!             match event {
//!                 Event::Stored(run) => {
//!                     assert_eq!((run.root.salt(), run.parent), (&b"tenant"[..], None));
//!                     assert_eq!(run.tokens.as_flattened(), &tokens[..256]);
//!                 }
//!                 Event::Removed(_) => unreachable!("nothing was evicted"),
//!             }
//!         }
//!     }
//!     // More than 1,024 blocks since the last drain: begin again with what is there.
//!     Drained::Overflowed => all = Some(ledger.snapshot_events()),
//!     Drained::Off => unreachable!("they are logged"),
//! }
//! assert_eq!((batch.blocks(), all.is_none()), (2, true));
//! # Ok::<(), KvError>(())
//! ```
//!
//! Blocks without a checkpoint at or below them are removed when their request ends, with an event. Blocks in host
//! memory or in files are not reported: a block that exists only there counts as removed.

pub use dsv4_kv_prefix::{Drained, Event, EventSource, Reading, Serial, Stored};

use crate::block::BLOCK;
use crate::device::Backend;
use crate::ledger::Ledger;
use crate::manager::KvCacheManager;

/// Events in order, in memory that is allocated once; of blocks of 128 tokens.
pub type EventBatch = dsv4_kv_prefix::EventBatch<BLOCK>;

impl Ledger {
    /// All blocks in the prefix tree, as in [`EventSource::snapshot_events`], but the log stays unchanged. Allocates,
    /// and copies the tokens of all blocks.
    #[must_use]
    pub fn resident_events(&self) -> EventBatch {
        self.tree().map_or_else(EventBatch::default, |tree| tree.resident_events())
    }
}

impl<B: Backend> KvCacheManager<B> {
    /// See [`Ledger::resident_events`].
    #[must_use]
    pub fn resident_events(&self) -> EventBatch {
        self.core().read_ledger().resident_events()
    }
}

impl EventSource<BLOCK> for Ledger {
    fn event_capacity(&self) -> u32 {
        self.tree().map_or(0, EventSource::event_capacity)
    }

    fn drain_events(&mut self, batch: &mut EventBatch) -> Drained {
        match self.tree_mut() {
            Some(tree) => tree.drain_events(batch),
            None => {
                batch.clear();
                Drained::Off
            }
        }
    }

    fn snapshot_events(&mut self) -> EventBatch {
        self.tree_mut().map_or_else(EventBatch::default, EventSource::snapshot_events)
    }
}

impl<B: Backend> EventSource<BLOCK> for KvCacheManager<B> {
    fn event_capacity(&self) -> u32 {
        self.core().read_ledger().event_capacity()
    }

    fn drain_events(&mut self, batch: &mut EventBatch) -> Drained {
        self.ledger_mut().drain_events(batch)
    }

    fn snapshot_events(&mut self) -> EventBatch {
        self.ledger_mut().snapshot_events()
    }
}
