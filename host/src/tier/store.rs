//! Transfers from the device to host memory: a checkpoint, and the blocks above it that host memory does not have.

use std::sync::Arc;

use dsv4_kv_prefix::Reference;

use super::in_flight::{CopyStatus, InFlightCopies};
use super::mistake::{Mistake, made};
use super::state::{HostCheckpoint, PendingStore, Tier};
use super::stats::{TierEvent, TierMiss};
use crate::checkpoints::SavedPlace;
use crate::device::{Backend, HostUnit, Stream};
use crate::error::KvError;
use crate::ledger::{Ledger, StoreSource};
use crate::manager::core::Core;

impl<B: Backend> Tier<B> {
    /// Begins the store of the next offered checkpoint, unless a store is in flight. Returns whether there are copies
    /// to queue. A checkpoint that host memory already has is counted as used and skipped; one for which it has no room
    /// is skipped too.
    pub fn begin_store(&mut self, ledger: &mut Ledger) -> bool {
        if self.storing.is_some() {
            return false;
        }
        while self.storing.is_none() {
            let Some(source) = ledger.next_store() else { return false };
            let above = self.tree.lock_blocks(&source.root, &source.tokens);
            let missing = source.tokens.len() - above.blocks() as usize;
            if missing == 0 && matches!(self.tree.checkpoint(&above), Ok(Some(_))) {
                let touched = self.tree.touch_at(&above);
                debug_assert!(touched.is_ok(), "the reference is this tree's");
                self.give_up_store(ledger, source, above, false);
                continue;
            }
            match self.take_units(missing + self.layout.checkpoint_units as usize) {
                Some(units) => {
                    let (count, in_flight) = (units.len(), InFlightCopies::new());
                    self.storing = Some(PendingStore { source, above, units, count, in_flight });
                }
                None => {
                    self.miss(TierMiss::NoRoomOnHost);
                    self.give_up_store(ledger, source, above, false);
                }
            }
        }
        true
    }

    /// Queues the copies of the store that was begun, after the work in `stream`. On an error the store is lost, and
    /// [`Self::end_store`] releases what it holds.
    pub fn queue_store(&mut self, core: &mut Core<B>, stream: &Stream<B>) -> Result<(), KvError> {
        let Self { storing: Some(storing), to_host: streams, .. } = self else { return Ok(()) };
        let PendingStore { source, above, units, in_flight, .. } = storing;
        let missing = source.blocks.split_off(above.blocks() as usize);
        in_flight.queue(streams, |streams, copies| {
            streams.follow(stream)?;
            streams.store(core, &missing, units, copies)?;
            let SavedPlace { checkpoint, has_draft, .. } = source.checkpoint;
            if !has_draft {
                // They hold what the storage was used for before, perhaps a request of another salt.
                streams.copies.fill(&core.memory.state.draft_windows(checkpoint), 0)?;
            }
            let checkpoint = core.memory.state.checkpoint(checkpoint);
            Ok(copies.store(&checkpoint.view(), std::mem::take(units))?)
        })?;
        if made(Mistake::ReadNotHeld) {
            core.ledger_mut().release_early(source);
        }
        Ok(())
    }

    /// Ends the store under way if it is done: enters it, or releases what it holds if it was lost. Waits for it
    /// with `waited`, or if it was lost.
    pub fn end_store(&mut self, ledger: &mut Ledger, waited: bool) -> Result<(), KvError> {
        let Some(storing) = self.storing.as_mut() else { return Ok(()) };
        let status = storing.in_flight.finish(waited)?;
        if matches!(status, CopyStatus::Running) {
            return Ok(());
        }
        let Some(PendingStore { source, above, .. }) = self.storing.take() else { return Ok(()) };
        if let CopyStatus::Done(units, bytes) = status {
            self.enter_stored(ledger, source, above, (units, bytes));
        } else {
            self.miss(TierMiss::Device);
            self.give_up_store(ledger, source, above, true);
        }
        Ok(())
    }

    /// Enters a finished store in the host's tree.
    fn enter_stored(
        &mut self,
        ledger: &mut Ledger,
        source: StoreSource,
        mut above: Reference,
        (mut blocks, bytes): (Vec<HostUnit<B>>, u64),
    ) {
        let checkpoint = blocks.split_off(source.tokens.len() - above.blocks() as usize);
        let units = checkpoint.into_iter().map(Arc::new).collect();
        let (origin, has_draft) = (source.origin, source.checkpoint.has_draft);
        let checkpoint = HostCheckpoint { units, has_draft, origin };
        let (blocks, attached) = self.take_prefix(&mut above, &source.tokens, blocks, checkpoint);
        self.stats.stored_blocks += blocks as u64;
        self.stats.stored_checkpoints += u64::from(attached.is_some());
        self.stats.bytes_to_host += bytes;
        if let Some(checkpoint) = attached {
            self.offer(checkpoint);
        }
        let (tokens, blocks) = (source.checkpoint.boundary, blocks as u32);
        self.event(TierEvent::Stored { tokens, blocks, bytes });
        self.give_up_store(ledger, source, above, false);
    }

    /// Releases the references of a store; with `repeated`, its checkpoint is offered again.
    fn give_up_store(
        &mut self,
        ledger: &mut Ledger,
        source: StoreSource,
        above: Reference,
        repeated: bool,
    ) {
        ledger.end_store(source, repeated);
        self.release(above);
    }
}
