//! Events: which blocks a cache has got and lost since somebody last asked, for a router that sends a prompt where its
//! prefix is.
//!
//! A cache with [`CacheConfig::event_capacity`](crate::CacheConfig::event_capacity) logs each block that enters its
//! prefix tree, that is, whose 128 token ids a commit has given, or that came with a prefix, and each that leaves it.
//! Nothing that a step does allocates for the log, or fails by it. [`EventSource`] is how it is read, of a [`Ledger`]
//! or of a [`KvCacheManager`]:
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
//! Blocks that no checkpoint is at or below go when their request ends, with an event. What is in host memory, or in
//! files, is not told: a block that moves there is removed.

pub use dsv4_kv_prefix::{Drained, Event, EventSource, Reading, Serial, Stored};

use crate::block::BLOCK;
use crate::device::Backend;
use crate::ledger::Ledger;
use crate::manager::KvCacheManager;

/// Events in order, in memory that is allocated once; of blocks of 128 tokens.
pub type EventBatch = dsv4_kv_prefix::EventBatch<BLOCK>;

impl Ledger {
    /// All blocks that are there, as [`EventSource::snapshot_events`] has them, to whoever only looks: the log goes on as it
    /// was. Allocates, and takes as long as all tokens take to be copied.
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
        self.core().ledger().drain_events(batch)
    }

    fn snapshot_events(&mut self) -> EventBatch {
        self.core().ledger().snapshot_events()
    }
}
