//! Imports of requests from host or device memory: a whole request, or nothing.

use super::error::MoveError;
use super::memory::{Parts, PartsMut, check_length, part};
use super::parts::Positions;
use super::reservation::{Loaded, RequestReservation, Reserved};
use super::staging::TransferStaging;
use crate::device::{Backend, Buffer, Stream};
use crate::ids::RequestId;
use crate::manager::KvCacheManager;
use crate::poison::POISON;
use crate::pool_kind::PoolUnit;

impl<B: Backend> KvCacheManager<B> {
    /// Takes a slot and blocks for a request at `at`, all or none. Evicts unreferenced prefixes if needed.
    ///
    /// # Errors
    /// [`MoveError::Cache`]: [`KvError::NoFreeSlot`](crate::KvError::NoFreeSlot),
    /// [`KvError::OutOfBlocks`](crate::KvError::OutOfBlocks),
    /// [`KvError::NoSuchGroup`](crate::KvError::NoSuchGroup) for positions in draft layers that the model does not have;
    /// [`MoveError::DraftAhead`], [`MoveError::TooLong`].
    pub fn reserve(&mut self, at: Positions) -> Result<Reserved, MoveError> {
        self.reject_leaked_steps();
        Ok(Reserved(self.ledger_mut().reserve_request(at)?))
    }

    /// Ends a reservation, empty or loaded: its slot and blocks are free again.
    ///
    /// # Errors
    /// The reservation, if it belongs to another cache.
    pub fn give_back(&mut self, reserved: impl Into<Reserved>) -> Result<(), Reserved> {
        let Reserved(reservation) = reserved.into();
        let ledger = self.ledger_mut();
        if !ledger.owns_reservation(&reservation) {
            return Err(Reserved(reservation));
        }
        let slot = reservation.slot;
        ledger.cancel_reservation(reservation);
        self.poison_slot(slot);
        Ok(())
    }

    /// Writes the parts of a request, one after the other in `payload` in the order of
    /// [`PartLayout::parts`](super::PartLayout::parts), to the slot and blocks that were reserved for it, and enters
    /// the blocks in the device's block table. Rows are written at the ring places of their positions, so rings may
    /// have another size than those of the source. The bytes are not checked: the caller must make sure that they
    /// belong to the request.
    ///
    /// # Errors
    /// [`MoveError::ForeignStaging`], [`MoveError::ForeignReservation`], [`MoveError::Length`], [`MoveError::Cache`] if
    /// the device fails. The reservation is ended; if it belongs to another cache, it is in the error.
    pub fn load(
        &mut self,
        stream: &Stream<B>,
        staging: &mut TransferStaging<B>,
        reserved: Reserved,
        payload: &[u8],
    ) -> Result<Loaded, MoveError> {
        self.load_from(stream, staging, reserved, Parts::Host(payload))
    }

