//! Transfers from the device to host memory: a checkpoint, and the blocks above it that host memory does not have.

use std::sync::Arc;

use dsv4_kv_prefix::Reference;

use super::in_flight::{CopyStatus, InFlightCopies};
use super::mistake::{Mistake, made};
use super::state::{HostCheckpoint, PendingStore, Tier};
use super::stats::{TierEvent, TierMiss};
use crate::device::{Backend, HostUnit, Stream};
use crate::error::KvError;
use crate::ledger::{Ledger, StoreSource};
use crate::manager::core::Core;

impl<B: Backend> Tier<B> {
    /// Takes the next checkpoint that is to be stored, unless a transfer is in flight. Whether there are copies to queue.
    /// What host memory has already counts as used, and is skipped; what it has no room for is skipped too.
    pub fn begin_store(&mut self, ledger: &mut Ledger) -> bool {
        if self.storing.is_some() {
            return false;
        }
        while self.storing.is_none() {
            let Some(source) = ledger.next_store() else { return false };
            let above = self.tree.refer_to_match(&source.root, &source.tokens);
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

    /// Queues the copies of what was begun, behind `stream`. On an error it is lost: [`Self::end_store`] gives it back.
    pub fn queue_store(&mut self, core: &Core<B>, stream: &Stream<B>) -> Result<(), KvError> {
        let Self { storing: Some(storing), to_host: streams, .. } = self else { return Ok(()) };
        let PendingStore { source, above, units, in_flight, .. } = storing;
        let missing = source.blocks.split_off(above.blocks() as usize);
        in_flight.queue(streams, |streams, copies| {
            streams.follow(stream)?;
            streams.store(core, &missing, units, copies)?;
            let checkpoint = core.memory.state.checkpoint(source.checkpoint.checkpoint);
            Ok(copies.store(&checkpoint.view(), std::mem::take(units))?)
        })?;
        if made(Mistake::ReadNotHeld) {
            core.ledger().let_go(source);
        }
        Ok(())
    }

    /// Enters what has arrived, or gives back what was lost. Waits for it if it is to be `waited` for, or is lost.
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

    /// The host has it now.
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
        let (blocks, place) = self.take_prefix(&mut above, &source.tokens, blocks, checkpoint);
        self.stats.stored_blocks += blocks as u64;
        self.stats.stored_checkpoints += u64::from(place.is_some());
        self.stats.bytes_to_host += bytes;
        if let Some(place) = place {
            self.offer(place);
        }
        let (tokens, blocks) = (source.checkpoint.boundary, blocks as u32);
        self.event(TierEvent::Stored { tokens, blocks, bytes });
        self.give_up_store(ledger, source, above, false);
    }

    /// Keeps nothing of it any more; it is offered again if it is to be `repeated`.
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
