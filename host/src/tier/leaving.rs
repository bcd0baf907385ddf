//! To the host: a checkpoint, and the blocks above it that the host does not have.

use std::sync::Arc;

use dsv4_kv_prefix::Reference;

use super::flight::{Flight, Landed};
use super::mistake::{Mistake, made};
use super::state::{HostCheckpoint, Leaving, Tier};
use super::stats::{TierEvent, TierMiss};
use crate::device::{Backend, HostUnit, Stream};
use crate::error::KvError;
use crate::ledger::{Departure, Ledger};
use crate::manager::core::Core;

impl<B: Backend> Tier<B> {
    /// Whether there is something for the device to do: the next checkpoint that is to leave, if none does. What the host
    /// has already is used anew, and passed over, and so is what it has no room for.
    pub fn begin_leaving(&mut self, ledger: &mut Ledger) -> bool {
        if self.leaving.is_some() {
            return false;
        }
        while self.leaving.is_none() {
            let Some(departure) = ledger.next_departure() else { return false };
            let above = self.tree.refer_to_match(&departure.root, &departure.tokens);
            let missing = departure.tokens.len() - above.blocks() as usize;
            if missing == 0 && matches!(self.tree.checkpoint(&above), Ok(Some(_))) {
                let touched = self.tree.touch_at(&above);
                debug_assert!(touched.is_ok(), "the reference is this tree's");
                self.give_up_leaving(ledger, departure, above, false);
                continue;
            }
            match self.take_units(missing + self.layout.checkpoint_units as usize) {
                Some(units) => {
                    let (count, flight) = (units.len(), Flight::new());
                    self.leaving = Some(Leaving { departure, above, units, count, flight });
                }
                None => {
                    self.miss(TierMiss::NoRoomOnHost);
                    self.give_up_leaving(ledger, departure, above, false);
                }
            }
        }
        true
    }

    /// Queues the copies of what was begun, behind `stream`. On an error it is lost: [`Self::end_leaving`] gives it back.
    pub fn queue_leaving(&mut self, core: &Core<B>, stream: &Stream<B>) -> Result<(), KvError> {
        let Self { leaving: Some(leaving), to_host: lane, .. } = self else { return Ok(()) };
        let Leaving { departure, above, units, flight, .. } = leaving;
        let missing = departure.blocks.split_off(above.blocks() as usize);
        flight.queue(lane, |lane, copies| {
            lane.follow(stream)?;
            lane.store(core, &missing, units, copies)?;
            let checkpoint = core.memory.state.checkpoint(departure.checkpoint.checkpoint);
            Ok(copies.store(&checkpoint.view(), std::mem::take(units))?)
        })?;
        if made(Mistake::ReadNotHeld) {
            core.ledger().let_go(departure);
        }
        Ok(())
    }

    /// Enters what has arrived, or gives back what was lost. Waits for it if it is to be `waited` for, or is lost.
    pub fn end_leaving(&mut self, ledger: &mut Ledger, waited: bool) -> Result<(), KvError> {
        let Some(leaving) = self.leaving.as_mut() else { return Ok(()) };
        let landed = leaving.flight.land(waited)?;
        if matches!(landed, Landed::NotYet) {
            return Ok(());
        }
        let Some(Leaving { departure, above, .. }) = self.leaving.take() else { return Ok(()) };
        if let Landed::Done(units, bytes) = landed {
            self.enter_leaving(ledger, departure, above, (units, bytes));
        } else {
            self.miss(TierMiss::Device);
            self.give_up_leaving(ledger, departure, above, true);
        }
        Ok(())
    }

    /// The host has it now.
    fn enter_leaving(
        &mut self,
        ledger: &mut Ledger,
        departure: Departure,
        mut above: Reference,
        (mut blocks, bytes): (Vec<HostUnit<B>>, u64),
    ) {
        let checkpoint = blocks.split_off(departure.tokens.len() - above.blocks() as usize);
        let units = checkpoint.into_iter().map(Arc::new).collect();
        let (origin, has_draft) = (departure.origin, departure.checkpoint.has_draft);
        let checkpoint = HostCheckpoint { units, has_draft, origin };
        let (blocks, place) = self.take_prefix(&mut above, &departure.tokens, blocks, checkpoint);
        self.stats.stored_blocks += blocks as u64;
        self.stats.stored_checkpoints += u64::from(place.is_some());
        self.stats.bytes_to_host += bytes;
        if let Some(place) = place {
            self.offer(place);
        }
        let (tokens, blocks) = (departure.checkpoint.boundary, blocks as u32);
        self.event(TierEvent::Stored { tokens, blocks, bytes });
        self.give_up_leaving(ledger, departure, above, false);
    }

    /// Keeps nothing of it any more; it is offered again if it is to be `repeated`.
    fn give_up_leaving(
        &mut self,
        ledger: &mut Ledger,
        departure: Departure,
        above: Reference,
        repeated: bool,
    ) {
        ledger.end_departure(departure, repeated);
        self.release(above);
    }
}
