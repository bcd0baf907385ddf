//! To the device: the blocks of a prompt that it does not have, and the checkpoint behind them.

use dsv4_kv_prefix::{Reference, RootKey};

use super::state::{Arriving, BLOCK, PrefetchId, Tier, Wanted};
use super::stats::{TierEvent, TierMiss};
use crate::core::Core;
use crate::device::{Backend, HostCopies, Stream, Unsettled};
use crate::error::KvError;
use crate::ledger::{Arrival, Ledger};
use crate::ops::CopyDirection;

impl<B: Backend> Tier<B> {
    /// Puts a prompt behind those that are to arrive.
    pub fn want(&mut self, root: RootKey, tokens: &[u32]) -> PrefetchId {
        let id = PrefetchId(self.next);
        self.next += 1;
        self.wanted.push_back(Wanted { id, root, tokens: tokens.to_vec() });
        id
    }

    /// Whether a prompt is still to arrive.
    pub fn is_wanted(&self, id: PrefetchId) -> bool {
        self.wanted.iter().any(|wanted| wanted.id == id) || self.is_arriving(id)
    }

    /// Whether it is on its way.
    pub fn is_arriving(&self, id: PrefetchId) -> bool {
        self.arriving.as_ref().is_some_and(|arriving| arriving.wanted.id == id)
    }

    /// A prompt is not wanted any more; `false` if it is here, or was never there.
    pub fn cancel(&mut self, id: PrefetchId) -> bool {
        let wanted = self.wanted.len();
        self.wanted.retain(|wanted| wanted.id != id);
        if self.wanted.len() < wanted {
            self.miss(TierMiss::Cancelled);
            return true;
        }
        let arriving = self.arriving.as_mut().filter(|arriving| arriving.wanted.id == id);
        arriving.is_some_and(|arriving| !std::mem::replace(&mut arriving.is_cancelled, true))
    }

    /// Whether there is something for the device to do: the next prompt that is to arrive, if none does, for which there
    /// is room now. What the device has, or the host has not, is passed over.
    ///
    /// # Errors
    /// [`KvError::OutOfBlocks`], [`KvError::OutOfCheckpoints`] for the prompt that comes next, which is passed over.
    pub fn begin_arriving(&mut self, ledger: &mut Ledger) -> Result<bool, KvError> {
        if self.arriving.is_some() {
            return Ok(false);
        }
        while self.arriving.is_none() {
            let Some(wanted) = self.wanted.pop_front() else { return Ok(false) };
            let here = ledger.reusable(&wanted.root, &wanted.tokens);
            if self.lookup(&wanted.root, &wanted.tokens).reusable <= here {
                self.miss(TierMiss::NotThere);
                continue;
            }
            let adopted = self.tree.adopt(&wanted.root, &wanted.tokens);
            let tokens =
                wanted.tokens.as_chunks::<BLOCK>().0[..adopted.reused as usize / BLOCK].to_vec();
            match ledger.begin_arrival(&wanted.root, &tokens) {
                Ok(Some(arrival)) => {
                    self.arriving = Some(self.arriving(wanted, tokens, arrival, adopted.reference));
                }
                Ok(None) => {
                    self.miss(TierMiss::NotThere);
                    self.release(adopted.reference);
                }
                Err(error) => {
                    self.miss(TierMiss::NoRoomOnDevice);
                    self.release(adopted.reference);
                    return Err(error);
                }
            }
        }
        Ok(true)
    }

    /// What is read for an arrival.
    fn arriving(
        &self,
        wanted: Wanted,
        tokens: Vec<[u32; BLOCK]>,
        arrival: Arrival,
        source: Reference,
    ) -> Arriving<B> {
        let (Ok(blocks), Ok(Some(checkpoint))) =
            (self.tree.blocks(&source), self.tree.checkpoint(&source))
        else {
            unreachable!("a prompt is adopted down to a checkpoint of this tree")
        };
        let missing = blocks.take_while(|&(number, _)| number >= arrival.above());
        let mut units: Vec<_> = missing.map(|(_, unit)| unit.clone()).collect();
        units.reverse();
        let (origin, has_draft) = (checkpoint.origin, checkpoint.has_draft);
        let units = (units, checkpoint.units.clone());
        let (copies, is_lost, is_cancelled) = (None, true, false);
        Arriving {
            wanted,
            tokens,
            arrival,
            units,
            origin,
            has_draft,
            copies,
            is_lost,
            is_cancelled,
            source,
        }
    }

    /// Queues the copies of what was begun, behind `stream`. On an error it is lost: [`Self::end_arriving`] gives it back.
    pub fn queue_arriving(&mut self, core: &Core<B>, stream: &Stream<B>) -> Result<(), KvError> {
        let Self { arriving: Some(arriving), back, layout, .. } = self else { return Ok(()) };
        let (units, checkpoint) = std::mem::take(&mut arriving.units);
        let copies = arriving.copies.insert(HostCopies::new(&back.stream)?);
        back.follow(stream)?;
        back.send(&arriving.arrival.blocks())?;
        for round in back.rounds(units.len()) {
            copies.load(units[round.clone()].iter().cloned(), &back.staged(&round))?;
            back.copy(core, &round, CopyDirection::Restore)?;
        }
        debug_assert_eq!(checkpoint.len(), layout.checkpoint_units as usize, "of this tier");
        let target = core.memory.state.checkpoint(arriving.arrival.checkpoint());
        copies.load(checkpoint, &target)?;
        copies.end()?;
        arriving.is_lost = false;
        Ok(())
    }

    /// Enters what has arrived, or gives back the room of what was lost or cancelled. Waits for it if it is to be `waited`
    /// for, or is lost.
    pub fn end_arriving(&mut self, ledger: &mut Ledger, waited: bool) -> Result<(), KvError> {
        let Some(arriving) = self.arriving.as_ref() else { return Ok(()) };
        if let (Some(copies), false) = (&arriving.copies, waited || arriving.is_lost)
            && !copies.is_done()?
        {
            return Ok(());
        }
        let Some(mut arriving) = self.arriving.take() else { return Ok(()) };
        let (bytes, settled) = match arriving.copies.take() {
            None => (0, Ok(Vec::new())),
            Some(copies) => (copies.bytes(), copies.settle()),
        };
        if let Err(unsettled) = settled {
            let Unsettled { copies, error } = *unsettled;
            arriving.copies = Some(copies);
            self.arriving = Some(arriving);
            return Err(error.into());
        }
        let Arriving { wanted, tokens, arrival, origin, has_draft, source, .. } = arriving;
        if arriving.is_cancelled || arriving.is_lost {
            ledger.drop_arrival(arrival);
            self.miss(if arriving.is_lost { TierMiss::Device } else { TierMiss::Cancelled });
            if !arriving.is_cancelled {
                self.wanted.push_front(wanted);
            }
        } else {
            let blocks = tokens.len() as u32 - arrival.above();
            let before = ledger.reusable(&wanted.root, &wanted.tokens);
            ledger.enter_arrival(arrival, &tokens, origin, has_draft);
            let reusable = (tokens.len() * BLOCK) as u32;
            self.stats.restored_blocks += u64::from(blocks);
            self.stats.restored_checkpoints += 1;
            self.stats.bytes_from_host += bytes;
            self.stats.restored_tokens += u64::from(reusable.saturating_sub(before));
            self.event(TierEvent::Restored { tokens: reusable, blocks, bytes });
        }
        self.release(source);
        Ok(())
    }
}