    /// As [`Self::load`], from memory of either kind.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn load_from(
        &mut self,
        stream: &Stream<B>,
        staging: &mut TransferStaging<B>,
        reserved: Reserved,
        payload: Parts<'_, B>,
    ) -> Result<Loaded, MoveError> {
        self.reject_leaked_steps();
        if !self.core().read_ledger().owns_reservation(&reserved.0) {
            return Err(MoveError::ForeignReservation(reserved));
        }
        match self.write_reserved(stream, staging, &reserved.0, payload) {
            Ok(()) => Ok(Loaded(reserved.0)),
            Err(error) => {
                // Copies that were queued before the failure must not write the slot and the blocks after they have a
                // new owner. If a device error prevents the wait, no copy runs. If a capture prevents it, the next
                // owner uses them in the order of the cache's steps, after these copies.
                let _ = stream.synchronize();
                self.give_back(reserved).map_err(MoveError::ForeignReservation)?;
                Err(error)
            }
        }
    }

    /// Admits a loaded request, which continues as one that was computed in this cache. It does not use
    /// the prefix tree.
    ///
    /// # Errors
    /// The loaded request, if it belongs to another cache.
    pub fn enter(&mut self, loaded: Loaded) -> Result<RequestId, Loaded> {
        let ledger = self.ledger_mut();
        if ledger.owns_reservation(&loaded.0) {
            Ok(ledger.enter_reserved(loaded.0))
        } else {
            Err(loaded)
        }
    }

    /// [`Self::reserve`], [`Self::load`] and [`Self::enter`]: all of a request, or nothing. The positions must be those
    /// of the export that made the payload ([`Export::positions`](super::Export::positions)): other positions with
    /// parts of equal sizes are not detected, and the request would have wrong rows.
    ///
    /// # Errors
    /// As these. Then nothing has changed, except that prefixes may have been evicted.
    pub fn import(
        &mut self,
        stream: &Stream<B>,
        staging: &mut TransferStaging<B>,
        (at, payload): (Positions, &[u8]),
    ) -> Result<RequestId, MoveError> {
        // Checked before anything is evicted.
        self.core().read_ledger().check_positions(at)?;
        self.check_load(stream, staging, (at, payload.len() as u64))?;
        let reserved = self.reserve(at)?;
        let loaded = self.load(stream, staging, reserved, payload)?;
        self.enter(loaded).map_err(|loaded| MoveError::ForeignReservation(loaded.into()))
    }

    fn check_load(
        &self,
        stream: &Stream<B>,
        staging: &TransferStaging<B>,
        (at, found): (Positions, u64),
    ) -> Result<(), MoveError> {
        self.core().check_stream(stream)?;
        self.check_staging(staging)?;
        check_length(staging.layout.bytes(at), found)
    }

    fn write_reserved(
        &mut self,
        stream: &Stream<B>,
        staging: &mut TransferStaging<B>,
        reservation: &RequestReservation,
        payload: Parts<'_, B>,
    ) -> Result<(), MoveError> {
        self.check_load(stream, staging, (reservation.at, payload.bytes()))?;
        let _running = stream.running("moving a request or a prefix")?;
        // Pending poison must be written before the rows.
        self.follow_steps(stream)?;
        let blocks = reservation.block_ids();
        match payload {
            Parts::Host(payload) => self.write_from_host(stream, staging, reservation, payload)?,
            Parts::Device(payload) => {
                self.write_from_device(stream, staging, reservation, &payload)?
            }
        }
        let table = Some((reservation.slot, &blocks[..]));
        self.queue_copies(stream, &[], table).map_err(crate::KvError::from)?;
        // Device errors are reported before the request counts as loaded.
        Ok(stream.synchronize()?)
    }

    /// The byte that fills rows which no kernel has written.
    fn unwritten(&self) -> u8 {
        if self.config().poison { POISON } else { 0 }
    }

    fn write_from_host(
        &self,
        stream: &Stream<B>,
        staging: &mut TransferStaging<B>,
        reservation: &RequestReservation,
        payload: &[u8],
    ) -> Result<(), MoveError> {
        let (core, unwritten) = (self.core(), self.unwritten());
        let (units, full) = units(reservation);
        let bytes = staging.layout.block_bytes() as usize;
        let (of_blocks, mut of_state) = payload.split_at(bytes * units.len());
        let (images, last) = of_blocks.split_at(bytes * full);
        staging.store(core, stream, (PoolUnit::Block, &units[..full]), Parts::Host(images))?;
        if !last.is_empty() {
            let mut last = last.to_vec();
            let tokens = staging.layout.block(full as u32, reservation.at.trunk).entries;
            staging.fill_holes(stream, (tokens, unwritten), PartsMut::Host(&mut last))?;
            staging.store(core, stream, (PoolUnit::Block, &units[full..]), Parts::Host(&last))?;
        }
        let mut slot = vec![unwritten; staging.slot_bytes()];
        for part in staging.layout.state(reservation.at) {
            let rows = of_state.split_off(..part.bytes as usize).expect("they were counted");
            staging.rows.put(&part, rows, &mut slot);
        }
        staging.store(core, stream, (PoolUnit::Slot, &[reservation.slot.0]), Parts::Host(&slot))
    }

    /// As `write_from_host`, without copying any byte through host memory.
    fn write_from_device(
        &self,
        stream: &Stream<B>,
        staging: &mut TransferStaging<B>,
        reservation: &RequestReservation,
        payload: &Buffer<B, u8>,
    ) -> Result<(), MoveError> {
        let (core, unwritten) = (self.core(), self.unwritten());
        let (units, full) = units(reservation);
        let bytes = staging.layout.block_bytes() as usize;
        let images = part(payload, 0..bytes * full);
        staging.store(core, stream, (PoolUnit::Block, &units[..full]), Parts::Device(images))?;
        if full < units.len() {
            let last = staging.images(bytes);
            stream.copy(&part(payload, bytes * full..bytes * (full + 1)).view(), &last)?;
            let tokens = staging.layout.block(full as u32, reservation.at.trunk).entries;
            staging.fill_holes(stream, (tokens, unwritten), PartsMut::Device(last.clone()))?;
            staging.store(core, stream, (PoolUnit::Block, &units[full..]), Parts::Device(last))?;
        }
        let (slot, mut at) = (staging.images(staging.slot_bytes()), bytes * units.len());
        stream.fill(&slot, unwritten)?;
        let parts: Vec<_> = staging.layout.state(reservation.at).collect();
        for to in parts.iter().flat_map(|part| staging.rows.runs(part)) {
            let from = part(payload, at..at + to.len());
            at += to.len();
            stream.copy(&from.view(), &part(&slot, to))?;
        }
        staging.store(core, stream, (PoolUnit::Slot, &[reservation.slot.0]), Parts::Device(slot))
    }
}

/// The blocks of a reservation, and the number of full ones; at most one block is not full.
fn units(reservation: &RequestReservation) -> (Vec<u32>, usize) {
    let units: Vec<_> = reservation.block_ids().iter().map(|block| block.0).collect();
    let full = (reservation.at.trunk / kv_layout::geometry::BLOCK_TOKENS) as usize;
    let full = full.min(units.len());
    (units, full)
}
