//! To the host: a checkpoint, and the blocks above it that the host does not have.

use std::sync::Arc;

use dsv4_kv_prefix::Reference;

use super::state::{HostCheckpoint, Leaving, Tier};
use super::stats::{TierEvent, TierMiss};
use crate::core::Core;
use crate::device::{Backend, HostCopies, HostUnit, Stream, Unsettled};
use crate::error::KvError;
use crate::ledger::{Departure, Ledger};
use crate::ops::CopyDirection;

impl<B: Backend> Tier<B> {
    /// Whether there is something for the device to do: the next checkpoint that is to leave, if none does. What the host
    /// has already is passed over, and so is what it has no room for.
    pub fn begin_leaving(&mut self, ledger: &mut Ledger) -> bool {
        if self.leaving.is_some() {
            return false;
        }
        while self.leaving.is_none() {
            let Some(departure) = ledger.next_departure() else { return false };
            let above = self.tree.refer_to_match(&departure.root, &departure.tokens);
            let missing = departure.tokens.len() - above.blocks() as usize;
            if missing == 0 && matches!(self.tree.checkpoint(&above), Ok(Some(_))) {
                self.drop_leaving(ledger, departure, above, false);
                continue;
            }
            match self.take_units(missing + self.layout.checkpoint_units as usize) {
                Some(units) => {
                    let (count, copies) = (units.len(), None);
                    let leaving = Leaving { departure, above, units, count, copies, is_lost: true };
                    self.leaving = Some(leaving);
                }
                None => {
                    self.miss(TierMiss::NoRoomOnHost);
                    self.drop_leaving(ledger, departure, above, false);
                }
            }
        }
        true
    }

    /// Queues the copies of what was begun, behind `stream`. On an error it is lost: [`Self::end_leaving`] gives it back.
    pub fn queue_leaving(&mut self, core: &Core<B>, stream: &Stream<B>) -> Result<(), KvError> {
        let Self { leaving: Some(leaving), out, .. } = self else { return Ok(()) };
        let missing = leaving.departure.blocks.split_off(leaving.above.blocks() as usize);
        let copies = leaving.copies.insert(HostCopies::new(&out.stream)?);
        out.follow(stream)?;
        out.send(&missing)?;
        for round in out.rounds(missing.len()) {
            out.copy(core, &round, CopyDirection::Save)?;
            copies
                .store(&out.staged(&round).view(), leaving.units.drain(..round.len()).collect())?;
        }
        let checkpoint = core.memory.state.checkpoint(leaving.departure.checkpoint.checkpoint);
        copies.store(&checkpoint.view(), std::mem::take(&mut leaving.units))?;
        copies.end()?;
        leaving.is_lost = false;
        Ok(())
    }

    /// Enters what has arrived, or gives back what was lost. Waits for it if it is to be `waited` for, or is lost.
    pub fn end_leaving(&mut self, ledger: &mut Ledger, waited: bool) -> Result<(), KvError> {
        let Some(leaving) = self.leaving.as_ref() else { return Ok(()) };
        if let (Some(copies), false) = (&leaving.copies, waited || leaving.is_lost)
            && !copies.is_done()?
        {
            return Ok(());
        }
        let Some(mut leaving) = self.leaving.take() else { return Ok(()) };
        let (bytes, settled) = match leaving.copies.take() {
            None => (0, Ok(Vec::new())),
            Some(copies) => (copies.bytes(), copies.settle()),
        };
        match settled {
            Err(unsettled) => {
                let Unsettled { copies, error } = *unsettled;
                leaving.copies = Some(copies);
                self.leaving = Some(leaving);
                Err(error.into())
            }
            Ok(units) => {
                let Leaving { departure, above, is_lost, .. } = leaving;
                if is_lost {
                    self.miss(TierMiss::Device);
                    self.drop_leaving(ledger, departure, above, true);
                } else {
                    self.enter_leaving(ledger, departure, above, (units, bytes));
                }
                Ok(())
            }
        }
    }

    /// The host has it now.
    fn enter_leaving(
        &mut self,
        ledger: &mut Ledger,
        departure: Departure,
        mut above: Reference,
        (units, bytes): (Vec<HostUnit<B>>, u64),
    ) {
        let new = &departure.tokens[above.blocks() as usize..];
        let mut units: Vec<_> = units.into_iter().map(Arc::new).collect();
        let checkpoint = units.split_off(new.len());
        let registered = self.tree.extend(&mut above, new, |index| units[index].clone(), drop);
        debug_assert!(registered.is_ok(), "the reference is this tree's");
        let (origin, has_draft) = (departure.origin, departure.checkpoint.has_draft);
        let checkpoint = HostCheckpoint { units: checkpoint, has_draft, origin };
        let blocks = departure.tokens.len() as u32;
        // One that is there is as good.
        if let Ok(place) = self.tree.attach(&above, blocks, origin, checkpoint) {
            self.offer(place);
        }
        self.stats.stored_blocks += new.len() as u64;
        self.stats.stored_checkpoints += 1;
        self.stats.bytes_to_host += bytes;
        let (tokens, blocks) = (departure.checkpoint.boundary, new.len() as u32);
        self.event(TierEvent::Stored { tokens, blocks, bytes });
        self.drop_leaving(ledger, departure, above, false);
    }

    fn drop_leaving(
        &mut self,
        ledger: &mut Ledger,
        departure: Departure,
        above: Reference,
        repeated: bool,
    ) {
        ledger.end_departure(departure, repeated);
        let released = self.tree.release(above, drop);
        debug_assert!(released.is_ok(), "the reference is this tree's");
    }
}
