//! Reuse: requests continue from what earlier requests with the same prefix have computed.
//!
//! Without a device, what a scheduler sees of it:
//!
//! ```
//! # use dsv4_kv::kv_layout::config::ModelConfig;
//! # use dsv4_kv::{Accepted, CacheConfig, KvError, LayerGroup, Ledger, Prompt, StepRequest};
//! # let smallest = CacheConfig::new(ModelConfig::preset("tiny").expect("a preset"));
//! # let smallest = CacheConfig { max_requests: 2, max_context: 1024, ..smallest };
//! let config = CacheConfig { num_checkpoints: 4, num_blocks: 16, ..smallest };
//! let mut ledger = Ledger::new(&config)?;
//! let mut step_meta = vec![0; ledger.largest_layout().elements()];
//! let tokens: Vec<u32> = (0..300).collect();
//!
//! // The first request computes everything, and its commit tells what its tokens are.
//! let first = ledger.admit_with(&Prompt { tokens: &tokens, salt: b"tenant", adapter: b"" })?;
//! let requests = [StepRequest { id: first.id, start: first.reused, tokens: 300 }];
//! ledger.begin_step(LayerGroup::Trunk, &requests, &mut step_meta)?;
//! let accepted = [Accepted { id: first.id, accepted: 300, tokens: &tokens }];
//! ledger.commit_step(LayerGroup::Trunk, &accepted)?;
//!
//! // The second one goes on from the checkpoint at its prompt's last boundary, with the first one's blocks.
//! let second = ledger.admit_with(&Prompt { tokens: &tokens, salt: b"tenant", adapter: b"" })?;
//! assert_eq!((second.reused, ledger.committed(second.id)?), (256, 256));
//! assert_eq!(ledger.block_table(second.id)?.next(), ledger.block_table(first.id)?.next());
//! assert_eq!(ledger.reuse_stats().reused, 256);
//! # Ok::<(), KvError>(())
//! ```

use std::time::Duration;

pub use dsv4_kv_prefix::{Lease, PinRefused, ReuseStats};

use crate::device::{Backend, Stream};
use crate::error::KvError;
use crate::ledger::{Admission, Prompt};
use crate::manager::KvCacheManager;
use crate::trace;

impl<B: Backend> KvCacheManager<B> {
    /// Admits a request that continues from what earlier requests with the same salt, adapter and first tokens have
    /// computed: it has [`Admission::reused`] tokens already, and its first step starts there. In the trunk's layers it
    /// has the same bytes as if it had computed all tokens itself; for draft layers see [`crate::checkpoints`]. Blocks
    /// of 128 tokens are shared. A prompt is never reused whole: at least one token is left to compute.
    ///
    /// The request's own blocks are shared only if its commits pass token ids in [`crate::Accepted::tokens`].
    /// Checkpoints are taken inside its chunks: at the last block boundary of the prompt, where the prompt diverges
    /// from the prefix tree, and at the interval of the cache. [`Self::save_wanted`] takes those that steps with
    /// few tokens per request passed. Without checkpoints, or without layers that store entries, nothing is reused.
    ///
    /// Queued in `stream`: the request's row of the block table, and one launch that restores its state.
    ///
    /// # Errors
    /// [`KvError::NoFreeSlot`]; [`KvError::Device`]. The request is not admitted then.
    pub fn admit_with(
        &mut self,
        stream: &Stream<B>,
        prompt: &Prompt<'_>,
    ) -> Result<Admission, KvError> {
        let span = trace::admission(Some(prompt)).entered();
        let admitted = self.admit_matched(stream, prompt);
        trace::admitted(&span, &admitted);
        admitted
    }

    fn admit_matched(
        &mut self,
        stream: &Stream<B>,
        prompt: &Prompt<'_>,
    ) -> Result<Admission, KvError> {
        self.reject_leaked_steps();
        self.core().check_stream(stream)?;
        self.finish_tier_transfers(false)?;
        let (admission, place) = self.ledger_mut().admit_matched(prompt)?;
        let id = admission.id;
        let continued = place.map_or(Ok(()), |place| {
            let blocks = self.block_table(id)?;
            self.restore_place(stream, id, place, &blocks)
        });
        if let Err(error) = continued.and_then(|()| self.ledger_mut().plan_checkpoints(id)) {
            self.release(id)?;
            return Err(error);
        }
        Ok(admission)
    }

    /// Keeps a prefix for a time; see [`Ledger::pin`](crate::Ledger::pin).
    ///
    /// # Errors
    /// [`PinRefused`].
    pub fn pin(&mut self, prefix: &Prompt<'_>, until: Duration) -> Result<Lease, PinRefused> {
        self.ledger_mut().pin(prefix, until)
    }

    /// Ends a lease; `false` if it has expired, or belongs to another cache.
    pub fn unpin(&mut self, lease: Lease) -> bool {
        self.ledger_mut().unpin(lease)
    }

    /// Ends the leases whose time is before `now`; returns their number.
    pub fn expire(&mut self, now: Duration) -> usize {
        self.ledger_mut().expire(now)
    }

    /// Tokens of prompts that were reused, and why others were not.
    #[must_use]
    pub fn reuse_stats(&self) -> ReuseStats {
        self.core().read_ledger().reuse_stats()
    }
}
